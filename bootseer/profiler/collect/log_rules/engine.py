"""The rule engine: takes log lines and returns begins, ends and points of phases.

Python 3.9, standard library only; no I/O and no clock. The format of rules: `rules`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    List,
    Match,
    NamedTuple,
    Optional,
    Pattern,
    Sequence,
    Set,
    Tuple,
)

from bootseer.profiler.collect.log_rules import lines as log_lines
from bootseer.profiler.collect.log_rules.rules import Rule

EVENTS_MAX = 1000
"""Events of one rule in one lane; further matches are left out, counted and reported at the end."""
LANES_MAX = 16384
UNREAD_TIMES_MAX = 32
"""Unread timestamps kept until a time is needed; the newest readable one counts."""
BARS_MAX = 16
"""Progress bars of different totals that one lane's rule keeps until one is confirmed."""
DIGITS_MAX = 18
"""Digits of a number in a line; a longer one is no real count."""
TEXT_MAX = 200
"""Characters kept of a named group's text."""

ZONE_STEP_NS = 900 * log_lines.SECOND_NS
ZONE_MAX_NS = 15 * 3600 * log_lines.SECOND_NS
LATE_MAX_NS = 60 * log_lines.SECOND_NS
"""How far a stamp may be behind the program's time for the program's zone to follow from it."""
DAY_NS = 86400 * log_lines.SECOND_NS
DURATION_MAX_NS = 366 * DAY_NS

_NAMED = "log="
"""Within a lane: precedes a name that the line itself gave (`lane` of a rule)."""

Search = Callable[[Pattern[str], str], Optional[Match[str]]]


class TooSlow(Exception):  # noqa: N818 - a signal between search function and engine, no fault
    """A search function raises this when one match took longer than it allows."""


@dataclass(frozen=True)
class PhaseEvent:
    """A phase's `begin`, `end` or `point` (its `kind`) to write.

    A begin and its end share `key`. `mono_nano` is None where only the Unix time is known.
    """

    kind: str
    name: str
    key: Tuple[str, str]
    time_unix_nano: int
    mono_nano: Optional[int]
    status: str
    attributes: Dict[str, Any]


class _EventTime(NamedTuple):
    """When an event took place, with the attributes that qualify the time.

    `mono_ns` is None where only the Unix time is known.
    """

    unix_ns: int
    mono_ns: Optional[int]
    attributes: Dict[str, Any]

    def shift(self, delta_ns: int) -> _EventTime:
        """Return the time that is `delta_ns` later, on both clocks."""
        mono_ns = None if self.mono_ns is None else self.mono_ns + delta_ns
        return _EventTime(self.unix_ns + delta_ns, mono_ns, self.attributes)


@dataclass(frozen=True)
class _Line:
    lane: str
    text: str
    arrival_ns: int
    mono_ns: Optional[int]
    stamp_ns: Optional[int] = None
    whole: str = ""


@dataclass(frozen=True)
class _LoggedStep:
    """A logged step; the first one is kept until later ones show how many precede it.

    `second` is the step logged after it, where that one did not suffice.
    """

    number: int
    match: Match[str]
    time: Optional[_EventTime]
    duration_ns: Optional[int]
    second: Optional[_LoggedStep] = None


@dataclass
class _OpenPhase:
    rule: Rule
    begin_ns: int
    ignored_begins: int = 0
    first_step: Optional[int] = None
    total: str = ""
    end_undated: bool = False  # its end was in a line without a time, so no later one is its end


@dataclass
class _ProgressBar:
    """A progress bar that may be the awaited one: where it began and when it first moved."""

    begin: Match[str]
    begin_time: Optional[_EventTime]
    end: Optional[Match[str]] = None
    end_time: Optional[_EventTime] = None


@dataclass
class _LaneBars:
    """Bars of one lane by their total; None for a total that two bars shared."""

    by_total: Dict[str, Optional[_ProgressBar]]
    confirmed: bool = False


