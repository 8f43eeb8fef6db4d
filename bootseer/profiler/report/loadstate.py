"""Turn parsed event lines into sources and starts: pairing, clocks, identities.

begin and end are paired by span id, first within their writer, then over all files of a trace
(shell scripts end a span from another process than the one that began it). A writer's times are
its monotonic ones plus the median of (wall - monotonic) over its events, so a wall clock that
jumps in between changes no duration. This is the hot part of a report: an event costs about two
microseconds, hence plain tuples and local names where a record would read better.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import itemgetter, sub
from typing import Any

from bootseer.profiler.report import speakers
from bootseer.profiler.report.identity import identity_of, true_nodes
from bootseer.profiler.report.records import Identity, Source, Span, Start

VERSION = 1
_PREFIX_CHARS = 10  # of a span id: the same for all spans of one writer (see `events`)
_JUMP_NS = 50_000_000
_BACK_NS = 1_000_000_000  # a shell may know whole seconds only
_MAX_TIME_NS = 1 << 62
_LEAST_NS = 10**17  # in March 1973; what is less was not written in nanoseconds
_UNITS = ((10**14, 10**3), (10**11, 10**6), (10**8, 10**9))  # from µs, ms, s on: ns in one
_UNKNOWN_TRACE = "unknown"

# name, time on the writer's clock, status, parent id, attributes or None
_Begin = tuple[str, int, str, str | None, dict[str, object] | None]
Event = dict[str, object]

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
_TEXT_OR_NONE = {str, type(None)}


class Writer:
    """One writer in one trace while its file is being read.

    `base_ns` turns wall times into the writer's clock; it is fixed by the first event.
    """

    __slots__ = (
        "base_ns",
        "begun",
        "clock",
        "ended",
        "file",
        "identity",
        "known",
        "latest_ns",
        "offset_ns",
        "open",
        "orphans",
        "spans",
        "trace",
    )

    def __init__(self, file: str, trace: str, begun: set[str], ended: set[str]) -> None:
        self.file = file
        self.trace = trace
        self.begun, self.ended = begun, ended  # span ids seen in this trace, over all files
        self.identity: Identity | None = None
        self.known = False  # until a resource line told who it is
        self.spans: list[Span] = []
        self.open: dict[str, _Begin] = {}
        self.orphans: list[tuple[str, _Begin]] = []
        self.clock: list[tuple[int, int]] = []  # (mono, wall - mono) of each event
        self.base_ns: int | None = None
        self.latest_ns = 0  # begin or point, where there is no monotonic clock
        self.offset_ns = 0

    def who(self) -> Identity:
        """The writer's identity, set before its first event."""
        assert self.identity is not None
        return self.identity

    def settle(self) -> int:
        """Fix the offset to the node's wall clock; return how often that clock jumped."""
        self.offset_ns = self.base_ns or 0
        if not self.clock or not self.base_ns:
            return 0
        offsets = sorted([pair[1] for pair in self.clock])
        self.offset_ns = offsets[len(offsets) // 2]
        if offsets[-1] - offsets[0] <= _JUMP_NS:
            return 0
        # A clock being slewed moves by at most 500 ppm; twice that is still no jump.
        return sum(
            abs(b[1] - a[1]) > _JUMP_NS + abs(b[0] - a[0]) // 1000
            for a, b in zip(self.clock, self.clock[1:], strict=False)
        )


class Collector:
    """Gathers the events of one file after the other; `finish` gives the starts."""

    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        self._counts = counts
        self._traces: dict[str, list[Writer]] = defaultdict(list)
        self._seen: dict[str, tuple[set[str], set[str]]] = {}
        self._path = ""

    def open_file(self, path: str) -> None:
        """Start a file: events until `close_file` belong to it."""
        self._path = path
        self._identities: dict[str, Identity] = {}
        self._last: Identity | None = None
        self._last_trace: str | None = None
        self._writers: dict[tuple[str, str], Writer] = {}
        self._current: Writer | None = None
        self._total = self._duplicates = 0

    def add(self, events: Sequence[object]) -> None:
        """Take parsed lines; whatever is no event is counted."""
        for event in events:
            try:
                if type(event) is not dict:
                    self._count("bad-line")
                    continue
                version = event["v"]
                if version != VERSION and type(version) is int and version > VERSION:
                    self._count("newer-version")
                if event["event"] == "resource":
                    self._resource(event)
                else:
                    self._event(event)
            except (KeyError, TypeError, ValueError):
                self._count("bad-event")

    def add_whole(self, events: Sequence[object]) -> bool:
        """Take a whole file at once if it is the usual one: one resource line, then one writer's
        events in one trace, every field of its proper type. Returns False, having taken nothing,
        when it is not; `add` then goes event by event. Checks run over columns, at C speed."""
        if self._writers or self._identities:
            return False
        rows = _usual(events)
        if rows is None:
            return False
        kinds, traces, ids, _, _, walls, monos, _, more, _ = zip(*rows, strict=True)
        begun, ended = self._seen.setdefault(traces[0], (set(), set()))
        ends = [i for i, kind in zip(ids, kinds, strict=True) if kind == "end"]
        rest = [i for i, kind in zip(ids[1:], kinds[1:], strict=True) if kind != "end"]
        new_begun, new_ended = set(rest), set(ends)
        doubles = len(new_begun) < len(rest) or len(new_ended) < len(ends)
        if doubles or not begun.isdisjoint(new_begun) or not ended.isdisjoint(new_ended):
            return False
        begun |= new_begun
        ended |= new_ended
        writer = Writer(self._path, sys.intern(traces[0]), begun, ended)
        identity = identity_of(more[0], self._path)
        writer.identity, writer.known, writer.base_ns = identity, True, walls[1] - monos[1]
        writer.clock = list(zip(monos[1:], map(sub, walls[1:], monos[1:]), strict=True))
        self._take(writer, rows)
        self._writers[writer.trace, ""] = writer
        self._last, self._last_trace, self._total = identity, writer.trace, len(rows) - 1
        self._identities[ids[0][:_PREFIX_CHARS]] = identity
        return True

    def _take(self, writer: Writer, rows: Sequence[tuple[Any, ...]]) -> None:
        """Pair the checked rows of one writer."""
        begun, spans, intern = writer.open, writer.spans, sys.intern
        for kind, _, key, parent, name, _, moment, status, more, _ in rows:
            if kind == "begin":
                begun[key] = (intern(name), moment, status, parent, more or None)
            elif kind == "end":
                half = (name, moment, status, parent, more or None)
                begin = begun.pop(key, None)
                if begin is None:
                    writer.orphans.append((key, half))
                else:
                    spans.append(self._span(key, begin, half))
            elif kind == "point":
                about = (False, status, True, key, parent, more or None)
                spans.append(Span(intern(name), moment, moment, *about))

    def _count(self, kind: str) -> None:
        self._counts[self._path, kind] += 1

    def _resource(self, event: Event) -> None:
        attributes, trace, span_id = event["attributes"], event.get("trace_id"), event["span_id"]
        if type(attributes) is not dict:
            raise TypeError(attributes)
        self._last = identity_of(attributes, self._path)
        self._last_trace = trace if type(trace) is str else None
        self._current = None
        if type(span_id) is str:
            self._identities[span_id[:_PREFIX_CHARS]] = self._last

    def _writer(self, trace: object, span_id: object) -> Writer:
        """The writer of an event: with several in one file, known by its span id's prefix."""
        prefix = ""
        if len(self._identities) > 1 and type(span_id) is str:
            prefix = span_id[:_PREFIX_CHARS]
        known = self._identities.get(prefix, self._last)
        if type(trace) is not str:
            trace = self._last_trace or _UNKNOWN_TRACE
        key = (trace, prefix if prefix in self._identities else "")
        writer = self._writers.get(key)
        if writer is None:
            begun, ended = self._seen.setdefault(trace, (set(), set()))
            writer = self._writers[key] = Writer(self._path, trace, begun, ended)
        if not writer.known:
            writer.identity = known or identity_of({}, self._path)
            writer.known = known is not None
        return writer

    def _event(self, event: Event) -> None:
        span_id, trace = event["span_id"], event["trace_id"]
        writer = self._current
        if writer is None or trace != writer.trace:
            writer = self._writer(trace, span_id)
            if len(self._identities) <= 1 and trace == writer.trace:
                self._current = writer
        if _scaled(event):
            self._count("other-unit")
        half = _half(event, writer)
        self._total += 1
        kind = event["event"]
        if kind != "end" and not writer.base_ns:
            self._in_order(writer, half)
        if type(span_id) is str:
            key = span_id
            seen = writer.ended if kind == "end" else writer.begun
            if key in seen:
                self._duplicates += 1
                return
            seen.add(key)
        else:
            key = "name:" + half[0]
        if kind == "begin":
            writer.open[key] = half
        elif kind == "end":
            begin = writer.open.pop(key, None)
            if begin is None:
                writer.orphans.append((key, half))
            else:
                writer.spans.append(self._span(key, begin, half))
        elif kind == "point":
            name, moment, status, parent, more = half
            writer.spans.append(Span(name, moment, moment, False, status, True, key, parent, more))
        else:
            raise ValueError(kind)

    def _in_order(self, writer: Writer, half: _Begin) -> None:
        """Notice a wall clock that was set back where no other clock tells; imported events are
        in no order."""
        moment, more = half[1], half[4]
        if more is not None and more.get("bootseer.source", "phase") != "phase":
            return
        if moment < writer.latest_ns - _BACK_NS:
            self._count("clock-set-back")
        writer.latest_ns = moment

    def _span(self, key: str, begin: _Begin, end: _Begin) -> Span:
        name, began, _, parent, attributes = begin
        _, ended, status, _, more = end
        if more is not None:
            attributes = more if attributes is None else {**attributes, **more}
        wait = False
        if attributes is not None:
            wait = attributes.get("bootseer.wait") is True
            if wait and len(attributes) == 1:
                attributes = None
        status = sys.intern(status)
        if ended < began:
            self._count("negative-duration")
            return Span(name, began, None, wait, "unknown", False, key, parent, attributes)
        about = (name, began, ended, wait, status, False, key, parent, attributes)
        return tuple.__new__(Span, about)  # a quarter of the time of Span(...)

    def close_file(self) -> None:
        """Settle the file's clocks and keep its writers."""
        if self._duplicates:
            if self._duplicates == self._total:
                self._count("duplicate-file")
            else:
                self._counts[self._path, "duplicate-event"] += self._duplicates
        for (trace, _), writer in self._writers.items():
            if not (writer.spans or writer.open or writer.orphans):
                continue
            jumps = writer.settle()
            if jumps:
                self._counts[self._path, "clock-jump"] += jumps
            if not writer.known:
                self._count("no-resource")
            self._traces[trace].append(writer)

    def finish(self) -> list[Start]:
        """Pair what is left over files, line clocks up per boot; newest start first."""
        starts = [self._start(trace, writers) for trace, writers in self._traces.items()]
        return sorted((s for s in starts if s.sources), key=lambda s: s.began_ns, reverse=True)

    def _start(self, trace: str, writers: list[Writer]) -> Start:
        for writer in _align_boots(writers):
            self._counts[writer.file, "clock-jump"] += 1
        self._pair_over_files(writers)
        nodes = true_nodes([writer.who() for writer in writers])
        sources = []
        for writer, identity in zip(writers, nodes, strict=True):
            if writer.spans:
                events = sum([1 if s[5] or s[2] is None else 2 for s in writer.spans])
                spans = tuple(writer.spans)
                sources.append(Source(writer.file, identity, spans, events, writer.offset_ns))
        sources = speakers.split(sources)
        sources.sort(key=lambda s: (s.identity.node, s.identity.rank or 0, s.file))
        return Start(trace, tuple(sources))

    def _pair_over_files(self, writers: list[Writer]) -> None:
        """Join ends with begins of other files; keep what has no partner."""
        begun = {key: writer for writer in writers for key in writer.open}
        for writer in writers:
            self._path = writer.file
            for key, (name, moment, status, parent, more) in writer.orphans:
                owner = None if key.startswith("name:") else begun.pop(key, None)
                if owner is None:
                    self._count("end-without-begin")
                    wait = more is not None and more.get("bootseer.wait") is True
                    span = Span(name, None, moment, wait, status, False, key, parent, more)
                    writer.spans.append(span)
                    continue
                there = moment + writer.offset_ns - owner.offset_ns
                end = (name, there, status, parent, more)
                owner.spans.append(self._span(key, owner.open.pop(key), end))
        for writer in writers:
            for key, (name, moment, status, parent, more) in writer.open.items():
                wait = more is not None and more.get("bootseer.wait") is True
                span = Span(name, moment, None, wait, status, False, key, parent, more)
                writer.spans.append(span)


def _usual(events: Sequence[object]) -> list[tuple[Any, ...]] | None:
    """The fields of a file's events if it is as the writer leaves it, else None: a resource
    line, then events of one trace, all of this version, every field of its proper type."""
    try:
        rows = list(map(_FIELDS, events))  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return None
    if len(rows) < 2:
        return None
    kinds, traces, ids, parents, names, walls, monos, states, more, versions = zip(
        *rows, strict=True
    )
    texts = (*traces, *ids, *names, *states)
    if set(map(type, texts)) != {str} or set(map(type, (*walls, *monos, *versions))) != {int}:
        return None
    usual = (
        kinds[0] == "resource"
        and set(map(type, kinds)) == {str}
        and set(kinds[1:]) <= _KINDS
        and set(map(type, more)) == {dict}
        and set(map(type, parents)) <= _TEXT_OR_NONE
        and set(versions) == {VERSION}
        and len(set(traces)) == 1
        and all(names)
        and min(walls) >= _LEAST_NS
        and max(*walls, *monos) < _MAX_TIME_NS
        and min(monos) > -_MAX_TIME_NS
        and walls[1] != monos[1]  # an offset of 0 means that there is no monotonic clock
    )
    return rows if usual else None


def _scaled(event: Event) -> bool:
    """Bring times in seconds, milliseconds or microseconds to nanoseconds; whether it was needed.

    The monotonic time is dropped then: nothing tells its unit.
    """
    wall = event["time_unix_nano"]
    if type(wall) is not int and (type(wall) is not float or not 0 <= wall < _LEAST_NS):
        return False
    for least, unit in _UNITS:
        if least <= wall < _LEAST_NS:
            event["time_unix_nano"] = round(wall * unit)
            event["mono_nano"] = None
            return True
    return False


def _half(event: Event, writer: Writer) -> _Begin:
    """Check an event's fields and place it on its writer's clock.

    Raises KeyError, TypeError or ValueError when the fields are not those of an event.
    """
    name, wall, mono = event["name"], event["time_unix_nano"], event["mono_nano"]
    status, attributes = event["status"], event["attributes"]
    if type(name) is not str or type(status) is not str or not name:
        raise TypeError(name)
    if type(wall) is not int or not 0 <= wall < _MAX_TIME_NS:
        raise ValueError(wall)
    if type(attributes) is not dict:
        raise TypeError(attributes)
    base = writer.base_ns
    if type(mono) is int and -_MAX_TIME_NS < mono < _MAX_TIME_NS:
        if base is None:
            base = writer.base_ns = wall - mono
        writer.clock.append((mono, wall - mono))
        moment = mono if base else wall
    elif mono is None:
        moment = wall - (base or 0)
        if base is None:
            writer.base_ns = 0
    else:
        raise ValueError(mono)
    parent = event["parent_span_id"]
    if parent is not None and type(parent) is not str:
        raise TypeError(parent)
    return sys.intern(name), moment, sys.intern(status), parent, attributes or None


def _align_boots(writers: list[Writer]) -> list[Writer]:
    """Give all writers of one boot their median offset, so that ranks of a node agree; return
    those that met another wall clock, as one that was set between two processes."""
    out = []
    boots: dict[tuple[str, str], list[Writer]] = defaultdict(list)
    for writer in writers:
        identity = writer.who()
        if identity.boot_id and writer.base_ns:
            boots[identity.node, identity.boot_id].append(writer)
    for group in boots.values():
        offsets = sorted([writer.offset_ns for writer in group])
        middle = offsets[len(offsets) // 2]
        if offsets[-1] - offsets[0] > _JUMP_NS:
            out += _elsewhere(group, middle)
        for writer in group:
            writer.offset_ns = middle
    return out


def _elsewhere(group: list[Writer], offset_ns: int) -> list[Writer]:
    """The writers whose wall clock was not the one of `offset_ns`, slewing aside (see `settle`)."""
    usual = next(writer for writer in group if writer.offset_ns == offset_ns)
    return [
        writer
        for writer in group
        if abs(writer.offset_ns - offset_ns)
        > _JUMP_NS + abs(writer.clock[0][0] - usual.clock[0][0]) // 1000
    ]
