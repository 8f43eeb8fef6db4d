"""Traces: which ranges of an object a start touched, in which order; merged over starts.

A trace is one zstd frame of JSON (docs/blocks.md). `starts` counts the starts that could have
shown everything: cold ones that nothing was replayed to. A start from a warm page cache, or a
replayed one, sees only part of what it reads. Its trace has `starts` 0: merging it in may add
extents and raise `starts_seen`, and cannot lower anybody's share nor change the order of what
full starts have told.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import zstandard

from bootseer.blocks.extent import PAGE_BYTES, Extent, aligned
from bootseer.errors import CorruptDataError, UsageError

VERSION = 1
NEAR_MS = 20  # first touches so close together are one moment: neighbours join
MAX_NAME_CHARS = 512


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
    """Pages `[offset, offset + length)`: when they were first touched, and in how many starts."""

    offset: int
    length: int
    first_touch_ms: int
    starts_seen: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What starts of one workload touched of one object.

    `extents` do not overlap, have whole pages (the object's end apart), and stand in the order of
    first touch. `object` names the bytes, as a source's key does.
    """

    object: str
    size_bytes: int
    workload: str
    starts: int
    extents: tuple[Touched, ...]
    page_bytes: int = PAGE_BYTES

    def touched_bytes(self) -> int:
        """Bytes of all extents together."""
        return sum(extent.length for extent in self.extents)

    def hot(self, share: float) -> Trace:
        """Only what at least that share of the starts touched (0 to 1)."""
        least = share * self.starts
        kept = tuple(extent for extent in self.extents if extent.starts_seen >= least)
        return dataclasses.replace(self, extents=kept)


def serialise(trace: Trace) -> bytes:
    """The trace as a file's bytes."""
    document = {
        "version": VERSION,
        "object": trace.object,
        "size": trace.size_bytes,
        "page": trace.page_bytes,
        "workload": trace.workload,
        "starts": trace.starts,
        "extents": trace.extents,
    }
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text)


def parse(data: bytes, *, limits: Limits = LIMITS, name: str = "the trace") -> Trace:
    """Read a trace file. Raises CorruptDataError for whatever is not a plausible one."""
    if len(data) > limits.packed_bytes:
        raise CorruptDataError(f"{name} has {len(data)} bytes, more than {limits.packed_bytes}")
    try:
        document = json.loads(_unpacked(data, limits, name))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise CorruptDataError(f"{name} is none of a version that is known here")
    try:
        return _checked(document, limits)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{name} is damaged or forged: {error}") from error


def _unpacked(data: bytes, limits: Limits, name: str) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=limits.window_bytes)
    try:
        # A frame that does not say its size could be cut behind its last block unnoticed.
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= limits.raw_bytes:
            raise CorruptDataError(f"{name} unpacks to more than {limits.raw_bytes} bytes")
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"{name} is no intact zstd frame: {error}") from error


def _checked(document: dict[str, Any], limits: Limits) -> Trace:
    size_bytes = _number(document["size"], 0, (1 << 63) - 1)
    page_bytes = _number(document["page"], 512, 1 << 30)
    starts = _number(document["starts"], 0, limits.starts)
    rows = document["extents"]
    if not isinstance(rows, list) or len(rows) > limits.extents:
        raise ValueError(f"more than {limits.extents} extents, or none at all")
    extents = []
    for row in rows:
        offset, length, first_touch_ms, seen = row
        _number(offset, 0, size_bytes - 1)
        _number(length, 1, size_bytes - offset)
        _number(first_touch_ms, 0, 1 << 40)
        _number(seen, 1, max(starts, 1))
        if offset % page_bytes or ((offset + length) % page_bytes and offset + length < size_bytes):
            raise ValueError(f"the extent at {offset} does not have whole pages")
        extents.append(Touched(offset, length, first_touch_ms, seen))
    for before, after in itertools.pairwise(sorted(extents)):
        if before.offset + before.length > after.offset:
            raise ValueError(f"two extents overlap at {after.offset}")
    names = [document["object"], document["workload"]]
    if not all(isinstance(n, str) and len(n) <= MAX_NAME_CHARS for n in names):
        raise ValueError("a name that is none")
    extents.sort(key=lambda e: e.first_touch_ms)  # within a moment the file's order stands
    return Trace(names[0], size_bytes, names[1], starts, tuple(extents), page_bytes)


