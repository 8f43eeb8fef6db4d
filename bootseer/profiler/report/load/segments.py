"""The usual file, checked and paired column by column (pure).

A *segment* is what one writer leaves: its resource line, then its events, in one trace, under span
ids of one prefix. A file of a process is one segment; a file of a node's processes, joined, is
several. Checks run over columns, at C speed, and a segment is plain values of few objects, so that
another process may make it and hand it over (see `readers`). Whatever is not so is None here, and
`loadstate` goes event by event, with the same result.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter, sub
from typing import Any, NamedTuple

from bootseer.profiler.report.load.columns import Spans, columns_of

VERSION = 1
PREFIX_CHARS = 10  # of a span id: the same for all spans of one writer (see `events`)
JUMP_NS = 50_000_000
MAX_TIME_NS = 1 << 62
LEAST_NS = 10**17  # in March 1973; what is less was not written in nanoseconds

# name, time on the writer's clock, status, parent id, attributes or None
Begin = tuple[str, int, str, str | None, dict[str, object] | None]

_FIELDS = itemgetter(
    "event",
    "trace_id",
    "span_id",
    "parent_span_id",
    "name",
    "time_unix_nano",
    "mono_nano",
    "status",
    "attributes",
    "v",
)
_KINDS = {"begin", "end", "point"}
_KINDS_OR_RESOURCE = _KINDS | {"resource"}
_TEXT_OR_NONE = {str, type(None)}
_INT, _TEXT, _OBJECT = {int}, {str}, {dict}


class Segment(NamedTuple):
    """One writer's events, paired; `negative` counts the spans that ended before they began.

    `offset_ns` and `jumps` are of the writer's clock (see `settled`). `clock` is empty where the
    segment is all of its writer's events; else they are settled once all of them are known.
    """

    trace: str
    prefix: str
    resource: dict[str, object]
    events: int
    base_ns: int
    offset_ns: int
    jumps: int
    first_mono_ns: int
    clock: list[tuple[int, int]]
    negative: int
    spans: Spans
    open: dict[str, Begin]
    orphans: list[tuple[str, Begin]]


def settled(monos: Sequence[int], offsets: Sequence[int]) -> tuple[int, int]:
    """The median of (wall - monotonic), and how often the wall clock jumped; one of each at least.

    A clock being slewed moves by at most 500 ppm; twice that is still no jump.
    """
    ordered = sorted(offsets)
    middle = ordered[len(ordered) // 2]
    if ordered[-1] - ordered[0] <= JUMP_NS:
        return middle, 0
    jumps = sum(
        abs(b[1] - a[1]) > JUMP_NS + abs(b[0] - a[0]) // 1000
        for a, b in pairwise(zip(monos, offsets, strict=True))
    )
    return middle, jumps


def told(
    begun_with: dict[str, object] | None, ended_with: dict[str, object] | None
) -> tuple[bool, dict[str, object] | None]:
    """Whether a span waited, and its attributes, from those of its two halves."""
    attributes = begun_with
    if ended_with is not None:
        attributes = ended_with if begun_with is None else {**begun_with, **ended_with}
    if attributes is None:
        return False, None
    wait = attributes.get("bootseer.wait") is True
    return wait, None if wait and len(attributes) == 1 else attributes


def paired(
    key: str, begin: Begin, end: Begin
) -> tuple[str, int, int | None, bool, str, bool, str, str | None, dict[str, object] | None]:
    """The fields of a span from its two halves; its status is `unknown`, and its end None, where
    it ended before it began."""
    name, began, _, parent, begun_with = begin
    _, ended, status, _, ended_with = end
    wait, attributes = told(begun_with, ended_with)
    if ended < began:
        return name, began, None, wait, "unknown", False, key, parent, attributes
    return name, began, ended, wait, sys.intern(status), False, key, parent, attributes


def pack(events: Sequence[object], *, whole: bool) -> list[Segment] | None:
    """All of `events` as segments, or None where anything in them is not as the writer leaves it.

    `whole` tells that no more events of the same file follow.
    """
    try:
        rows = list(map(_FIELDS, events))  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return None
    if len(rows) < 2:
        return None
    columns = list(zip(*rows, strict=True))
    if not _are_usual(columns):
        return None
    kinds: tuple[str, ...] = columns[0]
    starts = [place for place, kind in enumerate(kinds) if kind == "resource"]
    if starts[:1] != [0]:
        return None
    out: list[Segment] = []
    for low, high in pairwise([*starts, len(rows)]):
        part = [column[low:high] for column in columns] if len(starts) > 1 else columns
        segment = segment_of(part[:-1], whole=whole)
        if segment is None:
            return None
        out.append(segment)
    return out if are_distinct(out) else None


def are_distinct(segments: Sequence[Segment]) -> bool:
    """Whether each has a prefix of its own."""
    return len({segment.prefix for segment in segments}) == len(segments)


def _are_usual(columns: Sequence[tuple[Any, ...]]) -> bool:
    """Whether every field of every event has its proper type and a value within bounds."""
    kinds, traces, ids, parents, names, walls, monos, states, more, versions = columns
    return (
        all(set(map(type, texts)) == _TEXT for texts in (kinds, traces, ids, names, states))
        and all(set(map(type, numbers)) == _INT for numbers in (walls, monos, versions))
        and set(map(type, more)) == _OBJECT
        and set(map(type, parents)) <= _TEXT_OR_NONE
        and set(kinds) <= _KINDS_OR_RESOURCE
        and set(versions) == {VERSION}
        and all(names)
        and min(walls) >= LEAST_NS
        and max(walls) < MAX_TIME_NS
        and max(monos) < MAX_TIME_NS
        and min(monos) > -MAX_TIME_NS
    )


def segment_of(columns: Sequence[Sequence[Any]], *, whole: bool) -> Segment | None:
    """One writer's columns, its resource line first, as a segment; None where its ids repeat or
    are not of one prefix. They are those of `_FIELDS` up to the attributes."""
    kinds, traces, ids, parents, names, walls, monos, states, more = columns
    prefix = ids[0][:PREFIX_CHARS]
    if len(ids) < 2 or len(set(traces)) > 1 or {key[:PREFIX_CHARS] for key in ids} != {prefix}:
        return None
    # An offset of 0 means that there is no monotonic clock.
    offsets = list(map(sub, walls[1:], monos[1:]))
    if not offsets[0]:
        return None
    ended = [key for key, kind in zip(ids, kinds, strict=True) if kind == "end"]
    begun = [key for key, kind in zip(ids[1:], kinds[1:], strict=True) if kind != "end"]
    if len(set(begun)) < len(begun) or len(set(ended)) < len(ended):
        return None
    spans: list[tuple[Any, ...]] = []
    opened: dict[str, Begin] = {}
    orphans: list[tuple[str, Begin]] = []
    negative = 0
    intern = sys.intern
    for kind, key, parent, name, moment, status, about in zip(
        kinds, ids, parents, names, monos, states, more, strict=True
    ):
        if kind == "begin":
            opened[key] = (intern(name), moment, status, parent, about or None)
        elif kind == "end":
            half = (name, moment, status, parent, about or None)
            begin = opened.pop(key, None)
            if begin is None:
                orphans.append((key, half))
            else:
                span = paired(key, begin, half)
                negative += span[2] is None
                spans.append(span)
        elif kind == "point":
            row = (intern(name), moment, moment, False, status, True, key, parent, about or None)
            spans.append(row)
    clock = clock_of(monos[1:], offsets, whole=whole)
    events = len(ids) - 1
    columns_of_spans = columns_of(spans)
    return Segment(
        intern(traces[0]),
        prefix,
        more[0],
        events,
        *clock,
        negative,
        columns_of_spans,
        opened,
        orphans,
    )


def clock_of(
    monos: Sequence[int], offsets: Sequence[int], *, whole: bool
) -> tuple[int, int, int, int, list[tuple[int, int]]]:
    """A segment's fields from `base_ns` to `clock`, of all events' monotonic times and offsets."""
    offset_ns, jumps = settled(monos, offsets) if whole else (offsets[0], 0)
    clock = [] if whole else list(zip(monos, offsets, strict=True))
    return offsets[0], offset_ns, jumps, monos[0], clock
