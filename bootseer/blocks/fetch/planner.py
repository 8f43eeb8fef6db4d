"""From wanted blocks to jobs: which the node cache holds, and what one request asks the store."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch import shared_claims
from bootseer.blocks.fetch.plan.request_plan import Piece, plan, request_bytes
from bootseer.blocks.fetch.records import Block, Job, ObjectRecord
from bootseer.blocks.fetch.scheduler import Scheduler
from bootseer.blocks.settings import FetchSettings, Priority

REOPEN_S = 5.0


class Planner:
    """Called without the fetcher's lock; a source's own code may raise anything."""

    def __init__(
        self,
        settings: FetchSettings,
        decision: AbstractContextManager[Scheduler],
        cache: NodeCache | None,
    ) -> None:
        self._settings, self._decision, self._cache = settings, decision, cache

    def jobs(self, record: ObjectRecord, blocks: list[Block], priority: Priority) -> list[Job]:
        """Jobs that bring the blocks, from the node cache where it holds them."""
        self.open_cached(record)
        jobs: list[Job] = []
        by_index = {block.index: block for block in blocks}
        if record.cached is not None and record.cache_queue is not None and record.cached.usable:
            ask = [block for block in blocks if not block.not_cached]
            absent = shared_claims.absent(record.cached, [block.index for block in ask])
            for block in ask:
                if block.index not in absent:
                    del by_index[block.index]
                    piece = Piece(block.index, "", 0, block.length)
                    jobs.append(Job(record.cache_queue, [(block, piece)], priority))
        if not by_index:
            return jobs
        source = record.source
        pieces = [Piece(index, *source.locate(index)) for index in by_index]
        requests = plan(
            pieces,
            range_bytes=self._range_bytes(record, blocks, pieces, priority),
            streams=record.queue.streams,
            ends_stretch=source.ends_stretch,
        )
        for request in requests:
            items = [(by_index[piece.block], piece) for piece in request.pieces]
            jobs.append(Job(record.queue, items, priority))
        return jobs

    def _range_bytes(
        self, record: ObjectRecord, blocks: list[Block], pieces: list[Piece], priority: Priority
    ) -> int:
        streams, most = record.queue.streams, record.range_bytes
        if None in [block.direct_target for block in blocks]:
            most = min(most, max(1, self._settings.memory_bytes // (2 * streams)))
        least = min(most, self._settings.least_range_bytes)
        if priority is not Priority.DEMAND:
            least = max(least, most // 4)  # no reader waits: rather fewer requests
        lengths = [piece.length for piece in pieces]
        return request_bytes(
            sum(lengths),
            streams=streams,
            range_bytes=most,
            piece_bytes=max(lengths),
            least_bytes=least,
        )

    def open_cached(self, record: ObjectRecord) -> None:
        """Open an object of the node cache, unless that was done.

        One that cannot be opened (it is being evicted, no descriptor is free) is tried again after
        a while: a server that lives for weeks would never have it otherwise.
        """
        if time.monotonic() < record.ask_cache_s:
            return
        # Several threads may come here at once: each goes on only once the cache is open.
        again_s = math.inf
        if self._cache is not None and record.source.key and record.cached is None:
            cached = self._cache.open(record.source)
            if not cached.usable:
                if not self._cache.stopped:
                    again_s = time.monotonic() + REOPEN_S
            else:
                with self._decision as scheduler:
                    is_used = scheduler.memory.attach(record, cached)
                if not is_used:
                    cached.close()
        record.ask_cache_s = again_s