def make_fallback(
    reason: str,
    time_unix_nano: int,
    mono_nano: Optional[int],
    attributes: Optional[Dict[str, Any]] = None,
) -> PhaseEvent:
    """Return the `log_rules` event that says what of the log was not matched and why."""
    attributes = {"bootseer.source": "log", **(attributes or {}), "bootseer.reason": reason}
    key = ("", "")
    return PhaseEvent("point", "log_rules", key, time_unix_nano, mono_nano, "fallback", attributes)


def _search_unlimited(pattern: Pattern[str], text: str) -> Optional[Match[str]]:
    return pattern.search(text)


class Engine:
    """State of one log (all streams of a job, or one file): open phases, counts, active rules.

    `live` says that lines are matched as they are written: their arrival is then as good a time as
    any. The arrival of an imported line says nothing: without a timestamp of its own, or a stamp of
    the container's log, only an end that states how long its phase took has a time. Other events
    of such lines are left out and counted in `undated`: the nearest line with a time may be hours
    away. `near_ns` is when the log file last changed (Unix nanoseconds): it completes timestamps
    without a date, and no line is more than a day (for zones) younger. `search` limits the time of
    one match by raising TooSlow.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        live: bool = True,
        near_ns: int = 0,
        search: Search = _search_unlimited,
    ) -> None:
        self._rules = list(rules)
        self._live = live
        self._search = search
        self._open_phases: Dict[Tuple[str, str], _OpenPhase] = {}
        self._ended_phases: Set[Tuple[str, str]] = set()
        self._event_counts: Dict[Tuple[str, str, str], int] = {}
        self._suppressed_counts: Dict[str, int] = {}
        self._undated_counts: Dict[str, int] = {}
        self._lane_names: Dict[str, str] = {}
        self._lane_of_process: Dict[str, str] = {}
        self._first_steps: Dict[Tuple[str, str], _LoggedStep] = {}
        self._bars: Dict[Tuple[str, str], _LaneBars] = {}
        self._last_event_ns: Dict[str, int] = {}
        self._line_count = self._matched_count = 0
        self._line_matched = False
        self._last_time_ns = near_ns
        self._latest_possible_ns = near_ns + DAY_NS if near_ns and not live else None
        self._unread_times: Deque[Tuple[Rule, Match[str]]] = deque(maxlen=UNREAD_TIMES_MAX)
        time_rules = {(r.time, r.time_format, r.utc_offset_s): r for r in self._rules if r.time}
        self._time_rules = [] if live else list(time_rules.values())

    @property
    def undated(self) -> int:
        """Imported events left out, as their line has no timestamp."""
        return sum(self._undated_counts.values())

    @property
    def lines(self) -> int:
        """Lines seen."""
        return self._line_count

    @property
    def matched(self) -> int:
        """Lines that a rule's begin, end or point matched, whether or not it gave an event."""
        return self._matched_count

    def match_line(
        self, raw: bytes, time_unix_nano: int, mono_nano: Optional[int]
    ) -> List[PhaseEvent]:
        """Match one line (no line end) that arrived at the given times; return its events."""
        whole = log_lines.clean(raw)
        lane, stamp_ns, text = log_lines.split_line(whole, stamped=not self._live)
        lane = self._lane_names.get(lane) or self._resolve_lane(lane)
        if stamp_ns is None:
            whole = text
        line = _Line(lane, text, time_unix_nano, mono_nano, stamp_ns, whole)
        events: List[PhaseEvent] = []
        self._line_count += 1
        self._line_matched = False
        for rule in self._time_rules:
            try:
                self._keep_time(rule, line)
            except TooSlow:
                events.append(self._disable_rule(rule, line))
        for rule in self._rules:
            try:
                self._apply_rule(rule, line, events)
            except TooSlow:
                events.append(self._disable_rule(rule, line))
        self._matched_count += self._line_matched
        if events:
            self._last_event_ns[lane] = max(event.time_unix_nano for event in events)
        return events

    def close(self) -> List[PhaseEvent]:
        """Return the reports that are due at the log's end; open phases stay open."""
        reports = [
            self._make_report(
                f"rule {name} saw step {step.number} first and too few others to tell how many "
                "the log leaves out, so when the first step ended is unknown"
            )
            for (_, name), step in sorted(self._first_steps.items())
        ]
        if self._undated_counts and self._last_event_ns:
            counts = sorted(self._undated_counts.items())
            rules = ", ".join(f"{rule} ({count})" for rule, count in counts)
            text = f"lines without a time were left out, so their moments are unknown: {rules}"
            reports.append(self._make_report(text))
        return reports + [
            self._make_report(
                f"rule {name} matched more than {EVENTS_MAX} times in one place; "
                f"{count} further matches were left out"
            )
            for name, count in sorted(self._suppressed_counts.items())
        ]

    def _count_undated(self, rule: Rule) -> None:
        name = f"{rule.name}: {rule.phase}"
        self._undated_counts[name] = self._undated_counts.get(name, 0) + 1

    def _disable_rule(self, rule: Rule, line: _Line) -> PhaseEvent:
        """Remove a rule that was too slow on one line, and return the report of it."""
        self._rules = [other for other in self._rules if other is not rule]
        self._time_rules = [other for other in self._time_rules if other is not rule]
        reason = (
            f"rule {rule.name} took too long on one line and is no longer used; "
            "simplify its nested repetitions"
        )
        return make_fallback(reason, line.arrival_ns, line.mono_ns)

    def _make_report(self, reason: str) -> PhaseEvent:
        return make_fallback(reason, self._last_time_ns, None)

    def _keep_time(self, rule: Rule, line: _Line) -> None:
        """Keep a line's timestamp, to complete later ones that lack a date."""
        match = None if rule.time is None else self._search(rule.time, line.text)
        if match is not None:
            self._unread_times.append((rule, match))

    def _read_last_time(self) -> None:
        """Read the last readable timestamp kept; done when an event needs it, as it is slow."""
        while self._unread_times:
            rule, match = self._unread_times.pop()
            time_ns = _parse_time_ns(rule, match, self._last_time_ns, self._latest_possible_ns)
            if time_ns is not None:
                self._last_time_ns = time_ns
                self._unread_times.clear()

    def _apply_rule(self, rule: Rule, line: _Line, events: List[PhaseEvent]) -> None:
        for kind, patterns in rule.searches:
            for pattern in patterns:
                match = self._search(pattern, line.text)
                if match is None and line.whole is not line.text:
                    match = self._search(pattern, line.whole)  # a rule may match the stamp itself
                if match is None:
                    continue
                self._line_matched = True
                own = self._assign_lane(rule, line)
                if rule.confirm:
                    self._track_bar(kind, rule, match, own, events)
                elif rule.step and kind != "begin":
                    self._track_step(kind, rule, match, own, events)
                else:
                    self._add_event(kind, rule, match, own, events)
                break
        for pattern in rule.confirm if self._bars else ():
            if self._search(pattern, line.text) is not None:
                own = self._assign_lane(rule, line)
                bars = self._bars.get((own.lane, rule.name))
                if bars is not None:
                    bars.confirmed = True

    def _assign_lane(self, rule: Rule, line: _Line) -> _Line:
        """Return the line in the lane of the source that it names itself, e.g. `TP3`.

        The name is no rank: of several kinds of parallelism it may count any one.
        """
        if rule.across:
            return replace(line, lane="") if line.lane else line
        match = None if rule.lane is None else self._search(rule.lane, line.text)
        if match is None:
            return line
        name = match.group("lane" if "lane" in match.re.groupindex else 1) or ""
        lane = f"{line.lane} {_NAMED}{name}".strip() if name else line.lane
        return replace(line, lane=self._resolve_lane(lane) or line.lane)

    def _resolve_lane(self, lane: str) -> str:
        """Return the name that the lane's process had first; "" once there are too many lanes."""
        first_name = self._lane_names.get(lane)
        if first_name is None:
            if len(self._lane_names) >= LANES_MAX:
                return ""
            first_name = self._lane_of_process.setdefault(log_lines.lane_process(lane), lane)
            self._lane_names[lane] = first_name
        return first_name

    def _track_bar(
        self, kind: str, rule: Rule, match: Match[str], line: _Line, events: List[PhaseEvent]
    ) -> None:
        """Keep a progress bar that appeared or moved, or add its span once it is confirmed."""
        key, phase = (line.lane, rule.name), (line.lane, rule.phase)
        if phase in self._ended_phases or phase in self._open_phases:
            return
        bars = self._bars.get(key)
        if bars is None:
            if len(self._bars) >= LANES_MAX:
                return
            bars = self._bars[key] = _LaneBars({})
        total = match.group("total")
        bar = bars.by_total.get(total)
        if kind == "begin":
            if bar is not None and bar.end is not None:
                bars.by_total[total] = None
            elif total not in bars.by_total:
                if len(bars.by_total) >= BARS_MAX:
                    del bars.by_total[next(iter(bars.by_total))]
                bars.by_total[total] = _ProgressBar(match, self._find_time(rule, line))
            return
        if bar is not None and bar.end is None:
            bar.end, bar.end_time = match, self._find_time(rule, line)
        if not bars.confirmed:
            return
        bars.confirmed = False
        if bar is None or bar.end is None:
            return
        del self._bars[key]
        if bar.begin_time is None or bar.end_time is None:
            self._count_undated(rule)
            self._ended_phases.add(phase)
            return
        self._add_begin(rule, bar.begin, line, events, bar.begin_time)
        self._add_end(rule, bar.end, line, events, bar.end_time)

    def _track_step(
        self, kind: str, rule: Rule, match: Match[str], line: _Line, events: List[PhaseEvent]
    ) -> None:
        """Find when the first step ended from the steps that a trainer logs at intervals."""
        key = (line.lane, rule.name)
        if self._event_counts.get((*key, kind)):
            return
        number = _parse_count(match.group(rule.step))
        if number is None:
            return
        logged = _LoggedStep(number, match, self._find_time(rule, line), _parse_duration_ns(match))
        open_phase = self._open_phases.get((line.lane, rule.phase))
        known_first = None if open_phase is None else open_phase.first_step
        first_number = rule.step_from if known_first is None else known_first
        if number <= first_number:
            self._add_event(kind, rule, match, line, events)
            return
        first = self._first_steps.get(key)
        if first is None:
            if len(self._first_steps) < LANES_MAX:
                self._first_steps[key] = logged
            return
        if number <= (first.second or first).number:
            return
        if known_first is not None:
            unlogged: Optional[int] = first.number - known_first
        else:
            unlogged = _count_unlogged_steps(first, logged, rule.step_from)
        if unlogged is None:
            self._first_steps[key] = replace(first, second=logged)
            return
        del self._first_steps[key]
        begin_ns = None if open_phase is None else open_phase.begin_ns
        time = _estimate_first_step_end(first, first.second or logged, unlogged, begin_ns)
        if time is None:
            self._count_undated(rule)
            return
        late_ns = max(0, self._last_event_ns.get(line.lane, time.unix_ns) - time.unix_ns)
        self._add_event(kind, rule, first.match, line, events, time.shift(late_ns))

    def _add_event(
        self,
        kind: str,
        rule: Rule,
        match: Match[str],
        line: _Line,
        events: List[PhaseEvent],
        time: Optional[_EventTime] = None,
    ) -> None:
        """Add what a rule's begin, end or point gives; `time` replaces that of the line."""
        if kind == "begin":
            self._add_begin(rule, match, line, events, time)
        elif kind == "end":
            self._add_end(rule, match, line, events, time)
        else:
            self._add_point(rule, match, line, events, time)

    def _add_begin(
        self,
        rule: Rule,
        match: Match[str],
        line: _Line,
        events: List[PhaseEvent],
        time: Optional[_EventTime],
    ) -> None:
        key = (line.lane, rule.phase)
        open_phase = self._open_phases.get(key)
        if open_phase is not None and open_phase.end_undated:
            del self._open_phases[key]
            open_phase = None
        total = _parse_total(match)
        if open_phase is not None and not rule.restart:
            if total and open_phase.rule is rule:
                # A second run of the phase, as after a batch that was too large, has its own total.
                open_phase.total = total
            else:
                open_phase.ignored_begins += 1
            return
        time = time or self._find_time_or_count(rule, line)
        if time is None or not self._count_event(rule, line, "begin"):
            return
        self._close_phases(rule, line, time, events, restarted=open_phase is not None)
        first_step = _parse_count(match.groupdict().get(rule.step)) if rule.step else None
        self._open_phases[key] = _OpenPhase(rule, time.unix_ns, first_step=first_step, total=total)
        attributes = {**_make_attributes(rule, match, line), **time.attributes}
        events.append(_make_event("begin", key, time, "ok", attributes))

    def _add_end(
        self,
        rule: Rule,
        match: Match[str],
        line: _Line,
        events: List[PhaseEvent],
        time: Optional[_EventTime],
    ) -> None:
        key = (line.lane, rule.phase)
        open_phase = self._open_phases.get(key)
        if open_phase is not None:
            if open_phase.rule is rule and _has_another_total(match, open_phase.total):
                return
            if open_phase.end_undated:
                self._count_undated(rule)
                return
        duration_ns = _parse_duration_ns(match)
        if open_phase is None and duration_ns is None and not rule.unopened_point:
            return
        time = time or self._find_time(rule, line)
        if time is None and open_phase is not None and duration_ns is not None:
            time = _EventTime(open_phase.begin_ns + duration_ns, None, {})
        if time is None:
            self._count_undated(rule)
            if open_phase is not None and open_phase.rule is rule:
                open_phase.end_undated = True
            return
        if not self._count_event(rule, line, "end"):
            return
        attributes = {
            **_make_attributes(rule, match, line),
            **time.attributes,
            **_make_reason(rule),
        }
        if open_phase is None and duration_ns is None:
            attributes["bootseer.reason"] = "the log holds this phase's end but no begin of it"
            events.append(_make_event("point", key, time, rule.status, attributes))
            return
        if open_phase is None:
            begin_time = time.shift(-(duration_ns or 0))
            events.append(_make_event("begin", key, begin_time, "ok", attributes))
        else:
            time = time.shift(max(0, open_phase.begin_ns - time.unix_ns))
            if open_phase.ignored_begins:
                attributes["log.begins_ignored"] = open_phase.ignored_begins
            del self._open_phases[key]
        self._ended_phases.add(key)
        events.append(_make_event("end", key, time, rule.status, attributes))

    def _add_point(
        self,
        rule: Rule,
        match: Match[str],
        line: _Line,
        events: List[PhaseEvent],
        time: Optional[_EventTime],
    ) -> None:
        time = time or self._find_time_or_count(rule, line)
        if time is None or not self._count_event(rule, line, "point"):
            return
        self._close_phases(rule, line, time, events, restarted=False)
        key = (line.lane, rule.phase)
        attributes = {
            **_make_attributes(rule, match, line),
            **time.attributes,
            **_make_reason(rule),
        }
        events.append(_make_event("point", key, time, rule.status, attributes))

    def _close_phases(
        self,
        rule: Rule,
        line: _Line,
        time: _EventTime,
        events: List[PhaseEvent],
        *,
        restarted: bool,
    ) -> None:
        """End what this rule's begin or point ends: by other phases' `until`, or its own phase."""
        for key, open_phase in list(self._open_phases.items()):
            lane, phase = key
            if lane != line.lane:
                continue
            until = open_phase.rule.until
            is_other = phase != rule.phase
            if not (rule.phase in until or "next" in until if is_other else restarted):
                continue
            del self._open_phases[key]
            if open_phase.end_undated:
                continue
            attributes = _make_lane_attributes(open_phase.rule, lane)
            attributes["log.closed_by"] = rule.name
            end_time = time.shift(max(0, open_phase.begin_ns - time.unix_ns))
            events.append(_make_event("end", key, end_time, "ok", attributes))

    def _count_event(self, rule: Rule, line: _Line, kind: str) -> bool:
        """Count an event of a rule in a lane; return False where it must not be written."""
        key = (line.lane, rule.name, kind)
        count = self._event_counts.get(key, 0)
        if rule.once and count:
            return False
        if count >= EVENTS_MAX:
            self._suppressed_counts[rule.name] = self._suppressed_counts.get(rule.name, 0) + 1
            return False
        self._event_counts[key] = count + 1
        return True

    def _find_own_time_ns(self, rule: Rule, line: _Line) -> Optional[int]:
        """Return the time of the line's own timestamp, or None."""
        if rule.time is None:
            return None
        match = self._search(rule.time, line.text)
        if match is None and line.whole is not line.text:
            match = self._search(rule.time, line.whole)
        if match is None:
            return None
        if self._live:
            return _parse_time_ns(rule, match, line.arrival_ns)
        if line.stamp_ns is not None:
            return _parse_stamped_time_ns(rule, match, line.stamp_ns)
        near_ns = self._last_time_ns or line.arrival_ns
        return _parse_time_ns(rule, match, near_ns, self._latest_possible_ns)

    def _find_time_or_count(self, rule: Rule, line: _Line) -> Optional[_EventTime]:
        """Return the time of a line's event; for a line that has none, count it and return None."""
        time = self._find_time(rule, line)
        if time is None:
            self._count_undated(rule)
        return time

    def _find_time(self, rule: Rule, line: _Line) -> Optional[_EventTime]:
        """Return the time of a line's event; None for an imported line that has none."""
        self._read_last_time()
        own_ns = self._find_own_time_ns(rule, line)
        if not self._live:
            own_ns = line.stamp_ns if own_ns is None else own_ns
            return None if own_ns is None else _EventTime(own_ns, None, {})
        arrival = _EventTime(line.arrival_ns, line.mono_ns, {})
        if own_ns is None or _is_coarser(own_ns, line.arrival_ns):
            return arrival
        return arrival.shift(own_ns - line.arrival_ns)


