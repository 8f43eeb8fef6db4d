"""The fetcher: brings blocks of immutable objects into memory, each once, soonest wanted first.

**A block** goes through these states (`records.Status`; all transitions are in `scheduler` and
its parts):

    absent ──want──► WANTED ──start──► IN_FLIGHT ──verified──► READY ──evicted──► absent
                       ▲                   │  └──verified, in its reader's own memory──► absent
                       └──retry, back-off──┤
                                           └──final error, or no longer wanted──► absent

* *absent*: no record. *WANTED*: something waits for it, and a job in its store's queue has it (or
  a plan is being made, or a retry's time has not come). *IN_FLIGHT*: one request brings it, or two
  when the first is slow (a hedge). *READY*: verified, in memory of the pool.
* **Single flight**: a read of a block that is WANTED or IN_FLIGHT joins its waiters. A higher
  priority takes a WANTED block out of its job, into one of its own ahead of all lower ones; the
  old job skips it. The requests of a block IN_FLIGHT are promoted, so that they may be hedged.
* **Jobs** are planned (`plan`) outside the lock from the blocks that one call made WANTED, and
  wait in one queue a store, by priority, then age. A free worker takes the first job that the
  connection budget allows: all connections for demand, seven eighths for hot, half for
  background, and only one background request while demand is under way.

**Ownership of memory.**

* Pool memory belongs to one request from its start until the block arrives, then to the block
  until it is evicted; it is never evicted while pinned (`HeldBytes`, or a copy being made). What a
  request did not turn into a READY block is given back when the *request has returned*, never
  before: the slower of two requests for a block writes into memory that it still owns.
* A whole block is fetched directly into its reader's own buffer. At most one request at a time
  may write there; a hedge or a retry that starts before that one returned uses the pool. A read
  returns only when no request may write to its buffer any more (`Waiter.writing`): when it fails
  or passes its deadline, the requests that write there are cancelled and waited for. That takes as
  long as the store needs to notice, `stall_s` at the very most. `hold` has no such memory, so its
  deadline is exact.
* Other waiters for a block that is fetched into a reader's buffer get a copy, made before that
  read returns.

**Locks.** One lock guards the scheduler, and `workers.Decision` is the way to it: decide inside,
and the decisions are carried out on leaving. Nothing under the lock blocks: no I/O, no mapping
of memory, no copy above 32 KiB, no call into a source or store (`replicas` and `locate` included),
no callback. The locks of a slab (mapping), of an `Attempt`, of a cached object and of the
statistics are leaves: they may be taken anywhere, and no other lock is taken under them. Callbacks
(`deliver`) and `Attempt.cancel` run outside all locks, after the decision; they may call the
fetcher again.

**Time.** A clock thread, which runs only while something is under way, starts due retries, hedges
requests that stand still, and ends reads by `hold` at their deadline. Threads that wait watch
their own deadlines.

**Forks.** Threads and connections do not survive `fork`: a child must make a fetcher of its own;
one that was inherited raises UsageError.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from bootseer.blocks.cache.direct_reads import DirectReads
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.ranges import Range, wants_of
from bootseer.blocks.fetch.readahead import ReadAhead, Share
from bootseer.blocks.fetch.records import Waiter
from bootseer.blocks.fetch.scheduler import Want
from bootseer.blocks.fetch.slabs import SMALL_COPY_BYTES, writable
from bootseer.blocks.fetch.workers import Workers
from bootseer.blocks.settings import DEFAULTS, FetchSettings, Priority
from bootseer.blocks.source import BlockSource
from bootseer.blocks.stats import Stats
from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, DeadlineError, StoreUnavailableError, UsageError
from bootseer.storage.retry import another

if TYPE_CHECKING:
    from bootseer.storage.store import Store


from contextlib import AbstractContextManager

from bootseer.blocks.fetch.records import Block
from bootseer.blocks.fetch.scheduler import Scheduler


class HeldBytes:
    """Bytes in the fetcher's memory as `views`, readable until `release` is called."""

    __slots__ = ("_blocks", "_decision", "views")

    def __init__(
        self,
        decision: AbstractContextManager[Scheduler],
        blocks: list[Block],
        views: list[memoryview],
    ) -> None:
        self._decision, self._blocks, self.views = decision, blocks, views

    @classmethod
    def of(
        cls,
        decision: AbstractContextManager[Scheduler],
        blocks: list[Block],
        offset: int,
        length: int,
        block_bytes: int,
    ) -> HeldBytes:
        """A range of pinned blocks, which it unpins when it is released."""
        views = []
        for block in sorted(blocks, key=lambda b: b.index):
            begin = block.index * block_bytes
            start, stop = max(0, offset - begin), min(block.length, offset + length - begin)
            if block.slot is None:
                raise AssertionError("a pinned block lost its memory")
            views.append(block.slot.view[start:stop])
        return cls(decision, blocks, views)

    def release(self) -> None:
        """Let the memory be used again; twice is safe."""
        if not self._blocks:
            return
        with self._decision as scheduler, scheduler.lock:
            blocks, self._blocks = self._blocks, []
            for block in blocks:
                scheduler.memory.unpin(block)


