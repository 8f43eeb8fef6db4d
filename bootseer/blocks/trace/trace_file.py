"""Traces: which ranges of an object a start touched, in which order; merged over starts.

A trace is one zstd frame of JSON (docs/blocks.md). `starts` counts the full starts, whose reads are
all seen: cold ones to which nothing was replayed. Of a start from a warm page cache, or of a
replayed one, only part of its reads can be seen. Such starts are counted separately, as `replays`:
they may make more of the object hot, and change neither the share of full starts that touched a
page nor the order.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import zstandard

from bootseer import light_dataclasses as dataclasses
from bootseer.blocks.extents import PAGE_BYTES, Extent, align
from bootseer.blocks.zstd_frames import unpack_frame
from bootseer.errors import CorruptDataError, UsageError

VERSION = 1
NEAR_MS = 20  # first touches so close together are one moment: neighbours join
MAX_NAME_CHARS = 512
FEWEST_REPLAYS = (
    2  # needed to make hot what too few full starts touched: a single one may be a coincidence
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a trace file may claim."""

    packed_bytes: int = 32 << 20
    raw_bytes: int = 256 << 20
    extents: int = 1 << 20
    starts: int = 1 << 20
    window_bytes: int = 1 << 23


LIMITS = Limits()


class Touched(NamedTuple):
    """Pages `[offset, offset + length)`: when they were first touched, and in how many starts.

    `starts_seen` are full ones, `replays_seen` all others.
    """

    offset: int
    length: int
    first_touch_ms: int
    starts_seen: int
    replays_seen: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What starts of one workload touched of one object.

    `extents` do not overlap, have whole pages (the object's end apart), and stand in the order of
    first touch. `object` names the bytes, as a source's key does. `starts` are full ones,
    `replays` those that could show only what was neither replayed to them nor in the page cache.
    """

    object: str
    size_bytes: int
    workload: str
    starts: int
    extents: tuple[Touched, ...]
    page_bytes: int = PAGE_BYTES
    replays: int = 0

    def touched_bytes(self) -> int:
        """Bytes of all extents together."""
        return sum(extent.length for extent in self.extents)

    def select_hot(self, share: float) -> Trace:
        """Select what at least `share` (0 to 1) of the full starts touched, or of the others.

        Where there are full starts, a single other start makes nothing hot.
        """
        if share <= 0:
            return self
        least = max(1.0, share * self.starts)
        least_replays = max(FEWEST_REPLAYS if self.starts else 1, share * self.replays)
        kept = tuple(
            extent
            for extent in self.extents
            if extent.starts_seen >= least or extent.replays_seen >= least_replays
        )
        return dataclasses.replace(self, extents=kept)

    def mean_bytes(self) -> float:
        """Bytes that a full start touched, on average; 0 without any."""
        seen = sum(extent.length * extent.starts_seen for extent in self.extents)
        return seen / self.starts if self.starts else 0.0


def serialise(trace: Trace) -> bytes:
    """The trace as a file's bytes."""
    document = {
        "version": VERSION,
        "object": trace.object,
        "size": trace.size_bytes,
        "page": trace.page_bytes,
        "workload": trace.workload,
        "starts": trace.starts,
        "replays": trace.replays,
        "extents": [e if e.replays_seen else e[:4] for e in trace.extents],
    }
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text)


def parse(data: bytes, *, limits: Limits = LIMITS, name: str = "the trace") -> Trace:
    """Read a trace file. Raises CorruptDataError for anything but a plausible one."""
    if len(data) > limits.packed_bytes:
        raise CorruptDataError(f"{name} has {len(data)} bytes, more than {limits.packed_bytes}")
    try:
        document = json.loads(_unpack(data, limits, name))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise CorruptDataError(f"{name} is none of a version that is known here")
    try:
        return _check_document(document, limits)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{name} is damaged or forged: {error}") from error


def _unpack(data: bytes, limits: Limits, name: str) -> bytes:
    return unpack_frame(
        data, most_bytes=limits.raw_bytes, window_bytes=limits.window_bytes, name=name
    )


def _check_document(document: dict[str, Any], limits: Limits) -> Trace:
    size_bytes = _number(document["size"], 0, (1 << 63) - 1)
    page_bytes = _number(document["page"], 512, 1 << 30)
    starts = _number(document["starts"], 0, limits.starts)
    replays = _number(document.get("replays", 0), 0, limits.starts)
    rows = document["extents"]
    if not isinstance(rows, list) or len(rows) > limits.extents:
        raise ValueError(f"more than {limits.extents} extents, or none at all")
    extents = []
    for row in rows:
        offset, length, first_touch_ms, seen, *more = row
        _number(offset, 0, size_bytes - 1)
        _number(length, 1, size_bytes - offset)
        _number(first_touch_ms, 0, 1 << 40)
        (replayed,) = more or (0,)
        _number(replayed, 0, max(replays, 1))
        _number(seen, 0 if replayed else 1, max(starts, 1))
        if offset % page_bytes or ((offset + length) % page_bytes and offset + length < size_bytes):
            raise ValueError(f"the extent at {offset} does not have whole pages")
        extents.append(Touched(offset, length, first_touch_ms, seen, replayed))
    for before, after in itertools.pairwise(sorted(extents)):
        if before.offset + before.length > after.offset:
            raise ValueError(f"two extents overlap at {after.offset}")
    names = [document["object"], document["workload"]]
    if not all(isinstance(n, str) and len(n) <= MAX_NAME_CHARS for n in names):
        raise ValueError("a name that is none")
    extents.sort(key=lambda e: e.first_touch_ms)  # within a moment the file's order stands
    trace = Trace(names[0], size_bytes, names[1], starts, tuple(extents), page_bytes, replays)
    return _normalise(trace)


