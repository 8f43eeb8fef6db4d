"""Lines in, begins, ends and points of phases out: the rule engine, without I/O or clock.

Python 3.9, standard library only. The format of rules: `logrules`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Callable, Deque, Dict, List, Match, Optional, Pattern, Sequence, Set, Tuple

from bootseer.profiler.collect.log_rules import lines as loglines
from bootseer.profiler.collect.log_rules.rules import Rule

FOUND_MAX = 1000
"""Events of one rule in one lane; a rule that matches more often is silenced, and that is said."""
LANES_MAX = 16384
STAMPS_MAX = 32
"""Possible timestamps kept until one is needed; the newest that can be read counts."""
BARS_MAX = 16
"""Progress bars of different totals that one lane's rule keeps until one is confirmed."""
DIGITS_MAX = 18
"""Digits of a number in a line; more of them count nothing that there is."""
TEXT_MAX = 200
"""Characters kept of a named group's text."""

ZONE_STEP_NS = 900 * loglines.SECOND_NS
ZONE_MAX_NS = 15 * 3600 * loglines.SECOND_NS
LATE_MAX_NS = 60 * loglines.SECOND_NS
"""How far a container's log may be behind its program for the program's zone to follow from it."""
DAY_NS = 86400 * loglines.SECOND_NS
DURATION_MAX_NS = 366 * DAY_NS

_NAMED = "log="
"""Within a lane: what follows was named by the line itself (`lane` of a rule)."""

Search = Callable[[Pattern[str], str], Optional[Match[str]]]

_Times = Tuple[int, Optional[int], Dict[str, Any]]
"""(Unix nanoseconds, monotonic nanoseconds if known, attributes that qualify them)"""


class TooSlow(Exception):  # noqa: N818 - a signal between search function and engine, no fault
    """A search function raises this when one match took longer than it allows."""


@dataclass(frozen=True)
class Found:
    """One event to write. A begin and its end share `key`; `mono_nano` is None for own times."""

    kind: str
    name: str
    key: Tuple[str, str]
    time_unix_nano: int
    mono_nano: Optional[int]
    status: str
    attributes: Dict[str, Any]


@dataclass(frozen=True)
class _Line:
    lane: str
    text: str
    arrival_ns: int
    mono_ns: Optional[int]
    stamp_ns: Optional[int] = None
    whole: str = ""


@dataclass(frozen=True)
class _Held:
    """The first logged step, until others tell how many the log leaves out before it."""

    number: int
    match: Match[str]
    times: Optional[_Times]
    step_ns: Optional[int]
    second: Optional[_Held] = None


@dataclass
class _Open:
    rule: Rule
    begin_ns: int
    repeats: int = 0
    first_step: Optional[int] = None
    total: str = ""
    lost: bool = False  # its end was in a line without a time, so no later one is its end


@dataclass
class _Bar:
    """A progress bar that may be the one looked for: where it began and when it first moved."""

    begin: Match[str]
    times: Optional[_Times]
    end: Optional[Match[str]] = None
    end_times: Optional[_Times] = None


@dataclass
class _Bars:
    """Bars of one lane by their total; None for a total that two bars shared."""

    by_total: Dict[str, Optional[_Bar]]
    confirmed: bool = False


def plain_search(pattern: Pattern[str], text: str) -> Optional[Match[str]]:
    """A search without a time limit."""
    return pattern.search(text)


