"""The fetcher: brings blocks of immutable objects into memory, each once, soonest wanted first.

**A block** goes through these states (`state.Status`; all transitions are in `Board`'s layers):

    absent ──want──► WANTED ──take──► FLYING ──verified──► READY ──evicted──► absent
                       ▲                 │  └──verified, whole in its reader's memory──► absent
                       └──retry, backoff─┤
                                         └──final error, or nobody wants it──► absent

* *absent*: no record. *WANTED*: somebody waits, a job in its store's line has it (or a plan is
  being made, or a retry's time has not come). *FLYING*: one request brings it, or two when the
  first is slow (a hedge). *READY*: verified, in memory of the pool.
* **Single flight**: whoever wants a block that is WANTED or FLYING joins its waiters. A higher
  priority takes a WANTED block out of its job, into one of its own ahead of all lower ones; the
  old job skips it. A FLYING block's requests are promoted, so that they may be hedged.
* **Jobs** are planned (`plan`) outside the lock from the blocks that one call made WANTED, and
  wait in one line a store, by priority, then age. A free worker takes the first job that the
  connection budget allows: all connections for demand, seven eighths for hot, half for
  background, and only one background request while demand is under way.

**Who owns memory when.**

* Pool memory belongs to one flight from `take` until the block settles, then to the block until
  it is evicted; it is never evicted while pinned (`Held`, or a copy being made). What a flight
  did not turn into a READY block goes back when the *request has returned*, never before: a late
  loser of a hedge writes into memory that is still its own.
* A reader's own buffer takes a whole block directly (a *landing*). At most one request has a
  landing at a time; a hedge or a retry that starts before that one returned uses the pool. A
  reader comes back only when no request may write to its buffer any more (`Group.writing`): when
  it fails or passes its deadline, the requests writing there are cancelled and waited for. That
  takes as long as the store needs to notice, `stall_s` at the very most. `held` has no such
  memory, so its deadline is exact.
* Others who wait for a block that lands get a copy, made before the owner of the landing is told.

**Locks.** One lock guards the board; nothing under it blocks: no I/O, no mapping of memory, no
copy above 32 KiB, no call into a source or store (`replicas` and `locate` included), no callback.
The locks of a slab (mapping), of an `Attempt`, of a cached object and of the statistics are leaves:
they may be taken by anybody and take no other. Callbacks (`ready`) and `Attempt.cancel` run
outside all locks, after the decision; they may call the fetcher again.

**Time.** A clock thread, there only while something is under way, starts due retries, hedges
requests that stand still, and ends `held` reads at their deadline. Readers that block look after
their own.

**Forks.** Threads and connections do not survive `fork`: a child must make a fetcher of its own;
one that was inherited raises UsageError.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from bootseer.blocks.cache.direct_reads import Straight
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.handles import Held, Ticket
from bootseer.blocks.fetch.plan.ranges import Range, views_of, wants_of
from bootseer.blocks.fetch.plan.readahead import ReadAhead, Share
from bootseer.blocks.fetch.records import Group, Object, Status
from bootseer.blocks.fetch.scheduler import Want
from bootseer.blocks.fetch.slabs import SMALL_COPY_BYTES, writable
from bootseer.blocks.fetch.workers import Engine
from bootseer.blocks.settings import DEFAULTS, FetchSettings, Priority
from bootseer.blocks.source import BlockSource, memory_key
from bootseer.blocks.stats import Stats
from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, DeadlineError, StoreUnavailableError, UsageError
from bootseer.storage.retry import another

if TYPE_CHECKING:
    from bootseer.storage.store import Store

__all__ = ["FetchSettings", "Fetcher", "Held", "Priority", "Ticket"]

LEAST_CHUNK = 64


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
        self._engine = Engine(settings, cache, stats)
        self._share = Share(settings.memory_bytes // 2)
        self._pid = os.getpid()

    @property
    def stats(self) -> Stats:
        """What was fetched, and what it cost."""
        return self._engine.stats

    @property
    def memory_bytes(self) -> int:
        """Memory mapped for blocks now."""
        return self._engine.board.pool.mapped_bytes

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

        Fewer only at the end of the object. Any size: whole blocks land in `buffer` itself.
        Raises the last error of a block that failed, CorruptDataError when no replica's bytes
        were right, DeadlineError after `deadline_s` (default: the settings'), and TypeError for
        read-only memory. After an error the contents of `buffer` are undefined.
        """
        view, offset = writable(buffer), operator.index(offset)
        if len(view) <= SMALL_COPY_BYTES and self._read_ready(source, offset, view):
            return len(view)
        return self.read_many([(source, offset, view)], priority=priority, deadline_s=deadline_s)[0]

    def read_many(
        self,
        jobs: Sequence[Range],
        *,
        priority: Priority = Priority.DEMAND,
        deadline_s: float | None = None,
    ) -> list[int]:
        """As `read_into` for many ranges, of one or several objects, all at once.

        Returns the bytes of each. A block that several ranges touch is fetched once.
        """
        group = Group(priority)
        self._usable()
        counts, wants = wants_of(jobs)
        limit_s = time.monotonic() + (
            self.settings.demand_deadline_s if deadline_s is None else deadline_s
        )
        try:
            for source, wanted in wants:
                self._submit(source, wanted, group)
            self._wait(group, limit_s)
        except BaseException:  # an interrupt too: buffers must not be filled after this
            self._abandon(group)
            raise
        return counts

    def _submit(self, source: BlockSource, wants: Iterable[Want], group: Group) -> None:
        """Want blocks, some rounds of requests at a time, so that the first are soon under way."""
        engine = self._engine
        rest = iter(wants)
        while True:
            with engine.lock:
                if group.closed:
                    return
                self._check_open()
                found = engine.board.object_of(source)
                round_bytes = found.range_bytes * found.line.streams
                chunk = list(islice(rest, max(LEAST_CHUNK, round_bytes // source.block_bytes)))
                if not chunk:
                    return
                ready = engine.board.want(found, chunk, group)
                effects = engine.effects()
            engine.act(effects)
            if ready:
                engine.copy_now(ready)

    def held(
        self,
        source: BlockSource,
        offset: int,
        length: int,
        ready: Callable[[], None] | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Held | None:
        """Bytes in memory without a copy, if they are there; else None, and they are fetched.

        `ready()` is called once, from a fetch thread, when they have arrived or failed: then call
        again with the same range, which returns them or raises. (Should it return None once more,
        because somebody else took the call's place and memory was short, `ready` will be called
        once more.) What was announced and nobody came for is let go after `claim_s`. The bytes
        are fewer than `length` only at the end of the object.
        """
        engine = self._usable()
        length = min(length, source.size_bytes - offset)
        if length <= 0 or offset < 0:
            return Held(engine, [], [])
        size = source.block_bytes
        first, last = offset // size, (offset + length - 1) // size
        with engine.lock:
            self._check_open()
            board = engine.board
            found = board.object_of(source)
            claim = board.collect(found, (offset, length))
            blocks = claim.pinned if claim is not None else board.all_ready(found, first, last)
            if claim is None and blocks is not None:
                for block in blocks:
                    board.pin(block)
            if blocks is None:
                self._start_held(found, (offset, length), ready, priority)
            effects = engine.effects()
        engine.act(effects)
        if claim is not None and claim.error is not None:
            raise _again(claim.error)
        if blocks is None:
            return None
        return Held(engine, blocks, views_of(blocks, offset, length, size))

    def _start_held(
        self,
        found: Object,
        span: tuple[int, int],
        ready: Callable[[], None] | None,
        priority: Priority,
    ) -> None:
        board, size = self._engine.board, found.source.block_bytes
        now_s = time.monotonic()
        deadline_s = now_s + board.patience_s(found, now_s)
        keep = ready is not None
        group = Group(priority, keep=keep, callback=ready, deadline_s=deadline_s)
        indices = range(span[0] // size, (span[0] + span[1] - 1) // size + 1)
        board.want(found, map(Want, indices), group)
        if keep:
            board.hold(found, span, group)

    def prefetch(
        self,
        source: BlockSource,
        offset: int,
        length: int,
        priority: Priority = Priority.BACKGROUND,
    ) -> Ticket:
        """Start fetching a range into memory (and the node cache); returns at once.

        HOT for what will be asked for soon (read-ahead, replay), BACKGROUND for filling a cache.
        Keep the range small against `memory_bytes`, or issue it in pieces: what arrives beyond
        it pushes out what arrived before.
        """
        engine, group = self._usable(), Group(priority)
        group.remaining = 1  # until all is said
        length = min(length, source.size_bytes - offset)
        if length > 0:
            size = source.block_bytes
            indices = range(offset // size, (offset + length - 1) // size + 1)
            self._submit(source, map(Want, indices), group)
        with engine.lock:
            engine.board.submitted(group)
            effects = engine.effects()
        engine.act(effects)
        return Ticket(engine, group)

    def read_ahead(self, source: BlockSource) -> ReadAhead:
        """Follow the reads of one open handle of a source: all handles share half the memory.

        Pass each read to `note`, and what that returns to `prefetch` at HOT priority.
        """
        return ReadAhead(source.size_bytes, self._share, block_bytes=source.block_bytes)

    def straight(self, source: BlockSource) -> Straight | None:
        """Reads of what the node cache has of a source and this process has verified.

        None where nothing of it is cached. May do I/O. A source without digests must be asked
        about each read as about `held`.
        """
        return self._usable().straight(source)

    def forget(self, source: BlockSource) -> None:
        """Drop what memory holds of an object and unpin it in the node cache.

        What is held or under way is dropped when that ends. Reading the object again is fine.
        """
        engine = self._engine
        with engine.lock:
            found = engine.board.objects.get(memory_key(source))
            if found is not None:
                engine.board.forget(found)
            effects = engine.effects()
        engine.act(effects)

    def forget_store(self, store: Store) -> None:
        """`forget` every object that is read from a store which its owner closes.

        An object is read from the store that named it first: without this, who reads the same
        bytes later would do so by a store that nobody closes any more.
        """
        if os.getpid() != self._pid:
            return  # it is the parent's, and so are the objects
        engine = self._engine
        with engine.lock:
            for found in list(engine.board.objects.values()):
                if found.source.store is store:
                    engine.board.forget(found)
            effects = engine.effects()
        engine.act(effects)

    def give_up(self, stalled_s: float) -> None:
        """Fail each read by `held` that has waited so long while its store brought nothing at all.

        For who need not wait any longer, whatever `demand_deadline_s` is.
        """
        engine = self._usable()
        with engine.lock:
            engine.board.give_up(stalled_s, time.monotonic())
            effects = engine.effects()
        engine.act(effects)

    def close(self) -> None:
        """End every request; who waits gets StoreUnavailableError. Twice is safe."""
        if os.getpid() == self._pid:
            self._engine.close()

    # --- inside ------------------------------------------------------------------------------

    def _usable(self) -> Engine:
        if os.getpid() != self._pid:
            raise UsageError("a fetcher does not survive fork; make a new one in the child process")
        return self._engine

    def _check_open(self) -> None:
        if self._engine.closed:
            raise UsageError("the fetcher is closed; make a new one")

    def _read_ready(self, source: BlockSource, offset: int, view: memoryview) -> bool:
        """Copy a few bytes of one block that is in memory; False when it is not as simple."""
        engine, size, length = self._usable(), source.block_bytes, len(view)
        index, start = divmod(offset, size)
        with engine.lock:
            found = engine.board.objects.get(memory_key(source))
            block = found.blocks.get(index) if found is not None else None
            if block is None or block.status is not Status.READY or block.slot is None:
                return False
            if offset < 0 or start + length > block.length:
                return False
            view[:] = block.slot.view[start : start + length]
            if not block.pins:
                engine.board.touch(block)
        return True

    def _wait(self, group: Group, limit_s: float) -> None:
        """Wait until a reader's group is finished; raises its error."""
        engine = self._engine
        with engine.lock:
            waiting = next(iter(group.blocks), None)
        began_ns = time.monotonic_ns()
        while not self._finished(group):
            left_s = limit_s - time.monotonic()
            if group.closed:
                group.event.wait()  # cancelled requests may still write to our memory
            elif left_s > 0:
                group.event.wait(left_s)
            else:
                self._give_up(group, DeadlineError("a read was not done in time; see the store"))
        if waiting is not None and group.priority is Priority.DEMAND:
            waited_ns = time.monotonic_ns() - began_ns
            engine.stats.add(waiting.object.stats, demand_waits=1, blocked_ns=waited_ns)
        if group.error is not None:
            raise _again(group.error)
        if group.late:
            late = group.late
            group.late = []
            engine.copy_now([(block, (item,)) for block, item in late])

    def _abandon(self, group: Group) -> None:
        """Leave a read by an exception: nobody may write to its memory after that."""
        self._give_up(group, StoreUnavailableError("a read was given up"))
        while not self._finished(group):
            group.event.wait()

    def _finished(self, group: Group) -> bool:
        with self._engine.lock:
            group.event.clear()
            return group.finished

    def _give_up(self, group: Group, error: BaseException) -> None:
        with self._engine.lock:
            if not group.closed:
                self._engine.board.fail_group(group, error)
            effects = self._engine.effects()
        self._engine.act(effects)


def _again(error: BaseException) -> BaseException:
    """An error that several readers get: one exception object each."""
    if isinstance(error, BootseerError):
        return another(error)
    return error
