"""Blocks of lines in the event writer's own words, taken apart by one pattern (pure).

The writer (see `events`) leaves one form of line only: these fields in this order, without blanks.
A search for that form takes a third of the time of parsing JSON, and gives columns at once, most
often a phase's begin and end in one row. Only attributes are JSON still, and few of them differ.
What is in any other form, or has an escape in a text, is None here: the caller parses it as JSON,
with the same result.
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

from bootseer.profiler.report.load.columns import Spans, shared
from bootseer.profiler.report.load.segments import (
    PREFIX_CHARS,
    Segment,
    are_distinct,
    clock_of,
    segment_of,
    told,
)
from bootseer.profiler.report.load.templates import Templates

_TEXT = r'[^"\\\x00-\x1f]'
_TIMES = r'"time_unix_nano":([1-3][0-9]{18}),"mono_nano":(0|[1-9][0-9]{0,17})'
_OUTCOME = rf'"status":"({_TEXT}*)","attributes":(\{{.*\}})\}}\n'
_ABOVE = rf'"parent_span_id":(?:null|"({_TEXT}+)")'
_ROW = re.compile(
    r'^\{"v":1,"event":"(begin|end|point|resource)"'
    rf',"trace_id":"({_TEXT}*)","span_id":"([0-9a-f]{{16}})",{_ABOVE},"name":"({_TEXT}+)"'
    rf",{_TIMES},{_OUTCOME}"
    # the end of the very span that began in this line, where it follows at once
    r'(?:\{"v":1,"event":"end","trace_id":"\2","span_id":"\3"'
    rf',"parent_span_id":(?:null|"{_TEXT}+"),"name":"\5",{_TIMES},{_OUTCOME})?',
    re.MULTILINE,
)
"""Fields of a line, then time, status and attributes of its end; "" where there is none.

What it lets through is within the bounds of `segments`: times from 2001 to 2096, versions 1.
"""

RESOURCE = b'{"v":1,"event":"resource"'
_DEEPEST = 64  # brackets in attributes; a parser's limit depends on what is around them

# NaN and Infinity are no JSON, though Python's parser knows them: they become None.
decode = json.JSONDecoder(parse_constant=lambda _: None).decode


def pack_lines(
    block: bytes, *, whole: bool, templates: Templates | None = None
) -> list[Segment] | None:
    """What `segments.pack` makes of the events in `block`, or None where any line differs from
    the writer's form, or `pack` would refuse them.

    `whole` tells that no more events of the same file follow. `templates` are of files before.
    """
    if not block.startswith(RESOURCE):
        return None
    if not whole or templates is None or not templates.useful:
        return _searched(block, whole)
    out: list[Segment] = []
    known = _Objects()
    for line, events in _writers(block):
        segment = _fitted(line, events, known, templates)
        if segment is None:
            found = _searched(line + events, whole)
            if found is None:
                return None
            (segment,) = found
            templates.learn(events, segment)
        out.append(segment)
    return out if are_distinct(out) else None


def _writers(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each writer's resource line, and the lines of its events."""
    start = 0
    while start < len(block):
        cut = block.find(b"\n", start) + 1 or len(block)
        end = block.find(b"\n" + RESOURCE, cut - 1) + 1 or len(block)
        yield block[start:cut], block[cut:end]
        start = end


def _fitted(line: bytes, events: bytes, known: _Objects, templates: Templates) -> Segment | None:
    """A writer's segment by a template; None where none fits, or the line is no resource line."""
    if not templates.fit(events):
        return None
    try:
        row = _ROW.fullmatch(line.decode("utf-8"))
        if row is None:
            return None
        return templates.segment(events, row[2], row[3][:PREFIX_CHARS], known[row[9]] or {})
    except (ValueError, RecursionError):
        return None


def _searched(block: bytes, whole: bool) -> list[Segment] | None:
    try:
        rows = _ROW.findall(block.decode("utf-8"))
    except UnicodeDecodeError:
        return None
    # A row begins and ends with its lines, so as many lines as there are leave none out.
    ends = [row[9] for row in rows]
    if 2 * len(rows) - ends.count("") != block.count(b"\n") or not block.endswith(b"\n"):
        return None
    columns = list(zip(*rows, strict=True))
    starts = [place for place, kind in enumerate(columns[0]) if kind == "resource"]
    known = _Halves()
    out: list[Segment] = []
    try:
        for low, high in pairwise([*starts, len(rows)]):
            segment = _segment([column[low:high] for column in columns], known, whole)
            if segment is None:
                return None
            out.append(segment)
    except (ValueError, RecursionError):  # attributes that are no JSON
        return None
    return out if are_distinct(out) else None


