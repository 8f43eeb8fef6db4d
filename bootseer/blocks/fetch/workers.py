"""The threads that carry out what the scheduler decides; see `blocks.fetch.fetcher`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from bootseer.blocks.cache.direct_reads import Straight
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch import shared_claims
from bootseer.blocks.fetch.buffer_copy import copy_from, raw_views
from bootseer.blocks.fetch.plan.planner import Planner
from bootseer.blocks.fetch.records import Block, CachedBlocks, Copy, Flight, Group, Object, Status
from bootseer.blocks.fetch.scheduler import Board
from bootseer.blocks.fetch.slabs import copy
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.blocks.source import BlockSource, is_volatile
from bootseer.blocks.stats import Stats
from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.storage.request_control import Attempt

TICK_S = 0.1
JOIN_S = 5.0

Effects = tuple[list[Group], list[Attempt], list[Block], list[CachedBlocks]]


class Engine:
    """Board, lock and threads. Names without `_` are for `Fetcher`."""

    def __init__(
        self, settings: FetchSettings, cache: NodeCache | None, stats: Stats | None
    ) -> None:
        self.settings = settings
        self.board = Board(settings)
        self.lock = threading.Lock()
        self.stats = stats or Stats()
        self.closed = False
        self._planner = Planner(settings, self.board, self.lock, cache)
        self._work = threading.Condition(self.lock)
        self._clock = threading.Condition(self.lock)
        self._idle = 0
        self._workers: set[threading.Thread] = set()
        self._watcher: threading.Thread | None = None

    # --- called with the lock held -----------------------------------------------------------

    def effects(self) -> Effects | None:
        """What the board left to do outside the lock; hand it to `act` there."""
        board = self.board
        if board.starved and self._idle:
            self._work.notify()
        if not (board.woken or board.cancels or board.fresh or board.closes):
            return None
        found = (board.woken, board.cancels, board.fresh, board.closes)
        board.woken, board.cancels, board.fresh, board.closes = [], [], [], []
        return found

    # --- called without it -------------------------------------------------------------------

    def act(self, effects: Effects | None) -> None:
        """Cancel, plan and wake."""
        if effects is None:
            return
        woken, cancels, fresh, closes = effects
        for attempt in cancels:
            try:
                attempt.cancel()
            except Exception:  # a store's fault: its request ends by itself, later
                pass
        for cached in closes:
            cached.close()
        if fresh:
            self._plan(fresh)
        for group in woken:
            if group.callback is None:
                group.event.set()
                continue
            try:
                group.callback()
            except Exception:  # a reader's fault must not end a fetch thread
                pass

    def copy_now(self, ready: Sequence[tuple[Block, Sequence[Copy]]]) -> None:
        """Copy from pinned blocks into readers' memory and unpin them."""
        try:
            for block, copies in ready:
                copy_from(block, copies)
        finally:
            with self.lock:
                for block, _ in ready:
                    self.board.unpin(block)
                effects = self.effects()
            self.act(effects)

    def _plan(self, fresh: Sequence[Block]) -> None:
        """Turn wanted blocks into jobs; a source that cannot say where they are fails them."""
        together: dict[tuple[Object, Priority], list[Block]] = {}
        for block in fresh:
            together.setdefault((block.object, block.priority), []).append(block)
        for (found, priority), blocks in together.items():
            try:
                jobs = self._planner.jobs(found, blocks, priority)
            except Exception as error:  # a source's own code: its readers get it
                with self.lock:
                    for block in blocks:
                        if block.status is Status.WANTED and block.job is None:
                            self.board.fail(block, error)
                    effects = self.effects()
                self.act(effects)
                continue
            with self.lock:
                starts = self._ready_threads(self.board.enqueue(jobs))
            for thread in starts:
                thread.start()

    def straight(self, source: BlockSource) -> Straight | None:
        """See `Fetcher.straight`."""
        with self.lock:
            if self.closed:
                return None
            found = self.board.object_of(source)
            effects = self.effects()
        self.act(effects)
        self._planner.open_cached(found)
        return found.cached.straight() if found.cached is not None else None

    # --- threads -----------------------------------------------------------------------------

    def _ready_threads(self, jobs: int) -> list[threading.Thread]:
        """Wake idle workers for new jobs; returns the threads to start, outside the lock."""
        if self.closed:
            return []
        if self._idle:
            self._work.notify(jobs)
        most = self.settings.connections + self.settings.connections // 2 + 2
        # Threads that were woken and have not run yet are idle still, and their jobs in line.
        wanted = min(self.board.backlog() - self._idle, most - len(self._workers))
        starts = [
            threading.Thread(target=self._run, name="bootseer-fetch", daemon=True)
            for _ in range(max(0, wanted))
        ]
        self._workers.update(starts)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="bootseer-fetch-clock", daemon=True
            )
            starts.append(self._watcher)
        else:
            self._clock.notify()
        return starts

    def _run(self) -> None:
        """A worker: one connection's worth of requests, one after the other."""
        while self._run_one():
            pass  # nothing of a request is kept while waiting for the next

    def _run_one(self) -> bool:
        flight = self._next()
        if flight is not None:
            self._fly(flight)
        return flight is not None

    def _next(self) -> Flight | None:
        last = False
        with self.lock:
            while not self.closed:
                flight = self.board.take(time.monotonic())
                if flight is not None:
                    return flight
                if last:
                    break
                self._idle += 1
                last = not self._work.wait(self.settings.idle_s)
                self._idle -= 1
            self._workers.discard(threading.current_thread())
        return None

    def _watch(self) -> None:
        """The clock: retries that are due, requests that hang, deadlines of those not waiting."""
        while True:
            with self.lock:
                if self.closed:
                    return
                jobs = self.board.tick(time.monotonic())
                starts = self._ready_threads(jobs) if jobs else []
                effects = self.effects()
            for thread in starts:
                thread.start()
            self.act(effects)
            self._look_elsewhere()
            with self.lock:
                if self.closed:
                    return  # in the meantime, and what woke waiting threads then is over
                due_s = self.board.next_due_s(time.monotonic(), TICK_S)
                woken = self._clock.wait(self.settings.idle_s if due_s is None else due_s)
                # A job may have come in the very moment that the wait ended.
                quiet = self.board.next_due_s(time.monotonic(), TICK_S) is None
                if due_s is None and not woken and quiet:
                    self._watcher = None
                    break
        self.stats.emit()  # a reader that lives for days is heard of each time it rests

    def _look_elsewhere(self) -> None:
        """See what became of blocks that other processes fetch."""
        with self.lock:
            blocks = self.board.elsewhere(time.monotonic())
        if not blocks:
            return
        over = shared_claims.waited_for(blocks, self.settings, time.monotonic())
        with self.lock:
            self.board.come_back(over, time.monotonic())
            effects = self.effects()
        self.act(effects)

    # --- one request -------------------------------------------------------------------------

    def _fly(self, flight: Flight) -> None:
        found = flight.items[0][0].object
        error: BaseException | None = None
        try:
            if flight.line is found.line:
                if self._claim(found, flight):
                    self._fetch(found, flight)
            else:
                self._read_cached(found, flight)
        except BootseerError as caught:
            error = caught
        except Exception as caught:  # a store's foreign error must not end the thread
            error = StoreUnavailableError(
                f"reading {flight.items[0][1].part or found.key} failed: "
                f"{type(caught).__name__}; try again, or look at the store"
            )
            error.__cause__ = caught
        self._unclaim(found, flight)
        with self.lock:
            again = self.board.ended(flight, error, time.monotonic())
            if again:
                self._clock.notify()
            effects = self.effects()
        if flight.line is found.line and flight.items:
            self._count(found, flight, again, error)
        self.act(effects)

    def _claim(self, found: Object, flight: Flight) -> bool:
        """Leave out what other processes are fetching; False when that is all of it."""
        cached = found.cached
        if cached is None or not cached.storing or flight.hedges is not None:
            return True
        refused = shared_claims.refused(cached, flight, self.settings, time.monotonic())
        if refused:
            start, stop = shared_claims.first_run(len(flight.items), refused)
            for number, (block, _) in enumerate(flight.items):
                if not start <= number < stop and number not in refused:
                    cached.unclaim(block.index)  # it will be claimed again with its own request
            with self.lock:
                jobs = self.board.concede(flight, refused, time.monotonic())
                starts = self._ready_threads(jobs)
                effects = self.effects()
            for thread in starts:
                thread.start()
            self.act(effects)
        return bool(flight.items)

    def _unclaim(self, found: Object, flight: Flight) -> None:
        if found.cached is not None and found.cached.storing and flight.line is found.line:
            for block, _ in flight.items if flight.hedges is None else ():
                found.cached.unclaim(block.index)

    def _fetch(self, found: Object, flight: Flight) -> None:
        source, first = found.source, flight.items[0][1]
        replicas = source.replicas(first.part, first.offset)
        with self.lock:
            self.board.steer(flight, replicas)
        raws = raw_views(flight)
        stored = raws
        if flight.scratch is not None:
            stored, start = [], 0
            for _, piece in flight.items:
                stored.append(flight.scratch.view[start : start + piece.length])
                start += piece.length
        arrived = self._arrival(found, flight, stored, raws)
        source.store.read_scatter(first.part, first.offset, stored, flight.attempt, arrived)

    def _arrival(
        self, found: Object, flight: Flight, stored: list[memoryview], raws: list[memoryview]
    ) -> Callable[[int], None]:
        source, items, errors = found.source, flight.items, flight.errors

        def filled(number: int) -> None:
            try:
                source.open_block(items[number][0].index, stored[number], raws[number])
            except Exception as error:  # told to the readers, not to the store
                errors[number] = error
                return
            self._landed(found, flight, number, raws[number], keep=found.cached is not None)

        return filled

    def _read_cached(self, found: Object, flight: Flight) -> None:
        raws = raw_views(flight)
        cached = found.cached
        for number, (block, _) in enumerate(flight.items):
            if cached is None:
                continue
            there = cached.read(block.index, raws[number])
            if not there:
                self.stats.add(found.stats, cache_corrupt=1)
            if there and is_volatile(found.source):
                found.source.open_block(block.index, raws[number], raws[number])
            if there:
                self.stats.add(found.stats, cache_hits=1, cache_bytes=block.length)
                self._landed(found, flight, number, raws[number], keep=False)

    def _landed(
        self, found: Object, flight: Flight, number: int, raw: memoryview, *, keep: bool
    ) -> None:
        """A verified block: give it to whoever waits, then to the node cache."""
        block = flight.items[number][0]
        keep = keep and found.cached is not None and found.cached.storing
        if keep and found.cached is not None and flight.targets[number] is not None:
            self._store(found, block, raw)  # later the memory is its reader's alone
            keep = False
        while True:
            with self.lock:
                settled = self.board.settle(flight, number, time.monotonic())
                keep = keep and block.status is Status.READY and settled.fill is None
                if keep:
                    self.board.pin(block)
                effects = self.effects()
            if settled.fill is None:
                break
            self.act(effects)
            copy(settled.fill.view[: block.length], raw)
        if settled.copies:
            failed: list[tuple[Group, Exception]] = []
            for group, copies in settled.copies:
                try:
                    copy_from(block, copies)
                except Exception as error:  # of that reader's memory: it is told, others go on
                    failed.append((group, error))
            with self.lock:
                for group, cause in failed:
                    self.board.fail_group(group, cause)
                self.board.copied(block, settled.copies)
                more = self.effects()
            self.act(more)
        self.act(effects)
        if keep and found.cached is not None:
            try:
                self._store(found, block, raw)
            finally:
                with self.lock:
                    self.board.unpin(block)

    def _store(self, found: Object, block: Block, raw: memoryview) -> None:
        if found.cached is not None and found.cached.store(block.index, raw):
            self.stats.add(found.stats, cache_stored_bytes=block.length)

    def _count(
        self, found: Object, flight: Flight, again: int, error: BaseException | None
    ) -> None:
        received = flight.attempt.received_bytes
        kind = ("demand_bytes", "hot_bytes", "background_bytes")[flight.priority]
        corrupt = sum(isinstance(e, CorruptDataError) for e in flight.errors.values())
        amounts = {"bytes": received, "requests": 1, kind: received}
        if again:
            amounts["retries"] = again
        if flight.hedges is not None:
            amounts["hedges"] = 1
            amounts["hedge_wins"] = int(error is None)
        if error is not None and not flight.attempt.cancelled:
            amounts["failures"] = 1
        if corrupt:
            amounts["corrupt"] = corrupt
        self.stats.add(found.stats, **amounts)

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Fail everybody who waits, cancel every request, end the threads; twice is safe."""
        board = self.board
        with self.lock:
            was_closed, self.closed = self.closed, True
            error = StoreUnavailableError("the fetcher was closed while a read was under way")
            for found in list(board.objects.values()):
                for block in list(found.blocks.values()):
                    if block.status is not Status.READY:
                        board.fail(block, error)
            board.cancels += [flight.attempt for flight in board.flights]
            self._work.notify_all()
            self._clock.notify_all()
            effects = self.effects()
            threads = [*self._workers, *([self._watcher] if self._watcher else [])]
        if was_closed:
            return
        self.act(effects)
        until_s = time.monotonic() + JOIN_S
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))
        for found in list(board.objects.values()):
            with self.lock:
                board.forget(found)
                effects = self.effects()
            self.act(effects)
        with self.lock:
            board.pool.clear()
        self.stats.emit()