class Ticket:
    """A prefetch under way."""

    __slots__ = ("_decision", "_ended", "_waiter")

    def __init__(
        self,
        decision: AbstractContextManager[Scheduler],
        waiter: Waiter,
        ended: threading.Event,
    ) -> None:
        self._decision, self._waiter, self._ended = decision, waiter, ended

    def cancel(self) -> None:
        """Give up blocks that no request has begun with, unless other readers wait for them."""
        with self._decision as scheduler, scheduler.lock:
            scheduler.waiters.withdraw(self._waiter)

    @property
    def done(self) -> bool:
        """Whether it ended: all blocks arrived, or it failed, or was cancelled."""
        return self._waiter.finished

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; True when every block arrived."""
        self._ended.wait(timeout_s)
        waiter = self._waiter
        return waiter.finished and not waiter.closed and waiter.error is None


__all__ = ["Deliver", "FetchSettings", "Fetcher", "HeldBytes", "Priority", "Ticket"]

LEAST_CHUNK = 64
Deliver = Callable[[HeldBytes | Exception], None]


class Fetcher(Closing):
    """See the module text. One a process; a context manager; every method is thread-safe."""

    def __init__(
        self,
        settings: FetchSettings = DEFAULTS,
        *,
        cache: NodeCache | None = None,
        stats: Stats | None = None,
    ) -> None:
        self.settings = settings
        self._workers = Workers(settings, cache, stats)
        self._decision = self._workers.decision
        self._share = Share(settings.memory_bytes // 2)
        self._pid = os.getpid()

    @property
    def stats(self) -> Stats:
        """What was fetched, and what it cost."""
        return self._workers.stats

    @property
    def memory_bytes(self) -> int:
        """Memory mapped for blocks now."""
        return self._workers.scheduler.memory.pool.mapped_bytes

    # --- reads that wait ---------------------------------------------------------------------

    def read_into(
        self,
        source: BlockSource,
        offset: int,
        buffer: memoryview | bytearray,
        *,
        priority: Priority = Priority.DEMAND,
        deadline_s: float | None = None,
    ) -> int:
        """Fill `buffer` with the object's bytes from `offset` on; returns how many there were.

        Fewer only at the end of the object. Any size: whole blocks go into `buffer` directly.
        Raises the last error of a block that failed, CorruptDataError when no replica's bytes
        were right, DeadlineError after `deadline_s` (default: the settings'), and TypeError for
        read-only memory. After an error the contents of `buffer` are undefined.
        """
        view, offset = writable(buffer), operator.index(offset)
        self._check_process()
        if len(view) <= SMALL_COPY_BYTES and self._workers.copy_small(source, offset, view):
            return len(view)
        return self.read_many([(source, offset, view)], priority=priority, deadline_s=deadline_s)[0]

    def read_many(
        self,
        ranges: Sequence[Range],
        *,
        priority: Priority = Priority.DEMAND,
        deadline_s: float | None = None,
    ) -> list[int]:
        """As `read_into` for many ranges, of one or several objects, all at once.

        Returns the bytes of each. A block that several ranges touch is fetched once.
        """
        self._check_process()
        counts, wants = wants_of(ranges)
        if deadline_s is None:
            deadline_s = self.settings.demand_deadline_s
        limit_s = time.monotonic() + deadline_s
        waiter = Waiter(priority, remaining=1)  # until all is wanted
        try:
            for source, wanted in wants:
                self._want(source, wanted, waiter)
            self._wait(waiter, limit_s)
        except BaseException:  # an interrupt too: buffers must not be filled after this
            self._end(waiter, StoreUnavailableError("a read was given up"))
            with self._decision as scheduler, scheduler.lock:
                scheduler.waiters.withdraw(waiter)  # from blocks that it did not copy yet
            raise
        return counts

    def _want(self, source: BlockSource, wants: Iterable[Want], waiter: Waiter) -> None:
        """Ask for blocks, some rounds of requests at a time, so that the first start soon."""
        rest = iter(wants)
        while True:
            with self._decision as scheduler, scheduler.lock:
                if waiter.closed:
                    return
                if self._workers.closed:
                    raise _closed_error()
                record = scheduler.memory.record_of(source)
                round_bytes = record.range_bytes * record.queue.streams
                most = max(LEAST_CHUNK, round_bytes // source.block_bytes)
                chunk = list(islice(rest, most))
                ready = scheduler.want(record, chunk, waiter)
            if ready:
                self._workers.copy_ready(ready)
            if len(chunk) < most:
                return

    def _wait(self, waiter: Waiter, limit_s: float) -> None:
        """Wait until a read has all its blocks; raises its error."""
        done = None
        with self._decision as scheduler, scheduler.lock:
            missing = next(iter(waiter.blocks), None)
            waiter.remaining -= 1
            if not waiter.finished:
                done = threading.Event()
                waiter.on_done = done.set
        if done is not None:
            began_ns = time.monotonic_ns()
            if not done.wait(limit_s - time.monotonic()):
                self._end(waiter, DeadlineError("a read was not done in time; see the store"))
            if missing is not None and waiter.priority is Priority.DEMAND:
                waited_ns = time.monotonic_ns() - began_ns
                source_class = missing.object.source.source_class
                self._workers.stats.add(source_class, demand_waits=1, blocked_ns=waited_ns)
        if waiter.error is not None:
            raise _again(waiter.error)
        if waiter.late:
            late, waiter.late = waiter.late, []
            self._workers.copy_ready([(block, (copy,)) for block, copy in late])

    def _end(self, waiter: Waiter, error: Exception) -> None:
        """Fail a read, unless it is finished, and wait until no request writes to its memory."""
        done = threading.Event()
        with self._decision as scheduler, scheduler.lock:
            if waiter.finished:
                return
            waiter.on_done = done.set
            scheduler.waiters.fail(waiter, error)
        done.wait()

    # --- reads that do not -------------------------------------------------------------------

    def hold(
        self,
        source: BlockSource,
        offset: int,
        length: int,
        deliver: Deliver | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> HeldBytes | None:
        """Bytes that are in memory, without a copy; else None, and they are fetched.

        Then `deliver` is called once, from any thread, perhaps before this returns, with the
        bytes or with the error. It releases the bytes, unless it raises; they are fewer than
        `length` only at the end of the object.
        """
        self._check_process()
        length = min(length, source.size_bytes - offset)
        if length <= 0 or offset < 0:
            return HeldBytes(self._decision, [], [])
        size = source.block_bytes
        first, last = offset // size, (offset + length - 1) // size
        waiter: Waiter | None = None
        try:
            with self._decision as scheduler, scheduler.lock:
                if self._workers.closed:
                    raise _closed_error()
                memory = scheduler.memory
                record = memory.record_of(source)
                blocks = memory.ready_blocks(record, first, last)
                if blocks is None:
                    waiter = Waiter(priority, keep=deliver is not None)
                    if deliver is not None:
                        span = (offset, length, size)
                        waiter.on_done = functools.partial(self._deliver, waiter, span, deliver)
                    wants = map(Want, range(first, last + 1))
                    scheduler.want_in_time(record, wants, waiter, time.monotonic())
                    return None
                for block in blocks:
                    memory.pin(block)
        except BaseException:  # no thread could be started, say
            if waiter is not None and not self._forget(waiter):
                return None
            raise
        return HeldBytes.of(self._decision, blocks, offset, length, size)

    def _forget(self, waiter: Waiter) -> bool:
        """Withdraw a read; False when it has been delivered, or is about to be."""
        with self._decision as scheduler, scheduler.lock:
            if waiter.keep and waiter.on_done is None:
                return False
            scheduler.waiters.forget(waiter)
            return True

    def _deliver(self, waiter: Waiter, span: tuple[int, int, int], deliver: Deliver) -> None:
        """Deliver a `hold` whose blocks are pinned, or that failed."""
        if waiter.error is not None:
            deliver(_again(waiter.error))
            return
        held = HeldBytes.of(self._decision, waiter.pinned, *span)
        try:
            deliver(held)
        except BaseException:  # its receiver will not release them
            held.release()
            raise

    def prefetch(
        self,
        source: BlockSource,
        offset: int,
        length: int,
        priority: Priority = Priority.BACKGROUND,
    ) -> Ticket:
        """Start fetching a range into memory (and the node cache); returns at once.

        HOT is for blocks that will be read soon (read-ahead, replay), BACKGROUND for filling a
        cache. Keep the range much smaller than `memory_bytes`, or issue it in pieces: blocks that
        exceed that memory evict those that arrived before.
        """
        self._check_process()
        ended = threading.Event()
        waiter = Waiter(priority, ended.set, remaining=1)  # until all is wanted
        length = min(length, source.size_bytes - offset)
        if length > 0:
            size = source.block_bytes
            indices = range(offset // size, (offset + length - 1) // size + 1)
            self._want(source, map(Want, indices), waiter)
        with self._decision as scheduler, scheduler.lock:
            waiter.remaining -= 1
            scheduler.waiters.call_if_done(waiter)
        return Ticket(self._decision, waiter, ended)

    def read_ahead(self, source: BlockSource) -> ReadAhead:
        """Follow the reads of one open handle of a source: all handles share half the memory.

        Pass each read to `note`, and what that returns to `prefetch` at HOT priority.
        """
        return ReadAhead(source.size_bytes, self._share, block_bytes=source.block_bytes)

    def direct_reads(self, source: BlockSource) -> DirectReads | None:
        """Direct reads of a source's blocks that the node cache has and this process has verified.

        None where the source is not cached. May do I/O. Where the source has no digests, the
        caller must ask it about each read, as with `hold`.
        """
        self._check_process()
        return self._workers.direct_reads(source)

    # --- letting go --------------------------------------------------------------------------

    def forget(self, source: BlockSource) -> None:
        """Drop an object's blocks from memory and unpin it in the node cache.

        Blocks that are held or under way are dropped when that ends. The object may be read again.
        """
        with self._decision as scheduler, scheduler.lock:
            record = scheduler.memory.known_record(source)
            if record is not None:
                scheduler.memory.forget(record)

    def forget_store(self, store: Store) -> None:
        """`forget` every object that is read from a store which its owner closes.

        An object is read from the store that named it first: without this, a later read of the
        same bytes would use a store that is never closed again.
        """
        if os.getpid() != self._pid:
            return  # it is the parent's, and so are the objects
        with self._decision as scheduler, scheduler.lock:
            for record in list(scheduler.memory.objects.values()):
                if record.source.store is store:
                    scheduler.memory.forget(record)

    def look_at_requests(self) -> tuple[int, int]:
        """The bytes that requests have brought so far, also of ones not done; how many are open."""
        with self._decision as scheduler, scheduler.lock:
            requests = list(scheduler.queues.requests)
            received_bytes = sum(request.attempt.received_bytes for request in requests)
        return self.stats.total().bytes + received_bytes, len(requests)

    def give_up(self, stalled_s: float) -> None:
        """Fail each read by `hold` that has waited `stalled_s` while its store sent nothing at all.

        For a process that is asked to end, whatever `demand_deadline_s` is.
        """
        self._check_process()
        with self._decision as scheduler, scheduler.lock:
            scheduler.waiters.give_up(stalled_s, time.monotonic())

    def close(self) -> None:
        """End every request; reads that wait raise StoreUnavailableError. Twice is safe."""
        if os.getpid() == self._pid:
            self._workers.close()

    # --- inside ------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("a fetcher does not survive fork; make a new one in the child process")


def _closed_error() -> UsageError:
    return UsageError("the fetcher is closed; make a new one")


def _again(error: Exception) -> Exception:
    """An error that several readers get: one exception object each."""
    if isinstance(error, BootseerError):
        return another(error)
    return error