def _is_coarser(time_ns: int, reference_ns: int) -> bool:
    """Whether a time is in whole seconds and agrees with a finer one."""
    delay_ns = reference_ns - time_ns
    return time_ns % log_lines.SECOND_NS == 0 and 0 <= delay_ns < 2 * log_lines.SECOND_NS


def _make_event(
    kind: str, key: Tuple[str, str], time: _EventTime, status: str, attributes: Dict[str, Any]
) -> PhaseEvent:
    """Return the event of the phase that `key` names."""
    return PhaseEvent(kind, key[1], key, time.unix_ns, time.mono_ns, status, attributes)


def _count_unlogged_steps(first: _LoggedStep, latest: _LoggedStep, step_from: int) -> Optional[int]:
    """Return how many steps of a run precede the first logged one; None while that is unknown.

    Trainers log every n-th step and resume from such a step, so as many precede it as lie between
    two logged ones. Or they also log a run's first step (Megatron-LM since core 0.16), which shows
    where its number fits no such interval, and the next interval is longer.
    """
    second = first.second or latest
    interval = second.number - first.number
    if first.second is None and (first.number - step_from + 1) % interval:
        return None
    if first.second is not None and latest.number - second.number != interval:
        return 0
    return interval - 1


def _estimate_first_step_end(
    first: _LoggedStep, second: _LoggedStep, unlogged: int, begin_ns: Optional[int]
) -> Optional[_EventTime]:
    """Return when a run's first step ended, `unlogged` steps before the first logged one.

    The duration of a step follows from the times of two logged ones, or is what the second states.
    """
    qualifiers = {"log.step_estimated": True} if unlogged else {}
    if first.time is not None:
        step_ns = 0
        if unlogged and second.time is not None:
            elapsed_ns = second.time.unix_ns - first.time.unix_ns
            step_ns = elapsed_ns // (second.number - first.number)
        elif unlogged:
            if second.duration_ns is None:
                return None
            step_ns = second.duration_ns
        time = first.time.shift(-unlogged * max(0, step_ns))
        return time._replace(attributes={**time.attributes, **qualifiers})
    if begin_ns is None or first.duration_ns is None or second.duration_ns is None:
        return None
    took_ns = max(0, (unlogged + 1) * first.duration_ns - unlogged * second.duration_ns)
    return _EventTime(begin_ns + took_ns, None, qualifiers)


