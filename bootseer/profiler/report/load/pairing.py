"""Turn parsed event lines into sources and starts: pairing, clocks, identities.

Begins and ends are paired by span id, first within their writer, then over all files of a trace
(shell scripts end a span from another process than the one that began it). A writer's times are
its monotonic ones plus the median of (wall - monotonic) over its events, so a wall clock that
jumps in between changes no duration. This is the hot part of a report: an event costs about two
microseconds, hence plain tuples and local names where a record would read better.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import or_
from typing import Any

from bootseer.profiler.report.load import attempts, log_ranks, runs
from bootseer.profiler.report.load.columns import Spans, columns_of, wall_extent_of
from bootseer.profiler.report.load.identity import identity_of, resolve_nodes
from bootseer.profiler.report.load.segments import (
    JUMP_NS,
    MAX_TIME_NS,
    MIN_TIME_NS,
    PREFIX_CHARS,
    VERSION,
    Half,
    Segment,
    join_halves,
    settle_clock,
)
from bootseer.profiler.report.load.spans import Identity, Source, Span, Start

_BACK_NS = 1_000_000_000  # a shell may know whole seconds only
_UNITS = ((10**14, 10**3), (10**11, 10**6), (10**8, 10**9))  # from µs, ms, s on: ns in one
_UNKNOWN_TRACE = "unknown"

Event = dict[str, object]

_new = tuple.__new__  # a quarter of the time of Span(...)


class Writer:
    """One writer in one trace while its file is being read.

    `base_ns` turns wall times into times on the writer's clock; the first event fixes it.
    """

    __slots__ = (
        "base_ns",
        "clock",
        "file",
        "first_mono_ns",
        "identity",
        "is_known",
        "is_settled",
        "jumps",
        "latest_ns",
        "offset_ns",
        "open",
        "orphans",
        "packed",
        "seen",
        "spans",
        "trace",
    )

    def __init__(self, file: str, trace: str, seen: SeenIds) -> None:
        self.file = file
        self.trace = trace
        self.seen = seen
        self.identity: Identity | None = None
        self.is_known = False  # until a resource line gives its identity
        self.packed: Spans | None = None  # those of a segment, ahead of `spans`
        self.spans: list[Span] = []
        self.open: dict[str, Half] = {}
        self.orphans: list[tuple[str, Half]] = []
        self.clock: list[tuple[int, int]] = []  # (mono, wall - mono) of each event, until settled
        self.first_mono_ns = 0
        self.jumps = 0
        self.is_settled = False
        self.base_ns: int | None = None
        self.latest_ns = 0  # begin or point, where there is no monotonic clock
        self.offset_ns = 0

    def get_identity(self) -> Identity:
        """The writer's identity, which is set before its first event."""
        assert self.identity is not None
        return self.identity

    def all_spans(self) -> Sequence[Span]:
        """Every span so far, in order."""
        if self.packed is None:
            return self.spans
        return [*self.packed, *self.spans] if self.spans else self.packed

    def settle(self) -> int:
        """Fix the offset to the node's wall clock; return how often that clock jumped."""
        if not self.is_settled:
            self.offset_ns = self.base_ns or 0
            if self.clock and self.base_ns:
                monos, offsets = zip(*self.clock, strict=True)
                self.first_mono_ns = monos[0]
                self.offset_ns, self.jumps = settle_clock(monos, offsets)
            self.clock, self.is_settled = [], True
        return self.jumps


class SeenIds:
    """The span ids seen in one trace, over all files.

    Those of a whole segment are known by their prefix, and added to the sets only when another
    writer uses the same prefix.
    """

    __slots__ = ("_packed", "begun", "ended")

    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.ended: set[str] = set()
        self._packed: dict[str, Writer] = {}

    def is_new(self, segment: Segment) -> bool:
        """Whether no id of the segment was seen before.

        False, too, where only the prefix was seen and its ids were not compared.
        """
        if segment.prefix in self._packed:
            return False
        if not self.begun and not self.ended:
            return True
        begun, ended = _collect_ids(segment.spans, segment.open, segment.orphans)
        return self.begun.isdisjoint(begun) and self.ended.isdisjoint(ended)

    def add_writer(self, prefix: str, writer: Writer) -> None:
        """Add all ids of a writer, which have this prefix."""
        self._packed[prefix] = writer

    def expand_prefix_of(self, span_id: str) -> None:
        """Add the ids that are known only by the prefix of this one to the sets."""
        writer = self._packed.pop(span_id[:PREFIX_CHARS], None)
        if writer is not None:
            begun, ended = _collect_ids(writer.all_spans(), writer.open, writer.orphans)
            self.begun |= begun
            self.ended |= ended


