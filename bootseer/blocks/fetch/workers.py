"""The threads that carry out what the scheduler decides; see `blocks.fetch.fetcher`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from bootseer.blocks.cache.direct_reads import DirectReads
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch import shared_claims
from bootseer.blocks.fetch.planner import Planner
from bootseer.blocks.fetch.records import Block, Copy, Effects, ObjectRecord, Request, Status
from bootseer.blocks.fetch.scheduler import Scheduler
from bootseer.blocks.fetch.transfers import Transfers, copy_from
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.blocks.source import BlockSource
from bootseer.blocks.stats import Stats
from bootseer.errors import StoreUnavailableError

TICK_S = 0.1
JOIN_S = 5.0


class Decision:
    """The way to the scheduler: `with decision as scheduler, scheduler.lock` decides, then acts.

    Whatever the block left in the scheduler's `effects` is carried out without the lock, however
    the block is left: by the thread that leaves it, or by another one that leaves a block of its
    own at the same time. The lock is taken and released by the `with` itself, not in here, so that
    an interrupt between two lines of ours cannot leave it held.
    """

    __slots__ = ("_scheduler", "_workers")

    def __init__(self, scheduler: Scheduler, workers: Workers) -> None:
        self._scheduler, self._workers = scheduler, workers

    def __enter__(self) -> Scheduler:
        return self._scheduler

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        scheduler, workers = self._scheduler, self._workers
        effects = scheduler.effects
        if not (effects.any_left or scheduler.starved):
            return
        threads: Sequence[threading.Thread] = ()
        pending = None
        with scheduler.lock:
            if effects.new_jobs or effects.clock_changed or scheduler.starved:
                threads = workers.wake_threads(effects, starved=scheduler.starved)
            if effects.to_call or effects.to_plan or effects.to_cancel or effects.to_close:
                pending = effects.take()
        try:
            workers.start(threads)
        finally:
            if pending is not None:
                workers.carry_out(pending)


class Workers:
    """The scheduler, its lock, and the threads."""

    def __init__(
        self, settings: FetchSettings, cache: NodeCache | None, stats: Stats | None
    ) -> None:
        self._settings = settings
        self.stats = stats or Stats()
        self.closed = False
        self.scheduler = Scheduler(settings)
        self.decision = Decision(self.scheduler, self)
        self._planner = Planner(settings, self.decision, cache)
        self._transfers = Transfers(settings, self.decision, self.stats)
        self._work = threading.Condition(self.scheduler.lock)
        self._clock = threading.Condition(self.scheduler.lock)
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._clock_thread: threading.Thread | None = None

    # --- acting ------------------------------------------------------------------------------

    def wake_threads(self, effects: Effects, *, starved: bool) -> Sequence[threading.Thread]:
        """Wake the threads that have something to do; returns those that must be started.

        Called with the lock held.
        """
        new_jobs, effects.new_jobs = effects.new_jobs, 0
        clock_changed, effects.clock_changed = effects.clock_changed, False
        if self.closed:
            return ()
        if starved and self._idle:
            self._work.notify()
        if new_jobs:
            return self._wake_workers(new_jobs)
        if clock_changed:
            self._clock.notify()
        return ()

    def _wake_workers(self, jobs: int) -> list[threading.Thread]:
        if self._idle:
            self._work.notify(jobs)
        most = self._settings.connections + self._settings.connections // 2 + 2
        # Threads that were woken and have not run yet are idle still, and their jobs queued.
        wanted = min(self.scheduler.queues.backlog() - self._idle, most - len(self._threads))
        starts = [
            threading.Thread(target=self._run, name="bootseer-fetch", daemon=True)
            for _ in range(max(0, wanted))
        ]
        self._threads.update(starts)
        if self._clock_thread is None:
            self._clock_thread = threading.Thread(
                target=self._run_clock, name="bootseer-fetch-clock", daemon=True
            )
            starts.append(self._clock_thread)
        else:
            self._clock.notify()
        return starts

    def start(self, threads: Sequence[threading.Thread]) -> None:
        """Start threads; those that cannot be started are as if they had never been wanted."""
        for number, thread in enumerate(threads):
            try:
                thread.start()
            except BaseException:  # an interrupt too: it must not be counted as running
                with self.scheduler.lock:
                    self._threads.difference_update(threads[number:])
                    if self._clock_thread in threads[number:]:
                        self._clock_thread = None
                raise

    def carry_out(self, effects: Effects) -> None:
        """Cancel, close, plan and call, without the lock."""
        for attempt in effects.to_cancel:
            try:
                attempt.cancel()
            except Exception:  # a store's fault: its request ends by itself, later
                pass
        for cached in effects.to_close:
            cached.close()
        if effects.to_plan:
            self._plan(effects.to_plan)
        for on_done in effects.to_call:
            try:
                on_done()
            except Exception:  # a reader's fault must not end a fetch thread
                pass

    def _plan(self, unplanned: Sequence[Block]) -> None:
        """Turn wanted blocks into jobs; a source that cannot say where they are fails them."""
        groups: dict[tuple[ObjectRecord, Priority], list[Block]] = {}
        for block in unplanned:
            groups.setdefault((block.object, block.priority), []).append(block)
        for (record, priority), blocks in groups.items():
            try:
                jobs = self._planner.jobs(record, blocks, priority)
            except Exception as error:  # a source's own code: its readers get it
                with self.decision as scheduler, scheduler.lock:
                    for block in blocks:
                        if block.status is Status.WANTED and block.job is None:
                            scheduler.waiters.fail_block(block, error)
                continue
            with self.decision as scheduler, scheduler.lock:
                scheduler.enqueue(jobs)

    # --- for readers -------------------------------------------------------------------------

    def copy_small(self, source: BlockSource, offset: int, view: memoryview) -> bool:
        """Copy a few bytes of one block that is in memory; False where more is needed.

        Takes only the lock: there may be 100,000 such reads a second, and they decide nothing.
        """
        length = len(view)
        index, start = divmod(offset, source.block_bytes)
        memory = self.scheduler.memory
        with self.scheduler.lock:
            record = memory.known_record(source)
            block = record.blocks.get(index) if record is not None else None
            if block is None or block.status is not Status.READY or block.slot is None:
                return False
            if offset < 0 or start + length > block.length:
                return False
            view[:] = block.slot.view[start : start + length]
            if not block.pins:
                memory.touch(block)
        return True

    def copy_ready(self, ready: Sequence[tuple[Block, Sequence[Copy]]]) -> None:
        """Copy from pinned blocks into readers' memory and unpin them."""
        try:
            for block, copies in ready:
                copy_from(block, copies)
        finally:
            with self.decision as scheduler, scheduler.lock:
                for block, _ in ready:
                    scheduler.memory.unpin(block)

    def direct_reads(self, source: BlockSource) -> DirectReads | None:
        """See `Fetcher.direct_reads`."""
        with self.decision as scheduler, scheduler.lock:
            if self.closed:
                return None
            record = scheduler.memory.record_of(source)
        self._planner.open_cached(record)
        return record.cached.direct_reads() if record.cached is not None else None

    # --- threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        """A worker: one connection's worth of requests, one after the other."""
        while self._run_one():
            pass  # nothing of a request is kept while waiting for the next

    def _run_one(self) -> bool:
        request = self._next()
        if request is not None:
            self._transfers.run(request)
        return request is not None

    def _next(self) -> Request | None:
        """Wait for a request to make; None when this thread is to end."""
        timed_out = False
        while True:
            with self.decision as scheduler, scheduler.lock:
                while not self.closed:
                    request = scheduler.start_next(time.monotonic())
                    if request is not None:
                        return request
                    if timed_out or scheduler.effects.to_close:
                        break  # nothing must be left to do while this thread waits
                    self._idle += 1
                    timed_out = not self._work.wait(self._settings.idle_s)
                    self._idle -= 1
                if self.closed or timed_out:
                    self._threads.discard(threading.current_thread())
                    return None

    def _run_clock(self) -> None:
        """The clock: retries that are due, requests that hang, deadlines of watched waiters."""
        while True:
            with self.decision as scheduler, scheduler.lock:
                if self.closed:
                    return
                scheduler.tick(time.monotonic())
            self._look_for_left_blocks()
            with self.decision as scheduler, scheduler.lock:
                if self.closed:
                    return  # in the meantime, and what woke waiting threads then is over
                due_s = scheduler.next_due_s(time.monotonic(), TICK_S)
                woken = self._clock.wait(self._settings.idle_s if due_s is None else due_s)
                # A job may have come in the very moment that the wait ended.
                quiet = scheduler.next_due_s(time.monotonic(), TICK_S) is None
                if due_s is None and not woken and quiet:
                    self._clock_thread = None
                    break
        self.stats.emit()  # of a reader that lives for days, each time it rests

    def _look_for_left_blocks(self) -> None:
        """Look for blocks that other processes fetch."""
        with self.decision as scheduler, scheduler.lock:
            blocks = scheduler.completion.left_blocks(time.monotonic())
        if not blocks:
            return
        over = shared_claims.no_longer_waited_for(blocks, self._settings, time.monotonic())
        with self.decision as scheduler, scheduler.lock:
            scheduler.completion.stop_leaving(over, time.monotonic())

    def close(self) -> None:
        """Fail every waiter, cancel every request, end the threads; twice is safe."""
        with self.decision as scheduler, scheduler.lock:
            was_closed, self.closed = self.closed, True
            if was_closed:
                return
            scheduler.fail_all(
                StoreUnavailableError("the fetcher was closed while a read was under way")
            )
            self._work.notify_all()
            self._clock.notify_all()
            threads = [*self._threads, *([self._clock_thread] if self._clock_thread else [])]
        until_s = time.monotonic() + JOIN_S
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))
        for record in list(scheduler.memory.objects.values()):
            with self.decision as scheduler, scheduler.lock:
                scheduler.memory.forget(record)
        with self.decision as scheduler, scheduler.lock:
            scheduler.memory.pool.clear()
        self.stats.emit()
