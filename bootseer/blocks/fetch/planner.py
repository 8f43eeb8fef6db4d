"""From wanted blocks to jobs: which the node cache holds, and what one request asks the store.

How blocks are divided into requests (`plan`) is pure: no clock, no I/O.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.records import Block, Job, ObjectRecord, Piece
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
        """Jobs that bring the blocks, from the node cache where it holds them.

        One that became wanted, and more urgent before it was planned, is among them twice.
        """
        self.open_cached(record)
        jobs: list[Job] = []
        by_index = {block.index: block for block in blocks}
        if record.cached is not None and record.cache_queue is not None and record.cached.usable:
            ask = [block for block in by_index.values() if not block.not_cached]
            absent = record.cached.absent(block.index for block in ask)
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
            least = max(least, most // 4)  # no reader waits: fewer requests are better
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

        An object that cannot be opened (it is being evicted, no descriptor is free) is tried again
        later: otherwise a server that runs for weeks would never use it.
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
                with self._decision as scheduler, scheduler.lock:
                    is_used = scheduler.memory.attach(record, cached)
                if not is_used:
                    cached.close()
        record.ask_cache_s = again_s


class PlannedRequest(NamedTuple):
    """Pieces that lie back to back in one stretch of one part: one request brings them all."""

    pieces: tuple[Piece, ...]

    @property
    def part(self) -> str:
        return self.pieces[0].part

    @property
    def offset(self) -> int:
        return self.pieces[0].offset

    @property
    def length(self) -> int:
        last = self.pieces[-1]
        return last.offset + last.length - self.offset


EndsStretch = Callable[[str, int], int]


def request_bytes(
    total_bytes: int,
    *,
    streams: int,
    range_bytes: int,
    piece_bytes: int = 1,
    least_bytes: int = 1 << 20,
) -> int:
    """The request size by which `total_bytes` arrive soonest over `streams` in parallel.

    It is a number of whole pieces, at most as many as `range_bytes` holds (but at least one), such
    that every stream gets the same number of requests and none idles while the last ones arrive.
    As far as `range_bytes` allows it is at least `least_bytes`: the time of shorter requests
    would be mostly latency.
    """
    most = max(1, range_bytes // piece_bytes)
    least = min(most, -(-least_bytes // piece_bytes))
    pieces = -(-total_bytes // piece_bytes)
    rounds = max(1, -(-pieces // (streams * most)))
    even = -(-pieces // (rounds * streams))
    return piece_bytes * min(most, max(least, even))


def plan(
    pieces: Iterable[Piece],
    *,
    range_bytes: int,
    streams: int = 1,
    ends_stretch: EndsStretch | None = None,
) -> list[PlannedRequest]:
    """Merge neighbours into requests, in the order in which they should be sent.

    A request holds at most `range_bytes`, unless a single piece is longer. Requests follow the
    position of their first block, except that within the next few rounds of `streams` requests
    the parts and stretches take turns, so that every server that holds some of them works from
    the start.
    """
    lanes: list[tuple[int, PlannedRequest]] = []
    for ordered in _by_part(pieces):
        lanes += _cut(ordered, range_bytes, ends_stretch, len(lanes))
    lanes.sort(key=lambda lane: lane[1].pieces[0].block)
    window = 2 * max(1, streams)
    requests: list[PlannedRequest] = []
    for start in range(0, len(lanes), window):
        requests += _take_turns(lanes[start : start + window])
    return requests


def _by_part(pieces: Iterable[Piece]) -> list[list[Piece]]:
    parts: dict[str, list[Piece]] = {}
    for piece in pieces:
        parts.setdefault(piece.part, []).append(piece)
    for ordered in parts.values():
        ordered.sort(key=lambda piece: piece.offset)
    return list(parts.values())


def _cut(
    ordered: Sequence[Piece], range_bytes: int, ends_stretch: EndsStretch | None, lane: int
) -> list[tuple[int, PlannedRequest]]:
    """Requests over one part's pieces, each with a number that its stretch alone has."""
    requests: list[tuple[int, PlannedRequest]] = []
    run: list[Piece] = []
    stretch_end = run_end = 0
    for piece in ordered:
        crosses = ends_stretch is not None and piece.offset >= stretch_end
        if run and (piece.offset != run_end or crosses):
            requests += [(lane, request) for request in _split(run, range_bytes)]
            run = []
        if crosses and ends_stretch is not None:
            stretch_end = ends_stretch(piece.part, piece.offset)
            lane += 1
        run.append(piece)
        run_end = piece.offset + piece.length
    if run:
        requests += [(lane, request) for request in _split(run, range_bytes)]
    return requests


def _split(run: Sequence[Piece], range_bytes: int) -> list[PlannedRequest]:
    """Neighbours as requests of about the same size: a small last one wastes its latency."""
    begin = run[0].offset
    total = run[-1].offset + run[-1].length - begin
    count = max(1, -(-total // range_bytes))
    requests: list[PlannedRequest] = []
    part: list[Piece] = []
    for piece in run:
        if part:
            middle = piece.offset + piece.length / 2 - begin
            too_long = piece.offset + piece.length - part[0].offset > range_bytes
            if too_long or middle > (len(requests) + 1) * total / count:
                requests.append(PlannedRequest(tuple(part)))
                part = []
        part.append(piece)
    requests.append(PlannedRequest(tuple(part)))
    return requests


def _take_turns(lanes: Sequence[tuple[int, PlannedRequest]]) -> list[PlannedRequest]:
    """One request of each lane, then the second of each, and so on."""
    turns: list[tuple[int, int, PlannedRequest]] = []
    seen: dict[int, int] = {}
    for place, (lane, request) in enumerate(lanes):
        turn = seen.get(lane, 0)
        seen[lane] = turn + 1
        turns.append((turn, place, request))
    turns.sort(key=lambda t: t[:2])
    return [request for _, _, request in turns]
