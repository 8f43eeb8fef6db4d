"""One request from its claim to its end: its bytes come from the store or the node cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.fetch import shared_claims
from bootseer.blocks.fetch.completion import Copies
from bootseer.blocks.fetch.records import Block, Copy, ObjectRecord, Request, Status, Waiter
from bootseer.blocks.fetch.scheduler import Scheduler
from bootseer.blocks.fetch.slabs import SMALL_COPY_BYTES, copy, looks_warm, populate
from bootseer.blocks.settings import FetchSettings
from bootseer.blocks.stats import Stats
from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError

POPULATE_BYTES = 256 << 10


class Transfers:
    """Called by a worker, without the fetcher's lock."""

    def __init__(
        self,
        settings: FetchSettings,
        decision: AbstractContextManager[Scheduler],
        stats: Stats,
    ) -> None:
        self._settings, self._decision, self._stats = settings, decision, stats

    def run(self, request: Request) -> None:
        """Make a request, deliver its blocks as they arrive, and report its end."""
        record = request.items[0][0].object
        from_store = request.queue is record.queue
        error: Exception | None = None
        try:
            if not from_store:
                self._read_cached(record, request)
            elif self._claim(record, request):
                self._fetch(record, request)
        except BootseerError as caught:
            error = caught
        except Exception as caught:  # a store's foreign error must not end the thread
            error = StoreUnavailableError(
                f"reading {request.items[0][1].part or record.key} failed: "
                f"{type(caught).__name__}; try again, or look at the store"
            )
            error.__cause__ = caught
        if from_store:
            self._unclaim(record, request)
            if request.items:
                self._count(record, request, error)
        with self._decision as scheduler, scheduler.lock:
            retries = scheduler.completion.request_ended(request, error, time.monotonic())
        if retries and from_store:
            self._stats.add(record.source.source_class, retries=retries)

    # --- claims ------------------------------------------------------------------------------

    def _claim(self, record: ObjectRecord, request: Request) -> bool:
        """Leave out blocks that other processes fetch; False when none is left."""
        cached = record.cached
        if cached is None or not cached.storing or request.hedge_of is not None:
            return True
        items = request.items
        held = {number for number, (block, _) in enumerate(items) if not cached.claim(block.index)}
        absent = cached.absent(block.index for block, _ in items)
        if not held and len(absent) == len(items):
            return True
        refused = shared_claims.leave_to_others(
            cached, request, held, absent, self._settings, time.monotonic()
        )
        if refused:
            start, stop = shared_claims.first_run(len(request.items), refused)
            for number, (block, _) in enumerate(request.items):
                if not start <= number < stop and number not in refused:
                    cached.unclaim(block.index)  # it will be claimed again with its own request
            with self._decision as scheduler, scheduler.lock:
                scheduler.completion.leave_to_others(request, refused, time.monotonic())
        return bool(request.items)

    def _unclaim(self, record: ObjectRecord, request: Request) -> None:
        if record.cached is not None and record.cached.storing and request.hedge_of is None:
            for block, _ in request.items:
                record.cached.unclaim(block.index)

    # --- bytes -------------------------------------------------------------------------------

    def _fetch(self, record: ObjectRecord, request: Request) -> None:
        source, first = record.source, request.items[0][1]
        replicas = source.replicas(first.part, first.offset)
        with self._decision as scheduler, scheduler.lock:
            scheduler.replicas.choose(request, replicas)
        raws = raw_views(request)
        stored = raws
        if request.scratch is not None:
            stored, start = [], 0
            for _, piece in request.items:
                stored.append(request.scratch.view[start : start + piece.length])
                start += piece.length
        arrived = self._receiver(record, request, stored, raws)
        source.store.read_scatter(first.part, first.offset, stored, request.attempt, arrived)

    def _receiver(
        self,
        record: ObjectRecord,
        request: Request,
        stored: list[memoryview],
        raws: list[memoryview],
    ) -> Callable[[int], None]:
        """What the store calls with the number of each block that arrived."""
        source, items, errors = record.source, request.items, request.errors

        def deliver(number: int) -> None:
            try:
                source.open_block(items[number][0].index, stored[number], raws[number])
            except Exception as error:  # for the readers, not for the store
                errors[number] = error
                return
            self._deliver(record, request, number, raws[number], record.cached)

        return deliver

    def _read_cached(self, record: ObjectRecord, request: Request) -> None:
        cached, source = record.cached, record.source
        if cached is None:
            return
        raws = raw_views(request)
        for number, (block, _) in enumerate(request.items):
            if not cached.read(block.index, raws[number]):
                self._stats.add(source.source_class, cache_corrupt=1)
                continue
            if source.volatile:
                source.open_block(block.index, raws[number], raws[number])
            self._stats.add(source.source_class, cache_hits=1, cache_bytes=block.length)
            self._deliver(record, request, number, raws[number], None)

    def _deliver(
        self,
        record: ObjectRecord,
        request: Request,
        number: int,
        raw: memoryview,
        cached: CachedObject | None,
    ) -> None:
        """Give a verified block to its waiters, then to the object of the node cache, if any."""
        block = request.items[number][0]
        if cached is not None and not cached.storing:
            cached = None
        if cached is not None and request.targets[number] is not None:
            self._store(record, cached, block, raw)  # later the memory is its reader's alone
            cached = None
        while True:
            with self._decision as scheduler, scheduler.lock:
                unfinished = scheduler.completion.block_arrived(request, number, time.monotonic())
                if cached is not None:
                    if block.status is Status.READY:
                        scheduler.memory.pin(block)
                    else:
                        cached = None
            if unfinished.fill is None:
                break
            copy(unfinished.fill.view[: block.length], raw)
        if unfinished.copies:
            self._copy(block, unfinished.copies)
        if cached is not None:
            try:
                self._store(record, cached, block, raw)
            finally:
                with self._decision as scheduler, scheduler.lock:
                    scheduler.memory.unpin(block)

    def _copy(self, block: Block, copies: Copies) -> None:
        """Copy from a block into its readers' memory."""
        failed: list[tuple[Waiter, Exception]] = []
        for waiter, parts in copies:
            try:
                copy_from(block, parts)
            except Exception as error:  # of that reader's memory: it fails, others go on
                failed.append((waiter, error))
        with self._decision as scheduler, scheduler.lock:
            for waiter, cause in failed:
                scheduler.waiters.fail(waiter, cause)
            scheduler.completion.copies_made(block, copies)

    def _store(
        self, record: ObjectRecord, cached: CachedObject, block: Block, raw: memoryview
    ) -> None:
        if cached.store(block.index, raw):
            self._stats.add(record.source.source_class, cache_stored_bytes=block.length)

    def _count(self, record: ObjectRecord, request: Request, error: Exception | None) -> None:
        received = request.attempt.received_bytes
        kind = ("demand_bytes", "hot_bytes", "background_bytes")[request.priority]
        amounts = {"bytes": received, "requests": 1, kind: received}
        if request.hedge_of is not None:
            amounts["hedges"] = 1
            amounts["hedge_wins"] = int(error is None)
        if error is not None and not request.attempt.cancelled:
            amounts["failures"] = 1
        if request.errors:
            errors = request.errors.values()
            amounts["corrupt"] = sum(isinstance(e, CorruptDataError) for e in errors)
        self._stats.add(record.source.source_class, **amounts)


def raw_views(request: Request) -> list[memoryview]:
    """Where each block's raw bytes go; the memory's pages are there afterwards."""
    views = []
    columns = zip(request.items, request.slots, request.targets, strict=True)
    for (block, _), slot, target in columns:
        if target is not None:
            if len(target) >= POPULATE_BYTES and not looks_warm(target):
                populate(target)
            views.append(target)
        elif slot is not None:
            views.append(slot.view[: block.length])
        else:
            raise AssertionError("a block without memory was sent")
    return views


def copy_from(block: Block, copies: Sequence[Copy]) -> None:
    """Copy from a pinned block into readers' memory."""
    if block.slot is None:
        raise AssertionError("a pinned block lost its memory")
    memory = block.slot.view
    for item in copies:
        size = len(item.target)
        if size <= SMALL_COPY_BYTES:
            item.target[:] = memory[item.start : item.start + size]
        else:
            copy(item.target, memory[item.start : item.start + size])