class Engine:
    """State of one log (all streams of a job, or one file): open phases, counts, silenced rules.

    `live` says that lines are seen as they are written: then their arrival is a time as good as
    any. An imported line's arrival says nothing: without a timestamp of its own, or one that the
    container's log put before it, only an end that states how long its phase took has a time.
    Everything else is left out and counted in `undated`: the nearest stamped line may be hours
    away. `near_ns` is when the log file last changed: it helps to complete timestamps without a
    date, and no line is more than a day (for zones) younger.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        live: bool = True,
        near_ns: int = 0,
        search: Search = plain_search,
    ) -> None:
        self._rules = list(rules)
        self._live = live
        self._search = search
        self._open: Dict[Tuple[str, str], _Open] = {}
        self._counts: Dict[Tuple[str, str, str], int] = {}
        self._lanes: Dict[str, str] = {}
        self._processes: Dict[str, str] = {}
        self._silenced: Dict[str, int] = {}
        self._clock_ns = near_ns
        self._latest_ns = near_ns + DAY_NS if near_ns and not live else None
        self._held: Dict[Tuple[str, str], _Held] = {}
        self._latest: Dict[str, int] = {}
        self._bars: Dict[Tuple[str, str], _Bars] = {}
        self._ended: Set[Tuple[str, str]] = set()
        self._lines = self._matched = 0
        self._hit = False
        self._stamps: Deque[Tuple[Rule, Match[str]]] = deque(maxlen=STAMPS_MAX)
        self._undated: Dict[str, int] = {}
        clocks = {(r.time, r.time_format, r.utc_offset_s): r for r in self._rules if r.time}
        self._clocks = [] if live else list(clocks.values())

    @property
    def undated(self) -> int:
        """Imported events left out, as their line has no timestamp."""
        return sum(self._undated.values())

    @property
    def lines(self) -> int:
        """Lines seen."""
        return self._lines

    @property
    def matched(self) -> int:
        """Lines that a rule's begin, end or point matched, whether or not an event came of it."""
        return self._matched

    def line(self, raw: bytes, time_unix_nano: int, mono_nano: Optional[int]) -> List[Found]:
        """Match one line (no line end) that arrived at the given times."""
        whole = loglines.clean(raw)
        lane, stamp_ns, text = loglines.split_line(whole, stamped=not self._live)
        lane = self._lanes.get(lane) or self._known_lane(lane)
        if stamp_ns is None:
            whole = text
        line = _Line(lane, text, time_unix_nano, mono_nano, stamp_ns, whole)
        found: List[Found] = []
        self._lines += 1
        self._hit = False
        for clock in self._clocks:
            try:
                self._tick(clock, line)
            except TooSlow:
                found.append(self._drop(clock, line))
        for rule in self._rules:
            try:
                self._apply(rule, line, found)
            except TooSlow:
                found.append(self._drop(rule, line))
        self._matched += self._hit
        if found:
            self._latest[lane] = max(one.time_unix_nano for one in found)
        return found

    def close(self) -> List[Found]:
        """What is to be said at the log's end; open phases stay open."""
        unknown = [
            self._fallback(
                f"rule {name} saw step {held.number} first and too few others to tell how many "
                "the log leaves out, so when the first step ended is unknown"
            )
            for (_, name), held in sorted(self._held.items())
        ]
        if self._undated and self._latest:
            rules = ", ".join(f"{rule} ({n})" for rule, n in sorted(self._undated.items()))
            text = f"lines without a time were left out, so their moments are unknown: {rules}"
            unknown.append(self._fallback(text))
        return unknown + [
            self._fallback(
                f"rule {name} matched more than {FOUND_MAX} times in one place; "
                f"{count} further matches were left out"
            )
            for name, count in sorted(self._silenced.items())
        ]

    def _leave_out(self, rule: Rule) -> None:
        name = f"{rule.name}: {rule.phase}"
        self._undated[name] = self._undated.get(name, 0) + 1

    def _drop(self, rule: Rule, line: _Line) -> Found:
        """A rule that was too slow once is not used again."""
        self._rules = [other for other in self._rules if other is not rule]
        self._clocks = [other for other in self._clocks if other is not rule]
        gone = self._fallback(
            f"rule {rule.name} took too long on one line and is no longer used; "
            "simplify its nested repetitions"
        )
        return replace(gone, time_unix_nano=line.arrival_ns, mono_nano=line.mono_ns)

    def _fallback(self, reason: str) -> Found:
        attributes = {"bootseer.source": "log", "bootseer.reason": reason}
        return Found("point", "log_rules", ("", ""), self._clock_ns, None, "fallback", attributes)

    def _tick(self, rule: Rule, line: _Line) -> None:
        """Keep the time of the last line that had one, for the lines that have none."""
        match = None if rule.time is None else self._search(rule.time, line.text)
        if match is not None:
            self._stamps.append((rule, match))

    def _settle(self) -> None:
        """Read the last good timestamp seen; put off until an event needs it, as that is slow."""
        while self._stamps:
            own = _stamp_ns(*self._stamps.pop(), self._clock_ns, self._latest_ns)
            if own is not None:
                self._clock_ns = own
                self._stamps.clear()

    def _apply(self, rule: Rule, line: _Line, found: List[Found]) -> None:
        for kind, patterns in rule.searches:
            for pattern in patterns:
                match = self._search(pattern, line.text)
                if match is None and line.whole is not line.text:
                    match = self._search(pattern, line.whole)  # a rule may name the time itself
                if match is None:
                    continue
                self._hit = True
                own = self._in_lane(rule, line)
                if rule.confirm:
                    self._moved_bar(kind, rule, match, own, found)
                elif rule.step and kind != "begin":
                    self._logged_step(kind, rule, match, own, found)
                else:
                    getattr(self, "_" + kind)(rule, match, own, found)
                break
        for pattern in rule.confirm if self._bars else ():
            if self._search(pattern, line.text) is not None:
                own = self._in_lane(rule, line)
                bars = self._bars.get((own.lane, rule.name))
                if bars is not None:
                    bars.confirmed = True

    def _in_lane(self, rule: Rule, line: _Line) -> _Line:
        """The line as spoken by the source that it names itself, e.g. `TP3` within its stamp.

        The name is no rank: of several kinds of parallelism it may count any one.
        """
        if rule.across:
            return replace(line, lane="") if line.lane else line
        match = None if rule.lane is None else self._search(rule.lane, line.text)
        if match is None:
            return line
        named = match.group("lane" if "lane" in match.re.groupindex else 1) or ""
        lane = f"{line.lane} {_NAMED}{named}".strip() if named else line.lane
        return replace(line, lane=self._known_lane(lane) or line.lane)

    def _known_lane(self, lane: str) -> str:
        """The lane under the name that its process had first; "" once there are too many."""
        known = self._lanes.get(lane)
        if known is None:
            if len(self._lanes) >= LANES_MAX:
                return ""
            known = self._processes.setdefault(loglines.lane_process(lane), lane)
            self._lanes[lane] = known
        return known

    def _moved_bar(
        self, kind: str, rule: Rule, match: Match[str], line: _Line, found: List[Found]
    ) -> None:
        """A progress bar appeared or moved: keep it, or take it where a line has confirmed it."""
        key, phase = (line.lane, rule.name), (line.lane, rule.phase)
        if phase in self._ended or phase in self._open:
            return
        bars = self._bars.get(key)
        if bars is None:
            if len(self._bars) >= LANES_MAX:
                return
            bars = self._bars[key] = _Bars({})
        total = match.group("total")
        bar = bars.by_total.get(total)
        if kind == "begin":
            if bar is not None and bar.end is not None:
                bars.by_total[total] = None
            elif total not in bars.by_total:
                if len(bars.by_total) >= BARS_MAX:
                    del bars.by_total[next(iter(bars.by_total))]
                bars.by_total[total] = _Bar(match, self._known(rule, line))
            return
        if bar is not None and bar.end is None:
            bar.end, bar.end_times = match, self._known(rule, line)
        if not bars.confirmed:
            return
        bars.confirmed = False
        if bar is None or bar.end is None:
            return
        del self._bars[key]
        if bar.times is None or bar.end_times is None:
            self._leave_out(rule)
            self._ended.add(phase)
            return
        self._begin(rule, bar.begin, line, found, bar.times)
        self._end(rule, bar.end, line, found, bar.end_times)

    def _logged_step(
        self, kind: str, rule: Rule, match: Match[str], line: _Line, found: List[Found]
    ) -> None:
        """A line that a trainer writes every so many steps: find when the first step ended."""
        key = (line.lane, rule.name)
        if self._counts.get((*key, kind)):
            return
        number = _number(match.group(rule.step))
        if number is None:
            return
        times, step_ns = self._known(rule, line), _duration_ns(match)
        act = self._end if kind == "end" else self._point
        opened = self._open.get((line.lane, rule.phase))
        first = rule.step_from
        if opened is not None and opened.first_step is not None:
            first = opened.first_step
        if number <= first:
            act(rule, match, line, found)
            return
        held = self._held.get(key)
        if held is None:
            if len(self._held) < LANES_MAX:
                self._held[key] = _Held(number, match, times, step_ns)
            return
        logged = _Held(number, match, times, step_ns)
        if number <= (held.second or held).number:
            return
        if opened is not None and opened.first_step is not None:
            left_out: Optional[int] = held.number - first
        else:
            left_out = _left_out(held, logged, rule.step_from)
        if left_out is None:
            self._held[key] = replace(held, second=logged)
            return
        del self._held[key]
        begin_ns = None if opened is None else opened.begin_ns
        ended = _first_of(held, held.second or logged, left_out, begin_ns)
        if ended is None:
            self._leave_out(rule)
            return
        late_ns = max(0, self._latest.get(line.lane, ended[0]) - ended[0])
        mono_ns = None if ended[1] is None else ended[1] + late_ns
        act(rule, held.match, line, found, (ended[0] + late_ns, mono_ns, ended[2]))

    def _begin(
        self,
        rule: Rule,
        match: Match[str],
        line: _Line,
        found: List[Found],
        times: Optional[_Times] = None,
    ) -> None:
        key = (line.lane, rule.phase)
        opened = self._open.get(key)
        if opened is not None and opened.lost:
            del self._open[key]
            opened = None
        total = _total(match)
        if opened is not None and not rule.restart:
            if total and opened.rule is rule:
                opened.total = total  # what begins again, as after too large a batch, has its own
            else:
                opened.repeats += 1
            return
        times = times or self._times(rule, line)
        if times is None or not self._counted(rule, line, "begin"):
            return
        self._close_former(rule, line, times, found, restarted=opened is not None)
        self._open[key] = _Open(rule, times[0], first_step=_step_number(rule, match), total=total)
        attributes = {**_attributes(rule, match, line), **times[2]}
        found.append(Found("begin", rule.phase, key, times[0], times[1], "ok", attributes))

    def _end(
        self,
        rule: Rule,
        match: Match[str],
        line: _Line,
        found: List[Found],
        times: Optional[_Times] = None,
    ) -> None:
        key = (line.lane, rule.phase)
        opened = self._open.get(key)
        if opened is not None and opened.rule is rule and _is_of_another(match, opened.total):
            return
        if opened is not None and opened.lost:
            self._leave_out(rule)
            return
        duration_ns = _duration_ns(match)
        if opened is None and duration_ns is None and not rule.unopened_point:
            return
        times = times or self._known(rule, line)
        if times is None and opened is not None and duration_ns is not None:
            times = opened.begin_ns + duration_ns, None, {}
        if times is None:
            self._leave_out(rule)
            if opened is not None and opened.rule is rule:
                opened.lost = True
        if times is None or not self._counted(rule, line, "end"):
            return
        time_ns, mono_ns = times[:2]
        attributes = {**_attributes(rule, match, line), **times[2], **_reason(rule)}
        if opened is None and duration_ns is None:
            attributes["bootseer.reason"] = "the log holds this phase's end but no begin of it"
            point = Found("point", rule.phase, key, time_ns, mono_ns, rule.status, attributes)
            found.append(point)
            return
        if opened is None:
            span_ns = duration_ns or 0
            begin = Found("begin", rule.phase, key, time_ns - span_ns, None, "ok", attributes)
            if mono_ns is not None:
                begin = replace(begin, mono_nano=mono_ns - span_ns)
            found.append(begin)
        else:
            late_ns = max(0, opened.begin_ns - time_ns)
            time_ns += late_ns
            mono_ns = None if mono_ns is None else mono_ns + late_ns
            if opened.repeats:
                attributes["log.begins_ignored"] = opened.repeats
            del self._open[key]
        self._ended.add(key)
        found.append(Found("end", rule.phase, key, time_ns, mono_ns, rule.status, attributes))

    def _point(
        self,
        rule: Rule,
        match: Match[str],
        line: _Line,
        found: List[Found],
        times: Optional[_Times] = None,
    ) -> None:
        times = times or self._times(rule, line)
        if times is None or not self._counted(rule, line, "point"):
            return
        self._close_former(rule, line, times, found, restarted=False)
        key = (line.lane, rule.phase)
        attributes = {**_attributes(rule, match, line), **times[2], **_reason(rule)}
        found.append(Found("point", rule.phase, key, times[0], times[1], rule.status, attributes))

    def _close_former(
        self,
        rule: Rule,
        line: _Line,
        times: _Times,
        found: List[Found],
        *,
        restarted: bool,
    ) -> None:
        """End what this rule's begin or point ends: `until` of other phases, or its own again."""
        for key, opened in list(self._open.items()):
            lane, phase = key
            if lane != line.lane:
                continue
            other = phase != rule.phase
            until = opened.rule.until
            if not (rule.phase in until or "next" in until if other else restarted):
                continue
            if opened.lost:
                del self._open[key]
                continue
            attributes = _lane_attributes(opened.rule, lane)
            attributes["log.closed_by"] = rule.name
            late_ns = max(0, opened.begin_ns - times[0])
            mono_ns = None if times[1] is None else times[1] + late_ns
            found.append(Found("end", phase, key, times[0] + late_ns, mono_ns, "ok", attributes))
            del self._open[key]

    def _counted(self, rule: Rule, line: _Line, kind: str) -> bool:
        """Count an event of a rule in a lane; False where it must not be written."""
        key = (line.lane, rule.name, kind)
        count = self._counts.get(key, 0)
        if rule.once and count:
            return False
        if count >= FOUND_MAX:
            self._silenced[rule.name] = self._silenced.get(rule.name, 0) + 1
            return False
        self._counts[key] = count + 1
        return True

    def _own_time(self, rule: Rule, line: _Line) -> Optional[int]:
        if rule.time is None:
            return None
        match = self._search(rule.time, line.text)
        if match is None and line.whole is not line.text:
            match = self._search(rule.time, line.whole)
        if match is None:
            return None
        if self._live:
            return _stamp_ns(rule, match, line.arrival_ns)
        if line.stamp_ns is not None:
            return _agreed_ns(rule, match, line.stamp_ns)
        return _stamp_ns(rule, match, self._clock_ns or line.arrival_ns, self._latest_ns)

    def _times(self, rule: Rule, line: _Line) -> Optional[_Times]:
        """Times of a line's event; None, and counted, for an imported line that has none."""
        times = self._known(rule, line)
        if times is None:
            self._leave_out(rule)
        return times

    def _known(self, rule: Rule, line: _Line) -> Optional[_Times]:
        """Times of a line's event; None for an imported line that has none."""
        self._settle()
        own = self._own_time(rule, line)
        if not self._live:
            own = line.stamp_ns if own is None else own
            return None if own is None else (own, None, {})
        delay_ns = 0 if own is None else line.arrival_ns - own
        whole_seconds = own is not None and own % loglines.SECOND_NS == 0
        if own is None or (whole_seconds and 0 <= delay_ns < 2 * loglines.SECOND_NS):
            # A timestamp in whole seconds is coarser than the arrival that it agrees with.
            return line.arrival_ns, line.mono_ns, {}
        return own, None if line.mono_ns is None else line.mono_ns - delay_ns, {}