def _parse_total(match: Match[str]) -> str:
    """Return the total that a progress bar or the line before it states, "" for none."""
    return (match.groupdict().get("total") or "").replace(",", "")


def _has_another_total(match: Match[str], total: str) -> bool:
    """Whether a line is of a bar with another total than the awaited one."""
    own_total = _parse_total(match)
    return bool(own_total and total and own_total != total)


def _parse_count(text: Optional[str]) -> Optional[int]:
    """Return a count that a line states; None where an optional group is absent or holds none."""
    return int(text) if text and text.isdecimal() and len(text) <= DIGITS_MAX else None


def _get_time_text(match: Match[str]) -> str:
    return match.group("time" if "time" in match.re.groupindex else 1) or ""


def _parse_time_ns(
    rule: Rule, match: Match[str], near_ns: int, latest_ns: Optional[int] = None
) -> Optional[int]:
    text = _get_time_text(match)
    return log_lines.parse_time_ns(text, rule.time_format, rule.utc_offset_s, near_ns, latest_ns)


def _parse_stamped_time_ns(rule: Rule, match: Match[str], stamp_ns: int) -> Optional[int]:
    """Return the own time of a line that has a stamp of its container's log as well.

    The program's zone need not be this machine's, so a time without a zone is read in the zone
    that agrees with the stamp. A time in whole seconds is coarser than the stamp.
    """
    text, own_ns = _get_time_text(match), _parse_time_ns(rule, match, stamp_ns)
    if own_ns is None:
        return None
    if rule.utc_offset_s is None:
        utc_ns, other_ns = (
            log_lines.parse_time_ns(text, rule.time_format, offset_s, stamp_ns)
            for offset_s in (0, ZONE_STEP_NS // log_lines.SECOND_NS)
        )
        if utc_ns is not None and utc_ns != other_ns:
            zone_ns = round((stamp_ns - utc_ns) / ZONE_STEP_NS) * ZONE_STEP_NS
            if abs(zone_ns) <= ZONE_MAX_NS and abs(stamp_ns - utc_ns - zone_ns) <= LATE_MAX_NS:
                own_ns = utc_ns + zone_ns
    return stamp_ns if _is_coarser(own_ns, stamp_ns) else own_ns


def _make_lane_attributes(rule: Rule, lane: str) -> Dict[str, Any]:
    attributes: Dict[str, Any] = {"bootseer.source": "log", "log.rule": rule.name}
    if rule.wait:
        attributes["bootseer.wait"] = True
    prefix, _, name = lane.partition(_NAMED)
    rank, local_rank = log_lines.lane_rank(prefix.strip())
    if name or (lane and rank is None and local_rank is None):
        attributes["log.lane"] = f"{prefix}{name}"[:TEXT_MAX]
    if rank is not None:
        attributes["bootseer.rank"] = rank
    if local_rank is not None:
        attributes["bootseer.local_rank"] = local_rank
    return attributes


def _make_reason(rule: Rule) -> Dict[str, Any]:
    return {"bootseer.reason": rule.reason} if rule.reason else {}


def _make_attributes(rule: Rule, match: Match[str], line: _Line) -> Dict[str, Any]:
    attributes = _make_lane_attributes(rule, line.lane)
    for name, value in match.groupdict().items():
        if value is None or name.startswith("duration"):
            continue
        if name in ("bytes", "rank", "local_rank"):
            number = _parse_count(value)
            if number is not None:
                attributes["bootseer." + name] = number
        else:
            attributes["log." + name] = value[:TEXT_MAX]
    return attributes


def _parse_duration_ns(match: Match[str]) -> Optional[int]:
    groups = match.groupdict()
    text = groups.get("duration") or ""
    for name, unit in (("duration_s", "s"), ("duration_ms", "ms")):
        if groups.get(name):
            text = f"{groups[name]}{unit}"
    duration_ns = log_lines.parse_duration_ns(text)
    return duration_ns if duration_ns is not None and duration_ns < DURATION_MAX_NS else None
