"""From wanted blocks to jobs: which the node cache holds, and what one request asks the store."""

from __future__ import annotations

import math
import threading
import time

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch import shared_claims
from bootseer.blocks.fetch.plan.request_plan import Piece, plan, request_bytes
from bootseer.blocks.fetch.records import Block, Job, Object
from bootseer.blocks.fetch.scheduler import Board
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.blocks.stats import source_class

REOPEN_S = 5.0


class Planner:
    """Called without the fetcher's lock; a source's own code may raise anything."""

    def __init__(
        self, settings: FetchSettings, board: Board, lock: threading.Lock, cache: NodeCache | None
    ) -> None:
        self._settings, self._board, self._lock, self._cache = settings, board, lock, cache

    def jobs(self, found: Object, blocks: list[Block], priority: Priority) -> list[Job]:
        """Jobs that bring the blocks, from the node cache where it holds them."""
        by_index = {block.index: block for block in blocks}
        self.open_cached(found)
        cached = self._cached(found, blocks)
        jobs = [
            Job(found.cache_line, [(block, Piece(block.index, "", 0, block.length))], priority)
            for block in cached
            if found.cache_line is not None
        ]
        for block in cached:
            del by_index[block.index]
        if not by_index:
            return jobs
        source = found.source
        pieces = [Piece(index, *source.locate(index)) for index in by_index]
        requests = plan(
            pieces,
            range_bytes=self._range_bytes(found, blocks, pieces, priority),
            streams=found.line.streams,
            ends_stretch=source.ends_stretch,
        )
        for request in requests:
            items = [(by_index[piece.block], piece) for piece in request.pieces]
            jobs.append(Job(found.line, items, priority))
        return jobs

    def _range_bytes(
        self, found: Object, blocks: list[Block], pieces: list[Piece], priority: Priority
    ) -> int:
        streams, most = found.line.streams, found.range_bytes
        if any(block.landing is None for block in blocks):
            most = min(most, max(1, self._settings.memory_bytes // (2 * streams)))
        least = min(most, self._settings.least_range_bytes)
        if priority is not Priority.DEMAND:
            least = max(least, most // 4)  # nobody waits: rather fewer requests
        return request_bytes(
            sum(piece.length for piece in pieces),
            streams=streams,
            range_bytes=most,
            piece_bytes=max(piece.length for piece in pieces),
            least_bytes=least,
        )

    def open_cached(self, found: Object) -> None:
        """Open an object of the node cache, unless that was done.

        One that cannot be opened (it is being evicted, no descriptor is free) is tried again after
        a while: for a server that lives for weeks it would else never be there.
        """
        if found.stats and time.monotonic() < found.reopen_s:
            return
        # Several threads may come here at once: each goes on only once the cache is open.
        again_s = math.inf
        if self._cache is not None and found.source.key and found.cached is None:
            opened = self._cache.open(found.source)
            if not opened.usable:
                if not self._cache.stopped:
                    again_s = time.monotonic() + REOPEN_S
            else:
                with self._lock:
                    used = self._board.cache(found, opened)
                if not used:
                    opened.close()
        found.reopen_s = again_s
        found.stats = source_class(found.source)

    def _cached(self, found: Object, blocks: list[Block]) -> list[Block]:
        """Those of the blocks that the node cache holds."""
        if found.cached is None or not found.cached.usable:
            return []
        ask = [block for block in blocks if not block.uncached]
        absent = shared_claims.absent(found.cached, (block.index for block in ask))
        return [block for block in ask if block.index not in absent]