def _left_out(held: _Held, logged: _Held, step_from: int) -> Optional[int]:
    """How many steps of a run lie before the first logged one; None while that is open.

    Trainers log every so many steps and resume from such a step, so as many as between two logged
    ones; or they log a run's first step besides (Megatron-LM does since core 0.16), which shows
    where its number fits no such interval, and the next interval is longer.
    """
    second = held.second or logged
    steps = second.number - held.number
    if held.second is None and (held.number - step_from + 1) % steps:
        return None
    if held.second is not None and logged.number - second.number != steps:
        return 0
    return steps - 1


def _first_of(
    held: _Held, second: _Held, left_out: int, begin_ns: Optional[int]
) -> Optional[_Times]:
    """When a run's first step ended, `left_out` steps before the first logged one.

    How long a step takes follows from two logged ones, or from what the second line says.
    """
    said = {"log.step_estimated": True} if left_out else {}
    if held.times is not None:
        each = 0
        if left_out and second.times is not None:
            each = (second.times[0] - held.times[0]) // (second.number - held.number)
        elif left_out:
            if second.step_ns is None:
                return None
            each = second.step_ns
        back_ns = left_out * max(0, each)
        mono_ns = None if held.times[1] is None else held.times[1] - back_ns
        return held.times[0] - back_ns, mono_ns, {**held.times[2], **said}
    if begin_ns is None or held.step_ns is None or second.step_ns is None:
        return None
    took_ns = max(0, (left_out + 1) * held.step_ns - left_out * second.step_ns)
    return begin_ns + took_ns, None, said


