"""Blocks of lines in the event writer's own form, taken apart by one pattern (pure).

The event writer (see `events.writer`) writes one form of line only: these fields in this order,
without blanks. A search for that form takes a third of the time of parsing JSON, and gives columns
at once, most often a phase's begin and end in one row. Only attributes are parsed as JSON, and few
of them differ. For lines in any other form, or with an escape in a text, the result is None: the
caller parses them as JSON, with the same result.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import gt, sub
from typing import Any

from bootseer.profiler.report.load.columns import Spans, share_form
from bootseer.profiler.report.load.segments import (
    PREFIX_CHARS,
    Segment,
    describe_clock,
    have_distinct_prefixes,
    join_attributes,
    make_segment,
)
from bootseer.profiler.report.load.templates import Templates

_TEXT = r'[^"\\\x00-\x1f]'
_TIMES = r'"time_unix_nano":([1-3][0-9]{18}),"mono_nano":(0|[1-9][0-9]{0,17})'
_OUTCOME = rf'"status":"({_TEXT}*)","attributes":(\{{.*\}})\}}\n'
_PARENT = rf'"parent_span_id":(?:null|"({_TEXT}+)")'
_ROW = re.compile(
    r'^\{"v":1,"event":"(begin|end|point|resource)"'
    rf',"trace_id":"({_TEXT}*)","span_id":"([0-9a-f]{{16}})",{_PARENT},"name":"({_TEXT}+)"'
    rf",{_TIMES},{_OUTCOME}"
    # the end of the very span that began in this line, where it follows at once
    r'(?:\{"v":1,"event":"end","trace_id":"\2","span_id":"\3"'
    rf',"parent_span_id":(?:null|"{_TEXT}+"),"name":"\5",{_TIMES},{_OUTCOME})?',
    re.MULTILINE,
)
"""A line's fields, then times, status and attributes of its end, each "" where there is none.

Every match is within the bounds of `segments`: times from 2001 to 2096, version 1.
"""

RESOURCE_START = b'{"v":1,"event":"resource"'
_MAX_BRACKETS = 64  # in attributes; a parser's own limit depends on what is around them

# NaN and Infinity are no JSON, though Python's parser knows them: they become None.
decode_json = json.JSONDecoder(parse_constant=lambda _: None).decode


def pack_lines(
    block: bytes, *, whole: bool, templates: Templates | None = None
) -> list[Segment] | None:
    """What `segments.pack_events` makes of the events in `block`.

    None where any line differs from the event writer's form, or `pack_events` would give None.
    With `whole`, no more events of the same file follow. `templates` are those of earlier files.
    """
    if not block.startswith(RESOURCE_START):
        return None
    if not whole or templates is None or not templates.is_useful:
        return _search_lines(block, whole)
    segments: list[Segment] = []
    parsed = _ParsedAttributes()
    for line, events in _split_writers(block):
        segment = _apply_template(line, events, parsed, templates)
        if segment is None:
            searched = _search_lines(line + events, whole)
            if searched is None:
                return None
            (segment,) = searched
            templates.learn(events, segment)
        segments.append(segment)
    return segments if have_distinct_prefixes(segments) else None


def _split_writers(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each writer's resource line, and the lines of its events."""
    start = 0
    while start < len(block):
        cut = block.find(b"\n", start) + 1 or len(block)
        end = block.find(b"\n" + RESOURCE_START, cut - 1) + 1 or len(block)
        yield block[start:cut], block[cut:end]
        start = end


def _apply_template(
    line: bytes, events: bytes, parsed: _ParsedAttributes, templates: Templates
) -> Segment | None:
    """A writer's segment by a template; None where none fits, or `line` is no resource line."""
    if not templates.may_fit(events):
        return None
    try:
        row = _ROW.fullmatch(line.decode("utf-8"))
        if row is None:
            return None
        resource = parsed[row[9]] or {}
        return templates.make_segment(events, row[2], row[3][:PREFIX_CHARS], resource)
    except (ValueError, RecursionError):
        return None


def _search_lines(block: bytes, whole: bool) -> list[Segment] | None:
    try:
        rows = _ROW.findall(block.decode("utf-8"))
    except UnicodeDecodeError:
        return None
    # A row begins and ends with its lines, so as many lines as there are leave none out.
    ends = [row[9] for row in rows]
    if 2 * len(rows) - ends.count("") != block.count(b"\n") or not block.endswith(b"\n"):
        return None
    columns = list(zip(*rows, strict=True))
    starts = [index for index, kind in enumerate(columns[0]) if kind == "resource"]
    joined = _JoinedAttributes()
    segments: list[Segment] = []
    try:
        for low, high in pairwise([*starts, len(rows)]):
            segment = _make_segment([column[low:high] for column in columns], joined, whole)
            if segment is None:
                return None
            segments.append(segment)
    except (ValueError, RecursionError):  # attributes that are no JSON
        return None
    return segments if have_distinct_prefixes(segments) else None