def _collect_ids(
    spans: Sequence[tuple[Any, ...]], opened: Iterable[str], orphans: Sequence[tuple[str, Half]]
) -> tuple[set[str], set[str]]:
    """The ids of begins and points, and those of ends."""
    begun = {span[6] for span in spans}
    begun.update(opened)
    ended = {span[6] for span in spans if not span[5]}
    ended.update(key for key, _ in orphans)
    return begun, ended


class Collector:
    """Gathers the events of one file after the other; `finish` gives the starts.

    `counts` is given problems by file and kind.
    """

    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        self._counts = counts
        self._traces: dict[str, list[Writer]] = defaultdict(list)
        self._seen: dict[str, SeenIds] = defaultdict(SeenIds)
        self._path = ""

    def open_file(self, path: str) -> None:
        """Start a file: events until `close_file` belong to it."""
        self._path = path
        self._identities: dict[str, Identity] = {}  # by span id prefix
        self._last: Identity | None = None
        self._last_trace: str | None = None
        self._writers: dict[tuple[str, str], Writer] = {}  # by trace and span id prefix
        self._current: Writer | None = None
        self._total = self._duplicates = 0

    def add_events(self, events: Sequence[object]) -> None:
        """Add parsed lines; each that is no event is counted as a problem."""
        for event in events:
            try:
                if type(event) is not dict:
                    self._count_problem("bad-line")
                    continue
                version = event["v"]
                if version != VERSION and type(version) is int and version > VERSION:
                    self._count_problem("newer-version")
                if event["event"] == "resource":
                    self._add_resource(event)
                else:
                    self._add_event(event)
            except (KeyError, TypeError, ValueError):
                self._count_problem("bad-event")

    def can_add(self, segments: Sequence[Segment]) -> bool:
        """Whether `add_segments` may have these; else their events must go to `add_events`.

        Some may have been seen before, or the file may hold events of their writers already.
        """
        if self._writers and not self._identities:  # events ahead of any resource line
            return False
        return not any(
            segment.prefix in self._identities or not self._seen[segment.trace].is_new(segment)
            for segment in segments
        )

    def add_segments(
        self, segments: Sequence[Segment], writers: Sequence[Identity] | None = None
    ) -> None:
        """Add segments of the open file to which `can_add` agreed.

        `writers` are the identities of the segments' writers, where they are known already.
        """
        if writers is None:
            writers = [identity_of(segment.resource, self._path) for segment in segments]
        for segment, identity in zip(segments, writers, strict=True):
            seen = self._seen[segment.trace]
            writer = Writer(self._path, segment.trace, seen)
            writer.identity = identity
            writer.is_known = True
            writer.base_ns, writer.offset_ns = segment.base_ns, segment.offset_ns
            writer.jumps, writer.first_mono_ns = segment.jumps, segment.first_mono_ns
            writer.clock, writer.is_settled = segment.clock, not segment.clock
            writer.packed = segment.spans
            writer.open, writer.orphans = segment.open, segment.orphans
            if segment.negative:
                self._counts[self._path, "negative-duration"] += segment.negative
            # Ids without a known prefix belong to the first writer of a file.
            self._writers[segment.trace, segment.prefix if self._identities else ""] = writer
            self._identities[segment.prefix] = identity
            seen.add_writer(segment.prefix, writer)
            self._last, self._last_trace, self._current = writer.identity, segment.trace, None
            self._total += segment.events

    def _count_problem(self, kind: str) -> None:
        self._counts[self._path, kind] += 1

    def _add_resource(self, event: Event) -> None:
        attributes, trace, span_id = event["attributes"], event.get("trace_id"), event["span_id"]
        if type(attributes) is not dict:
            raise TypeError(attributes)
        self._last = identity_of(attributes, self._path)
        self._last_trace = trace if type(trace) is str else None
        self._current = None
        if type(span_id) is str:
            self._identities[span_id[:PREFIX_CHARS]] = self._last

    def _find_writer(self, trace: object, span_id: object) -> Writer:
        """The writer of an event: of several in one file, the one with its span id's prefix."""
        prefix = ""
        if len(self._identities) > 1 and type(span_id) is str:
            prefix = span_id[:PREFIX_CHARS]
        known = self._identities.get(prefix, self._last)
        if type(trace) is not str:
            trace = self._last_trace or _UNKNOWN_TRACE
        key = (trace, prefix if prefix in self._identities else "")
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = Writer(self._path, trace, self._seen[trace])
        if not writer.is_known:
            writer.identity = known or identity_of({}, self._path)
            writer.is_known = known is not None
        return writer

    def _add_event(self, event: Event) -> None:
        span_id, trace = event["span_id"], event["trace_id"]
        writer = self._current
        if writer is None or trace != writer.trace:
            writer = self._find_writer(trace, span_id)
            if len(self._identities) <= 1 and trace == writer.trace:
                self._current = writer
        if _scale_times(event):
            self._count_problem("other-unit")
        half = _read_half(event, writer)
        self._total += 1
        kind = event["event"]
        if kind != "end" and not writer.base_ns:
            self._check_order(writer, half)
        if type(span_id) is str:
            key = span_id
            writer.seen.expand_prefix_of(span_id)
            seen = writer.seen.ended if kind == "end" else writer.seen.begun
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
                writer.spans.append(self._join_span(key, begin, half))
        elif kind == "point":
            name, moment, status, parent, more = half
            writer.spans.append(Span(name, moment, moment, False, status, True, key, parent, more))
        else:
            raise ValueError(kind)

    def _check_order(self, writer: Writer, half: Half) -> None:
        """Count a wall clock that was set back, where there is no monotonic clock.

        Not in imported events, which are in no order.
        """
        moment, attributes = half[1], half[4]
        if attributes is not None and attributes.get("bootseer.source", "phase") != "phase":
            return
        if moment < writer.latest_ns - _BACK_NS:
            self._count_problem("clock-set-back")
        writer.latest_ns = moment

    def _join_span(self, key: str, begin: Half, end: Half) -> Span:
        fields = join_halves(key, begin, end)
        if fields[2] is None:
            self._count_problem("negative-duration")
        return _new(Span, fields)

    def close_file(self) -> None:
        """Settle the file's clocks and keep its writers."""
        if self._duplicates:
            if self._duplicates == self._total:
                self._count_problem("duplicate-file")
            else:
                self._counts[self._path, "duplicate-event"] += self._duplicates
        for (trace, _), writer in self._writers.items():
            if not (writer.packed or writer.spans or writer.open or writer.orphans):
                continue
            jumps = writer.settle()
            if jumps:
                self._counts[self._path, "clock-jump"] += jumps
            if not writer.is_known:
                self._count_problem("no-resource")
            self._traces[trace].append(writer)

    def finish(self) -> list[Start]:
        """Pair what is left over files, align the clocks of each boot; newest start first."""
        starts = []
        for trace, writers in self._traces.items():
            split = runs.split_runs(self._make_start(trace, writers))
            for run in split[1:]:
                self._counts[run.sources[0].file, "run-of-same-name"] += 1
            starts += [start for run in split for start in attempts.split_attempts(run)]
        joined = _join_by_trace(start for start in starts if start.sources)
        return sorted(joined, key=_began_ns, reverse=True)

    def _make_start(self, trace: str, writers: list[Writer]) -> Start:
        for writer in _align_boots(writers):
            self._counts[writer.file, "clock-jump"] += 1
        self._pair_over_files(writers)
        identities = resolve_nodes([writer.get_identity() for writer in writers])
        sources = []
        for writer, identity in zip(writers, identities, strict=True):
            spans = columns_of(writer.all_spans())
            if spans:
                is_one_event = spans.points
                if not spans.is_timed:
                    ends = spans.moments[1::2]
                    is_one_event = tuple(map(or_, is_one_event, [end is None for end in ends]))
                events = 2 * len(spans) - sum(is_one_event)
                sources.append(Source(writer.file, identity, spans, events, writer.offset_ns))
        sources = log_ranks.split_logs(sources)
        return Start(trace, _sort(sources))

    def _pair_over_files(self, writers: list[Writer]) -> None:
        """Join ends with begins of other files; keep what has no partner."""
        begun = {key: writer for writer in writers for key in writer.open}
        for writer in writers:
            self._path = writer.file
            for key, (name, moment, status, parent, more) in writer.orphans:
                owner = None if key.startswith("name:") else begun.pop(key, None)
                if owner is None:
                    self._count_problem("end-without-begin")
                    wait = more is not None and more.get("bootseer.wait") is True
                    span = Span(name, None, moment, wait, status, False, key, parent, more)
                    writer.spans.append(span)
                    continue
                on_owners_clock = moment + writer.offset_ns - owner.offset_ns
                end = (name, on_owners_clock, status, parent, more)
                owner.spans.append(self._join_span(key, owner.open.pop(key), end))
        for writer in writers:
            for key, (name, moment, status, parent, more) in writer.open.items():
                wait = more is not None and more.get("bootseer.wait") is True
                span = Span(name, moment, None, wait, status, False, key, parent, more)
                writer.spans.append(span)