def _step_number(rule: Rule, match: Match[str]) -> Optional[int]:
    """The number of a run's first step, where the line that begins it says so."""
    return _number(match.groupdict().get(rule.step)) if rule.step else None


def _total(match: Match[str]) -> str:
    """The total that a bar or the line before it names, "" for none."""
    return (match.groupdict().get("total") or "").replace(",", "")


def _is_of_another(match: Match[str], total: str) -> bool:
    """Whether a line is of a bar with another total than the one that is awaited."""
    found = _total(match)
    return bool(found and total and found != total)


def _number(text: Optional[str]) -> Optional[int]:
    """A count that a line names; None where an optional group is absent or holds none."""
    return int(text) if text and text.isdecimal() and len(text) <= DIGITS_MAX else None


def _time_text(match: Match[str]) -> str:
    return match.group("time" if "time" in match.re.groupindex else 1) or ""


def _stamp_ns(
    rule: Rule, match: Match[str], near_ns: int, latest_ns: Optional[int] = None
) -> Optional[int]:
    text = _time_text(match)
    return loglines.parse_time_ns(text, rule.time_format, rule.utc_offset_s, near_ns, latest_ns)


def _agreed_ns(rule: Rule, match: Match[str], stamp_ns: int) -> Optional[int]:
    """A line's own time where its container's log has stamped it as well.

    The program's zone need not be this machine's, so a time without a zone is read in the zone
    that agrees with the stamp. A time in whole seconds is coarser than the stamp.
    """
    text, own_ns = _time_text(match), _stamp_ns(rule, match, stamp_ns)
    if own_ns is None:
        return None
    if rule.utc_offset_s is None:
        utc_ns, other_ns = (
            loglines.parse_time_ns(text, rule.time_format, offset_s, stamp_ns)
            for offset_s in (0, ZONE_STEP_NS // loglines.SECOND_NS)
        )
        if utc_ns is not None and utc_ns != other_ns:
            zone_ns = round((stamp_ns - utc_ns) / ZONE_STEP_NS) * ZONE_STEP_NS
            if abs(zone_ns) <= ZONE_MAX_NS and abs(stamp_ns - utc_ns - zone_ns) <= LATE_MAX_NS:
                own_ns = utc_ns + zone_ns
    coarse = own_ns % loglines.SECOND_NS == 0
    return stamp_ns if coarse and 0 <= stamp_ns - own_ns < 2 * loglines.SECOND_NS else own_ns


def _lane_attributes(rule: Rule, lane: str) -> Dict[str, Any]:
    attributes: Dict[str, Any] = {"bootseer.source": "log", "log.rule": rule.name}
    if rule.wait:
        attributes["bootseer.wait"] = True
    prefix, _, named = lane.partition(_NAMED)
    rank, local_rank = loglines.lane_rank(prefix.strip())
    if named or (lane and rank is None and local_rank is None):
        attributes["log.lane"] = f"{prefix}{named}"[:TEXT_MAX]
    if rank is not None:
        attributes["bootseer.rank"] = rank
    if local_rank is not None:
        attributes["bootseer.local_rank"] = local_rank
    return attributes


def _reason(rule: Rule) -> Dict[str, Any]:
    return {"bootseer.reason": rule.reason} if rule.reason else {}


def _attributes(rule: Rule, match: Match[str], line: _Line) -> Dict[str, Any]:
    attributes = _lane_attributes(rule, line.lane)
    for name, value in match.groupdict().items():
        if value is None or name.startswith("duration"):
            continue
        if name in ("bytes", "rank", "local_rank"):
            number = _number(value)
            if number is not None:
                attributes["bootseer." + name] = number
        else:
            attributes["log." + name] = value[:TEXT_MAX]
    return attributes


def _duration_ns(match: Match[str]) -> Optional[int]:
    groups = match.groupdict()
    text = groups.get("duration") or ""
    for name, unit in (("duration_s", "s"), ("duration_ms", "ms")):
        if groups.get(name):
            text = f"{groups[name]}{unit}"
    duration_ns = loglines.parse_duration_ns(text)
    return duration_ns if duration_ns is not None and duration_ns < DURATION_MAX_NS else None
