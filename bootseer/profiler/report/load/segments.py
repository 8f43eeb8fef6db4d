"""Segments: one writer's events, checked and paired column by column (pure).

A *segment* is what one writer leaves: its resource line, then its events, all in one trace and
under span ids with one prefix. A file of one process is one segment; the joined file of a node's
processes is several. Checks run over whole columns, at C speed, and a segment consists of few plain
values, so that another process may make it and hand it over (see `readers`). For events in any
other form the result here is None; `pairing` then takes them one by one, with the same result.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter, sub
from typing import Any, NamedTuple

from bootseer.profiler.report.load.columns import Spans, columns_of

VERSION = 1
PREFIX_CHARS = 10  # of a span id: the same for all spans of one writer (see `events.writer`)
JUMP_NS = 50_000_000
MAX_TIME_NS = 1 << 62
MIN_TIME_NS = 10**17  # March 1973: a smaller number was not written in nanoseconds

Half = tuple[str, int, str, str | None, dict[str, object] | None]
"""One end of a span: name, time on the writer's clock, status, parent id, attributes or None."""

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

    `base_ns` is the first event's wall time minus its monotonic time. `offset_ns` and `jumps` are
    those of `settle_clock`, final only where `clock` is empty: then the segment is all of its
    writer's events. Else `clock` has each event's (monotonic time, wall time minus monotonic
    time), from which they follow once all events are known. `open` has the begins without an end
    and `orphans` the ends without a begin, each with its span id.
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
    open: dict[str, Half]
    orphans: list[tuple[str, Half]]


def settle_clock(monos: Sequence[int], offsets: Sequence[int]) -> tuple[int, int]:
    """The median of the offsets (wall minus monotonic time), and how often the wall clock jumped.

    There must be at least one of each. A clock that is slewed moves by at most 500 ppm; up to
    twice that is no jump.
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


def join_attributes(
    begun_with: dict[str, object] | None, ended_with: dict[str, object] | None
) -> tuple[bool, dict[str, object] | None]:
    """Whether a span is a wait, and its attributes, from the attributes of its begin and end."""
    attributes = begun_with
    if ended_with is not None:
        attributes = ended_with if begun_with is None else {**begun_with, **ended_with}
    if attributes is None:
        return False, None
    wait = attributes.get("bootseer.wait") is True
    return wait, None if wait and len(attributes) == 1 else attributes


def join_halves(
    key: str, begin: Half, end: Half
) -> tuple[str, int, int | None, bool, str, bool, str, str | None, dict[str, object] | None]:
    """The fields of a `Span` from its begin and its end.

    Where it ended before it began, its status is `unknown` and its end None.
    """
    name, began, _, parent, begun_with = begin
    _, ended, status, _, ended_with = end
    wait, attributes = join_attributes(begun_with, ended_with)
    if ended < began:
        return name, began, None, wait, "unknown", False, key, parent, attributes
    return name, began, ended, wait, sys.intern(status), False, key, parent, attributes


def pack_events(events: Sequence[object], *, whole: bool) -> list[Segment] | None:
    """All of `events` as segments, or None where any is not as the event writer writes it.

    With `whole`, no more events of the same file follow.
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
    starts = [index for index, kind in enumerate(kinds) if kind == "resource"]
    if starts[:1] != [0]:
        return None
    segments: list[Segment] = []
    for low, high in pairwise([*starts, len(rows)]):
        part = [column[low:high] for column in columns] if len(starts) > 1 else columns
        segment = make_segment(part[:-1], whole=whole)
        if segment is None:
            return None
        segments.append(segment)
    return segments if have_distinct_prefixes(segments) else None


def have_distinct_prefixes(segments: Sequence[Segment]) -> bool:
    """Whether each segment has a prefix of its own."""
    return len({segment.prefix for segment in segments}) == len(segments)


def _are_usual(columns: Sequence[tuple[Any, ...]]) -> bool:
    """Whether every field of every event has its proper type and a value within bounds."""
    kinds, traces, ids, parents, names, walls, monos, statuses, attributes, versions = columns
    return (
        all(set(map(type, texts)) == _TEXT for texts in (kinds, traces, ids, names, statuses))
        and all(set(map(type, numbers)) == _INT for numbers in (walls, monos, versions))
        and set(map(type, attributes)) == _OBJECT
        and set(map(type, parents)) <= _TEXT_OR_NONE
        and set(kinds) <= _KINDS_OR_RESOURCE
        and set(versions) == {VERSION}
        and all(names)
        and min(walls) >= MIN_TIME_NS
        and max(walls) < MAX_TIME_NS
        and max(monos) < MAX_TIME_NS
        and min(monos) > -MAX_TIME_NS
    )


def make_segment(columns: Sequence[Sequence[Any]], *, whole: bool) -> Segment | None:
    """Make a segment of one writer's columns, its resource line first.

    The columns are those of `_FIELDS` up to the attributes. None where span ids repeat or have
    more than one prefix.
    """
    kinds, traces, ids, parents, names, walls, monos, statuses, attributes = columns
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
    opened: dict[str, Half] = {}
    orphans: list[tuple[str, Half]] = []
    negative = 0
    intern = sys.intern
    for kind, key, parent, name, moment, status, about in zip(
        kinds, ids, parents, names, monos, statuses, attributes, strict=True
    ):
        if kind == "begin":
            opened[key] = (intern(name), moment, status, parent, about or None)
        elif kind == "end":
            half = (name, moment, status, parent, about or None)
            begin = opened.pop(key, None)
            if begin is None:
                orphans.append((key, half))
            else:
                span = join_halves(key, begin, half)
                negative += span[2] is None
                spans.append(span)
        elif kind == "point":
            row = (intern(name), moment, moment, False, status, True, key, parent, about or None)
            spans.append(row)
    clock = describe_clock(monos[1:], offsets, whole=whole)
    events = len(ids) - 1
    return Segment(
        intern(traces[0]),
        prefix,
        attributes[0],
        events,
        *clock,
        negative,
        columns_of(spans),
        opened,
        orphans,
    )


def describe_clock(
    monos: Sequence[int], offsets: Sequence[int], *, whole: bool
) -> tuple[int, int, int, int, list[tuple[int, int]]]:
    """A segment's fields from `base_ns` to `clock`; `offsets` are wall minus monotonic times."""
    offset_ns, jumps = settle_clock(monos, offsets) if whole else (offsets[0], 0)
    clock = [] if whole else list(zip(monos, offsets, strict=True))
    return offsets[0], offset_ns, jumps, monos[0], clock