class _Objects(dict[str, "dict[str, object] | None"]):
    """Attributes by their JSON, each parsed once; None where there are none."""

    def __missing__(self, text: str) -> dict[str, object] | None:
        if text.count("{") + text.count("[") > _DEEPEST:
            raise ValueError(text)
        self[text] = found = decode(text) or None
        return found


_About = tuple[tuple[bool, ...], tuple["dict[str, object] | None", ...]]


class _Halves(dict[tuple[str, str], "tuple[bool, dict[str, object] | None]"]):
    """Whether a span waited, and its attributes, by the JSON of its two halves' attributes."""

    def __init__(self) -> None:
        self.objects = _Objects()
        self._columns: dict[tuple[tuple[str, ...], tuple[str, ...]], _About] = {}

    def columns(self, begun_with: tuple[str, ...], ended_with: tuple[str, ...]) -> _About:
        """The same of many spans, of which a file's writers often have equal ones."""
        found = self._columns.get((begun_with, ended_with))
        if found is None:
            each = map(self.__getitem__, zip(begun_with, ended_with, strict=True))
            waits, attributes = zip(*each, strict=True)
            found = self._columns[begun_with, ended_with] = (waits, attributes)
        return found

    def __missing__(self, texts: tuple[str, str]) -> tuple[bool, dict[str, object] | None]:
        begun_with, ended_with = texts
        self[texts] = found = told(self.objects[begun_with], self.objects[ended_with])
        return found


def _segment(columns: Sequence[tuple[str, ...]], known: _Halves, whole: bool) -> Segment | None:
    kinds, ended = columns[0], columns[9]
    # The first is the resource line, which nothing ends.
    if not ended[0] and ended.count("") == 1 and kinds.count("begin") == len(kinds) - 1 > 0:
        return _paired_segment(columns, known, whole)
    return _segment_of_events(columns, known, whole)


def _paired_segment(
    columns: Sequence[tuple[str, ...]], known: _Halves, whole: bool
) -> Segment | None:
    """The segment of a writer all of whose phases ended before the next one began."""
    resource = known.objects[columns[8][0]] or {}
    prefix = columns[2][0][:PREFIX_CHARS]
    trace = columns[1][0]
    _, traces, ids, parents, names, begun_walls, begun_monos, _, begun_with, *ends = (
        column[1:] for column in columns
    )
    ended_walls, ended_monos, states, ended_with = ends
    if (
        min(ids)[:PREFIX_CHARS] != prefix
        or max(ids)[:PREFIX_CHARS] != prefix
        or len(set(ids)) < len(ids)
        or traces.count(trace) < len(traces)
    ):
        return None
    begun, ended = list(map(int, begun_monos)), list(map(int, ended_monos))
    if any(map(gt, begun, ended)):
        return _segment_of_events(columns, known, whole)
    monos = _in_turn(begun, ended)
    walls = _in_turn(list(map(int, begun_walls)), list(map(int, ended_walls)))
    offsets = list(map(sub, walls, monos))  # none is 0: by the pattern, walls are longer
    waits, attributes = known.columns(begun_with, ended_with)
    spans = Spans(
        shared((names, waits, states, (False,) * len(ids))),
        array("q", monos),
        "".join(ids),  # by the pattern all are as long as each other
        tuple([parent or None for parent in parents]) if any(parents) else None,
        attributes if any(attributes) else None,
    )
    clock = clock_of(monos, offsets, whole=whole)
    return Segment(sys.intern(trace), prefix, resource, len(monos), *clock, 0, spans, {}, [])


def _in_turn(begun: Sequence[int], ended: Sequence[int]) -> list[int]:
    """Both as the lines have them: a begin, its end, and so on."""
    out = [0] * (2 * len(begun))
    out[::2] = begun
    out[1::2] = ended
    return out


def _segment_of_events(
    columns: Sequence[tuple[str, ...]], known: _Halves, whole: bool
) -> Segment | None:
    """The segment of any other writer: event by event."""
    objects = known.objects
    events: list[tuple[Any, ...]] = []
    for kind, trace, key, parent, name, wall, mono, status, about, *end in zip(
        *columns, strict=True
    ):
        row = (trace, key, parent or None, name)
        about_or_none = objects[about] or {}
        events.append((kind, *row, int(wall), int(mono), status, about_or_none))
        ended_wall, ended_mono, ended_status, ended_about = end
        if ended_wall:
            if kind != "begin":
                return None
            about_or_none = objects[ended_about] or {}
            times = int(ended_wall), int(ended_mono)
            events.append(("end", *row, *times, ended_status, about_or_none))
    return segment_of(list(zip(*events, strict=True)), whole=whole)