class _ParsedAttributes(dict[str, "dict[str, object] | None"]):
    """Attributes by their JSON text, each text parsed once; None where there are none."""

    def __missing__(self, text: str) -> dict[str, object] | None:
        if text.count("{") + text.count("[") > _MAX_BRACKETS:
            raise ValueError(text)
        self[text] = attributes = decode_json(text) or None
        return attributes


_WaitsAndAttributes = tuple[tuple[bool, ...], tuple["dict[str, object] | None", ...]]


class _JoinedAttributes(dict[tuple[str, str], "tuple[bool, dict[str, object] | None]"]):
    """Whether a span is a wait, and its attributes, by the JSON texts of its begin and end."""

    def __init__(self) -> None:
        self.parsed = _ParsedAttributes()
        self._columns: dict[tuple[tuple[str, ...], tuple[str, ...]], _WaitsAndAttributes] = {}

    def join_columns(
        self, begun_with: tuple[str, ...], ended_with: tuple[str, ...]
    ) -> _WaitsAndAttributes:
        """The same for many spans; a file's writers often have equal columns."""
        columns = self._columns.get((begun_with, ended_with))
        if columns is None:
            each = map(self.__getitem__, zip(begun_with, ended_with, strict=True))
            waits, attributes = zip(*each, strict=True)
            columns = self._columns[begun_with, ended_with] = (waits, attributes)
        return columns

    def __missing__(self, texts: tuple[str, str]) -> tuple[bool, dict[str, object] | None]:
        begun_with, ended_with = texts
        self[texts] = joined = join_attributes(self.parsed[begun_with], self.parsed[ended_with])
        return joined


def _make_segment(
    columns: Sequence[tuple[str, ...]], joined: _JoinedAttributes, whole: bool
) -> Segment | None:
    kinds, ended = columns[0], columns[9]
    # The first row is the resource line, which has no end.
    if not ended[0] and ended.count("") == 1 and kinds.count("begin") == len(kinds) - 1 > 0:
        return _make_paired_segment(columns, joined, whole)
    return _make_unpaired_segment(columns, joined, whole)


def _make_paired_segment(
    columns: Sequence[tuple[str, ...]], joined: _JoinedAttributes, whole: bool
) -> Segment | None:
    """The segment of a writer all of whose phases ended before the next one began."""
    resource = joined.parsed[columns[8][0]] or {}
    prefix = columns[2][0][:PREFIX_CHARS]
    trace = columns[1][0]
    _, traces, ids, parents, names, begun_walls, begun_monos, _, begun_with, *ends = (
        column[1:] for column in columns
    )
    ended_walls, ended_monos, statuses, ended_with = ends
    if (
        min(ids)[:PREFIX_CHARS] != prefix
        or max(ids)[:PREFIX_CHARS] != prefix
        or len(set(ids)) < len(ids)
        or traces.count(trace) < len(traces)
    ):
        return None
    begun, ended = list(map(int, begun_monos)), list(map(int, ended_monos))
    if any(map(gt, begun, ended)):
        return _make_unpaired_segment(columns, joined, whole)
    monos = _interleave(begun, ended)
    walls = _interleave(list(map(int, begun_walls)), list(map(int, ended_walls)))
    offsets = list(map(sub, walls, monos))  # none is 0: by the pattern, wall times are longer
    waits, attributes = joined.join_columns(begun_with, ended_with)
    spans = Spans(
        share_form((names, waits, statuses, (False,) * len(ids))),
        array("q", monos),
        "".join(ids),  # by the pattern, all have the same length
        tuple([parent or None for parent in parents]) if any(parents) else None,
        attributes if any(attributes) else None,
    )
    clock = describe_clock(monos, offsets, whole=whole)
    return Segment(sys.intern(trace), prefix, resource, len(monos), *clock, 0, spans, {}, [])


def _interleave(begun: Sequence[int], ended: Sequence[int]) -> list[int]:
    """Both in the order of the lines: a begin, its end, and so on."""
    moments = [0] * (2 * len(begun))
    moments[::2] = begun
    moments[1::2] = ended
    return moments


def _make_unpaired_segment(
    columns: Sequence[tuple[str, ...]], joined: _JoinedAttributes, whole: bool
) -> Segment | None:
    """The segment of any other writer: event by event."""
    parsed = joined.parsed
    events: list[tuple[Any, ...]] = []
    for kind, trace, key, parent, name, wall, mono, status, about, *end in zip(
        *columns, strict=True
    ):
        row = (trace, key, parent or None, name)
        attributes = parsed[about] or {}
        events.append((kind, *row, int(wall), int(mono), status, attributes))
        ended_wall, ended_mono, ended_status, ended_about = end
        if ended_wall:
            if kind != "begin":
                return None
            attributes = parsed[ended_about] or {}
            times = int(ended_wall), int(ended_mono)
            events.append(("end", *row, *times, ended_status, attributes))
    return make_segment(list(zip(*events, strict=True)), whole=whole)