def _normalise(trace: Trace) -> Trace:
    """Count touches as those of `replays` where there were no full starts."""
    if trace.starts or not any(extent.starts_seen for extent in trace.extents):
        return trace
    extents = tuple(
        e._replace(starts_seen=0, replays_seen=e.starts_seen + e.replays_seen)
        for e in trace.extents
    )
    replays = max(trace.replays, *(extent.replays_seen for extent in extents))
    return dataclasses.replace(trace, extents=extents, replays=replays)


def _number(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a number from {least} to {most}")
    return value


def _sort_by_touch(extents: Iterable[Touched]) -> tuple[Touched, ...]:
    return tuple(sorted(extents, key=lambda e: (e.first_touch_ms, e.offset)))


def merge(traces: Sequence[Trace], share: float = 0.0) -> Trace:
    """One trace of all starts: the union, each piece at its median first touch.

    Drops what is not hot at `share`; keep 0 while more starts are to be merged in later. Raises
    UsageError for traces of different objects, or for none.
    """
    if not traces:
        raise UsageError("there is no trace to merge")
    first = traces[0]
    _same_object(traces)
    traces = [_normalise(trace) for trace in traces]
    starts, replays = sum(t.starts for t in traces), sum(t.replays for t in traces)
    tagged = [_Tagged(extent, number) for number, t in enumerate(traces) for extent in t.extents]
    pieces = [
        _combine(start, end, [one.extent for one in covering], starts, replays)
        for start, end, covering in _cut_at_borders(tagged)
    ]
    extents = _sort_by_touch(_join(pieces))
    merged = dataclasses.replace(first, starts=starts, replays=replays, extents=extents)
    return merged.select_hot(share)


def _same_object(traces: Iterable[Trace]) -> None:
    if len({(t.object, t.size_bytes, t.page_bytes) for t in traces}) > 1:
        raise UsageError("the traces are of different objects; carry the older ones over first")


def without(whole: Trace, part: Trace) -> Trace:
    """Subtract `part`, which was merged into `whole`: the result has the starts since then.

    Raises UsageError for traces of different objects.
    """
    _same_object([whole, part])
    whole, part = _normalise(whole), _normalise(part)
    pieces = [
        Touched(
            start,
            end - start,
            one.first_touch_ms,
            max(0, one.starts_seen - other.starts_seen),
            max(0, one.replays_seen - other.replays_seen),
        )
        for start, end, one, other in _both(whole, part)
    ]
    remaining = _join(piece for piece in pieces if piece.starts_seen or piece.replays_seen)
    return dataclasses.replace(
        whole,
        starts=max(0, whole.starts - part.starts),
        replays=max(0, whole.replays - part.replays),
        extents=_sort_by_touch(remaining),
    )


def covers(whole: Trace, part: Trace) -> bool:
    """Whether `whole` has all that `part` has, so that `part` may be merged into it already."""
    _same_object([whole, part])
    whole, part = _normalise(whole), _normalise(part)
    return (
        whole.starts >= part.starts
        and whole.replays >= part.replays
        and all(
            one.starts_seen >= other.starts_seen and one.replays_seen >= other.replays_seen
            for _, _, one, other in _both(whole, part)
        )
    )


def _both(one: Trace, other: Trace) -> Iterator[tuple[int, int, Touched, Touched]]:
    """The object's touched pieces, each with its extents in two traces."""
    tagged = [_Tagged(e, number) for number, t in enumerate((one, other)) for e in t.extents]
    for start, end, covering in _cut_at_borders(tagged):
        by_trace = {each.trace: each.extent for each in covering}
        untouched = Touched(start, end - start, 0, 0)
        yield start, end, by_trace.get(0, untouched), by_trace.get(1, untouched)


class _Tagged(NamedTuple):
    """An extent, and the number of its trace."""

    extent: Touched
    trace: int


def _cut_at_borders(tagged: Iterable[_Tagged]) -> Iterator[tuple[int, int, list[_Tagged]]]:
    """Cut the object where any extent begins or ends: each piece with the extents over it."""
    borders = []
    for number, one in enumerate(tagged):
        borders.append((one.extent.offset, 1, number, one))
        borders.append((one.extent.offset + one.extent.length, 0, number, one))
    borders.sort(key=lambda border: border[:3])
    covering: dict[int, _Tagged] = {}
    last = 0
    for at, begins, number, one in borders:
        if covering and at > last:
            yield last, at, list(covering.values())
        last = at
        if begins:
            covering[number] = one
        else:
            del covering[number]


def _combine(start: int, end: int, over: list[Touched], starts: int, replays: int) -> Touched:
    """One piece with the starts of all traces, ordered by full starts where there are any."""
    full = sum(one.starts_seen for one in over)
    others = sum(one.replays_seen for one in over)
    weighted = [(one.first_touch_ms, one.starts_seen) for one in over if one.starts_seen]
    at_ms = _median_ms(weighted or [(one.first_touch_ms, one.replays_seen) for one in over])
    return Touched(start, end - start, at_ms, min(full, starts), min(others, max(replays, 1)))


def _median_ms(weighted: list[tuple[int, int]]) -> int:
    """The median first touch; each has the number of starts that it stands for."""
    weighted.sort()
    half = sum(weight for _, weight in weighted) / 2
    below = 0
    for at_ms, weight in weighted:
        below += weight
        if below >= half:
            return at_ms
    return weighted[-1][0]


def _join(pieces: Iterable[Touched]) -> list[Touched]:
    """Join neighbours that as many starts touched at about the same moment."""
    joined: list[Touched] = []
    for piece in pieces:
        if joined:
            last = joined[-1]
            near = abs(piece.first_touch_ms - last.first_touch_ms) <= NEAR_MS
            touching = last.offset + last.length == piece.offset
            if touching and near and piece[3:] == last[3:]:
                early = min(last.first_touch_ms, piece.first_touch_ms)
                length = last.length + piece.length
                joined[-1] = last._replace(length=length, first_touch_ms=early)
                continue
        joined.append(piece)
    return joined


class Move(NamedTuple):
    """Equal bytes of two versions: `[old, old + length)` became `[new, new + length)`."""

    old: int
    new: int
    length: int


class FilePlace(NamedTuple):
    """Where a file lies in an object: its extents in the file's order, and its content's digest."""

    digest: str
    extents: tuple[Extent, ...]


def moves(old: Mapping[str, FilePlace], new: Mapping[str, FilePlace]) -> list[Move]:
    """The bytes that two versions share, by files of equal path and content, or equal content."""
    by_digest = {place.digest: place for place in old.values()}
    moved: list[Move] = []
    for path, place in new.items():
        before = old.get(path)
        if before is None or before.digest != place.digest:
            before = by_digest.get(place.digest)
        if before is not None:
            moved += _pair_extents(before.extents, place.extents)
    return moved


def _pair_extents(old: Sequence[Extent], new: Sequence[Extent]) -> list[Move]:
    """Pair two lists of extents that hold the same bytes, cut in different ways."""
    moved = []
    left, right = list(reversed(old)), list(reversed(new))
    while left and right:
        a, b = left.pop(), right.pop()
        length = min(a.length, b.length)
        if length:
            moved.append(Move(a.offset, b.offset, length))
        if a.length > length:
            left.append(Extent(a.offset + length, a.length - length))
        if b.length > length:
            right.append(Extent(b.offset + length, b.length - length))
    return moved


def carry_over(trace: Trace, moved: Iterable[Move], object_name: str, size_bytes: int) -> Trace:
    """The trace for a new version of its object, with touched bytes at their new places.

    It lacks pages that are new or whose content changed; the next starts add them. Shares stay as
    they are.
    """
    old = sorted(trace.extents)
    carried: list[Touched] = []
    for move in moved:
        at = max(0, bisect.bisect_right(old, move.old, key=lambda e: e.offset) - 1)
        while at < len(old) and old[at].offset < move.old + move.length:
            carried += _carry_extent(old[at], move, trace.page_bytes, size_bytes)
            at += 1
    pieces = []
    for start, end, covering in _cut_at_borders(_Tagged(extent, 0) for extent in carried):
        first_touch_ms = min(one.extent.first_touch_ms for one in covering)
        count = max(one.extent.starts_seen for one in covering)
        replays = max(one.extent.replays_seen for one in covering)
        pieces.append(Touched(start, end - start, first_touch_ms, count, replays))
    extents = _sort_by_touch(_join(pieces))
    return dataclasses.replace(trace, object=object_name, size_bytes=size_bytes, extents=extents)


def _carry_extent(extent: Touched, move: Move, page_bytes: int, size_bytes: int) -> list[Touched]:
    """The pages that an extent's part of a move touches in the new version."""
    start = max(extent.offset, move.old)
    end = min(extent.offset + extent.length, move.old + move.length)
    place = (start - move.old + move.new, end - start)
    pages = align([place], size_bytes, page_bytes)
    return [extent._replace(offset=p.offset, length=p.length) for p in pages]