def _join_by_trace(starts: Iterable[Start]) -> list[Start]:
    """Each trace once: an attempt that its job did not count may have been counted by others."""
    by_trace: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        by_trace[start.trace_id].append(start)
    return [
        parts[0] if len(parts) == 1 else Start(trace, _sort(s for p in parts for s in p.sources))
        for trace, parts in by_trace.items()
    ]


def _sort(sources: Iterable[Source]) -> tuple[Source, ...]:
    return tuple(sorted(sources, key=lambda s: (s.identity.node, s.identity.rank or 0, s.file)))


def _began_ns(start: Start) -> int:
    """The earliest wall time of any source, before skew is corrected."""
    return min([wall_extent_of(source)[0] for source in start.sources])


def _scale_times(event: Event) -> bool:
    """Bring times in seconds, milliseconds or microseconds to nanoseconds; say if that was needed.

    The monotonic time is dropped then: its unit is unknown.
    """
    wall = event["time_unix_nano"]
    if type(wall) is not int and (type(wall) is not float or not 0 <= wall < MIN_TIME_NS):
        return False
    for least, unit in _UNITS:
        if least <= wall < MIN_TIME_NS:
            event["time_unix_nano"] = round(wall * unit)
            event["mono_nano"] = None
            return True
    return False


def _read_half(event: Event, writer: Writer) -> Half:
    """Check an event's fields and place it on its writer's clock.

    Raises KeyError, TypeError or ValueError when the fields are not those of an event.
    """
    name, wall, mono = event["name"], event["time_unix_nano"], event["mono_nano"]
    status, attributes = event["status"], event["attributes"]
    if type(name) is not str or type(status) is not str or not name:
        raise TypeError(name)
    if type(wall) is not int or not 0 <= wall < MAX_TIME_NS:
        raise ValueError(wall)
    if type(attributes) is not dict:
        raise TypeError(attributes)
    base = writer.base_ns
    if type(mono) is int and -MAX_TIME_NS < mono < MAX_TIME_NS:
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
    """Give all writers of one boot their median offset, so that the ranks of a node agree.

    Returns those that had another wall clock, which was set between two processes.
    """
    others = []
    boots: dict[tuple[str, str], list[Writer]] = defaultdict(list)
    for writer in writers:
        identity = writer.get_identity()
        if identity.boot_id and writer.base_ns:
            boots[identity.node, identity.boot_id].append(writer)
    for group in boots.values():
        offsets = sorted([writer.offset_ns for writer in group])
        middle = offsets[len(offsets) // 2]
        if offsets[-1] - offsets[0] > JUMP_NS:
            others += _find_other_clocks(group, middle)
        for writer in group:
            writer.offset_ns = middle
    return others


def _find_other_clocks(group: list[Writer], offset_ns: int) -> list[Writer]:
    """The writers whose offset differs by more than slewing explains (see `settle_clock`)."""
    usual = next(writer for writer in group if writer.offset_ns == offset_ns)
    return [
        writer
        for writer in group
        if abs(writer.offset_ns - offset_ns)
        > JUMP_NS + abs(writer.first_mono_ns - usual.first_mono_ns) // 1000
    ]