def _number(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a number from {least} to {most}")
    return value


def _ordered(extents: Iterable[Touched]) -> tuple[Touched, ...]:
    return tuple(sorted(extents, key=lambda e: (e.first_touch_ms, e.offset)))


def merge(traces: Sequence[Trace], share: float = 0.0) -> Trace:
    """One trace of all starts: the union, by the median first touch of those who touched.

    Drops what fewer than `share` of the full starts touched; keep 0 while more starts are to be
    merged in later. Raises UsageError for traces of different objects, or for none.
    """
    if not traces:
        raise UsageError("there is no trace to merge")
    first = traces[0]
    about = (first.object, first.size_bytes, first.page_bytes)
    if any((t.object, t.size_bytes, t.page_bytes) != about for t in traces):
        raise UsageError("the traces are of different objects; carry the older ones over first")
    starts = sum(trace.starts for trace in traces)
    seen = [_Seen(extent, trace.starts > 0) for trace in traces for extent in trace.extents]
    pieces = [_combined(start, end, over, starts) for start, end, over in _sweep(seen)]
    merged = dataclasses.replace(first, starts=starts, extents=_ordered(_join(pieces)))
    return merged.hot(share)


class _Seen(NamedTuple):
    """An extent and whether it comes from full starts, which alone decide the order."""

    extent: Touched
    full: bool


def _sweep(seen: Iterable[_Seen]) -> Iterator[tuple[int, int, list[_Seen]]]:
    """Cut the object where any extent begins or ends: each piece with the extents over it."""
    marks = []
    for number, one in enumerate(seen):
        marks.append((one.extent.offset, 1, number, one))
        marks.append((one.extent.offset + one.extent.length, 0, number, one))
    marks.sort(key=lambda mark: mark[:3])
    over: dict[int, _Seen] = {}
    last = 0
    for at, begins, number, one in marks:
        if over and at > last:
            yield last, at, list(over.values())
        last = at
        if begins:
            over[number] = one
        else:
            del over[number]


def _combined(start: int, end: int, over: list[_Seen], starts: int) -> Touched:
    """One piece: seen by all together, ordered by full starts where there is one."""
    count = min(sum(one.extent.starts_seen for one in over), max(starts, 1))
    telling = [one.extent for one in over if one.full] or [one.extent for one in over]
    return Touched(start, end - start, _median_ms(telling), count)


def _median_ms(extents: list[Touched]) -> int:
    """The median first touch, each extent counting for as many starts as it stands for."""
    extents = sorted(extents, key=lambda e: e.first_touch_ms)
    half = sum(extent.starts_seen for extent in extents) / 2
    below = 0
    for extent in extents:
        below += extent.starts_seen
        if below >= half:
            return extent.first_touch_ms
    return extents[-1].first_touch_ms


def _join(pieces: Iterable[Touched]) -> list[Touched]:
    """Join neighbours that as many starts touched at about the same moment."""
    out: list[Touched] = []
    for piece in pieces:
        if out:
            last = out[-1]
            near = abs(piece.first_touch_ms - last.first_touch_ms) <= NEAR_MS
            touching = last.offset + last.length == piece.offset
            if touching and near and piece.starts_seen == last.starts_seen:
                early = min(last.first_touch_ms, piece.first_touch_ms)
                out[-1] = Touched(last.offset, last.length + piece.length, early, last.starts_seen)
                continue
        out.append(piece)
    return out


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
    """What two versions share, file by file: of the same path and content, else content alone."""
    elsewhere = {place.digest: place for place in old.values()}
    out = []
    for path, place in new.items():
        before = old.get(path)
        if before is None or before.digest != place.digest:
            before = elsewhere.get(place.digest)
        if before is not None:
            out += _moved(before.extents, place.extents)
    return out


def _moved(old: Sequence[Extent], new: Sequence[Extent]) -> list[Move]:
    """Pair two lists of extents that hold the same bytes, cut in different ways."""
    out = []
    left, right = list(reversed(old)), list(reversed(new))
    while left and right:
        a, b = left.pop(), right.pop()
        length = min(a.length, b.length)
        if length:
            out.append(Move(a.offset, b.offset, length))
        if a.length > length:
            left.append(Extent(a.offset + length, a.length - length))
        if b.length > length:
            right.append(Extent(b.offset + length, b.length - length))
    return out


def carry_over(trace: Trace, moved: Iterable[Move], object_name: str, size_bytes: int) -> Trace:
    """The trace for a new version of its object: what was touched, wherever it lies now.

    Pages that are new or whose content changed are not in it; the next starts add them. Shares
    stay as they are.
    """
    old = sorted(trace.extents)
    found: list[Touched] = []
    for move in moved:
        at = max(0, bisect.bisect_right(old, move.old, key=lambda e: e.offset) - 1)
        while at < len(old) and old[at].offset < move.old + move.length:
            found += _carried(old[at], move, trace.page_bytes, size_bytes)
            at += 1
    pieces = []
    for start, end, over in _sweep(_Seen(extent, True) for extent in found):
        first_touch_ms = min(one.extent.first_touch_ms for one in over)
        count = max(one.extent.starts_seen for one in over)
        pieces.append(Touched(start, end - start, first_touch_ms, count))
    extents = _ordered(_join(pieces))
    return dataclasses.replace(trace, object=object_name, size_bytes=size_bytes, extents=extents)


def _carried(extent: Touched, move: Move, page_bytes: int, size_bytes: int) -> list[Touched]:
    """The pages that an extent's part of a move touches in the new version."""
    start = max(extent.offset, move.old)
    end = min(extent.offset + extent.length, move.old + move.length)
    place = (start - move.old + move.new, end - start)
    pages = aligned([place], size_bytes, page_bytes)
    return [Touched(p.offset, p.length, extent.first_touch_ms, extent.starts_seen) for p in pages]
