"""The barriers' structure: who works between which barriers, and when each barrier opens (pure).

A *stage* is a pair (barrier before, barrier after). A lane's work in a stage is its arrival at
the barrier after minus the moment the barrier before opened: own work, gaps and waits for
something else than a barrier. A barrier opens when the last lane of any stage that leads to it
arrives; what it then still took is its latency. So a start's duration follows from the longest
work of each stage, and a what-if only changes those.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from bootseer.profiler.report.lanes import Lane, Lanes, Wait
from bootseer.profiler.report.overlap import Moment, Part

START = -1
END = -2
_CLUSTER_S = 0.25
StageKey = tuple[int, int]


class Ran(NamedTuple):
    """`[begin_s, end_s)` of a stretch: the top-level phases at work then, and whether the process
    waited for anything besides."""

    begin_s: float
    end_s: float
    phases: tuple[str, ...]
    waits: bool


_new = tuple.__new__  # a quarter of the time of Ran(...)


class Stretch(NamedTuple):
    """One lane's way through one stage: `[begin_s, end_s)`, its work in seconds, and its own
    work per top-level phase.

    `path_s` gives each moment of it to one phase; `alone_s` is what a phase did while nothing else
    ran. Both are `own_s`, and `ran` is empty, where nothing ran at once in this lane.
    """

    lane: int
    begin_s: float
    work_s: float
    own_s: Mapping[str, float]
    gap_s: float
    path_s: Mapping[str, float]
    alone_s: Mapping[str, float]
    ran: tuple[Ran, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """A barrier that really held: lanes (by index) with arrivals, and when it opened."""

    name: str
    index: int
    lanes: tuple[int, ...]
    arrivals_s: tuple[float, ...]
    exit_s: float
    latency_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Stages:
    """Gates in the order in which they opened, and every stage's stretches."""

    gates: tuple[Gate, ...]
    stretches: Mapping[StageKey, tuple[Stretch, ...]]
    end_s: float


def find_stages(lanes: Lanes) -> Stages:
    """Find the barriers of a start and cut every lane at them."""
    gates, passed = _gates(lanes.lanes)
    stretches: dict[StageKey, list[Stretch]] = defaultdict(list)
    known: _Known = {}
    plans: _Plans = {}
    tops = {name: chain[-1] for name, chain in lanes.chains.items()}
    for number, lane in enumerate(lanes.lanes):
        _cut(number, lane, passed[number], gates, lanes, tops, stretches, known, plans)
    return Stages(tuple(gates), {k: tuple(v) for k, v in stretches.items()}, lanes.end_s)


class _Cluster(NamedTuple):
    """Passages through one barrier, by exit: lanes, waits, and these waits' times."""

    lanes: list[int]
    waits: list[Wait]
    arrivals_s: list[float]
    exits_s: list[float]


def _gates(lanes: Sequence[Lane]) -> tuple[list[Gate], list[list[tuple[int, Wait]]]]:
    """The gates, and for each lane the gates it passed with its wait there."""
    by_key: dict[tuple[str, int], tuple[list[int], list[Wait]]] = {}
    for number, lane in enumerate(lanes):
        for wait in lane.waits:
            members = by_key.get(wait[0])
            if members is None:
                members = by_key[wait[0]] = ([], [])
            members[0].append(number)
            members[1].append(wait)
    found: list[tuple[float, _Cluster]] = []
    for numbers, waits in by_key.values():
        for cluster in _clusters(numbers, waits):
            exit_s, last_s = cluster.exits_s[0], max(cluster.arrivals_s)
            if len(cluster.lanes) > 1 and last_s <= exit_s + _CLUSTER_S:
                found.append((max(exit_s, last_s), cluster))
    found.sort(key=lambda item: item[0])
    gates: list[Gate] = []
    passed: list[list[tuple[int, Wait]]] = [[] for _ in lanes]
    for index, (exit_s, cluster) in enumerate(found):
        name, number = cluster.waits[0].key
        gates.append(
            Gate(
                name=name,
                index=number,
                lanes=tuple(cluster.lanes),
                arrivals_s=tuple(cluster.arrivals_s),
                exit_s=exit_s,
                latency_s=exit_s - max(cluster.arrivals_s),
                waited_s=sum(map(sub, cluster.exits_s, cluster.arrivals_s)),
            )
        )
        for number, wait in zip(cluster.lanes, cluster.waits, strict=True):
            passed[number].append((index, wait))
    return gates, passed


def _clusters(numbers: Sequence[int], waits: Sequence[Wait]) -> list[_Cluster]:
    """Split waits of one name where their exits lie apart: groups with barriers of their own."""
    exits = [wait[2] for wait in waits]
    order = sorted(range(len(exits)), key=exits.__getitem__)
    numbers, waits = [numbers[place] for place in order], [waits[place] for place in order]
    exits.sort()
    arrivals = [wait[1] for wait in waits]
    gaps_s = map(sub, exits[1:], exits)
    cuts = [place for place, gap_s in enumerate(gaps_s, 1) if gap_s > _CLUSTER_S]
    return [
        _Cluster(numbers[low:high], waits[low:high], arrivals[low:high], exits[low:high])
        for low, high in itertools.pairwise([0, *cuts, len(exits)])
    ]


def _cut(
    number: int,
    lane: Lane,
    passed: Sequence[tuple[int, Wait]],
    gates: Sequence[Gate],
    lanes: Lanes,
    tops: Mapping[str, str],
    stretches: dict[StageKey, list[Stretch]],
    known: _Known,
    plans: _Plans,
) -> None:
    """Add one lane's stretches; one that did not reach a gate or the end has no last stretch."""
    before, opened_s, place = START, 0.0, 0
    stops = [(gate, wait.arrival_s, wait.exit_s) for gate, wait in passed]
    if lane.reached or not lanes.complete:
        stops.append((END, lane.end_s, lane.end_s))
    passed_s = -math.inf
    for gate, arrival_s, exit_s in stops:
        sums = _plain_sums(lane, place, passed_s, opened_s, arrival_s, tops, plans)
        own, gap_s, place = sums or _sums(lane, place, passed_s, opened_s, arrival_s, tops)
        if before == START:
            gap_s += max(0.0, lane.begin_s)
        path = alone = own
        ran: tuple[Ran, ...] = ()
        if lane.moments:
            own, path, alone, ran = _shared(lane, opened_s, arrival_s, lanes.chains, known)
        work_s = max(0.0, arrival_s - opened_s)  # it waited here while it waited there
        stretches[before, gate].append(
            _new(Stretch, (number, opened_s, work_s, own, gap_s, path, alone, ran))
        )
        if gate == END:
            break
        passed_s = max(passed_s, arrival_s, exit_s)
        while place < len(lane.parts) and lane.times[2 * place + 1] <= exit_s:
            place += 1
        before, opened_s = gate, gates[gate].exit_s


_Sums = dict[str, float]


def _sums(
    lane: Lane,
    place: int,
    passed_s: float,
    begin_s: float,
    end_s: float,
    tops: Mapping[str, str],
) -> tuple[_Sums, float, int]:
    """Own work per top-level phase within `[begin_s, end_s)`, what is not described there, and
    the place of the first part that goes on behind it; `place` is where to begin. Gaps that ended
    by `passed_s` belong to an earlier stage."""
    own: _Sums = {}
    gap_s = 0.0
    times = lane.times
    now = times[2 * place - 1] if place else lane.begin_s
    columns = itertools.islice(times, 2 * place, None)
    for (name, wait, _), low, high in zip(lane.parts[place:], columns, columns, strict=True):
        if low > passed_s and low > now:
            gap_s += max(0.0, min(low, end_s) - max(now, begin_s))
        now = high
        if low >= end_s:
            break
        if low < begin_s:
            low = begin_s  # noqa: PLW2901 - what lies within
        if high > end_s:
            high = end_s  # noqa: PLW2901
        else:
            place += 1
        if high > low and not wait:
            top = tops[name]
            own[top] = own.get(top, 0.0) + high - low
        if high == end_s:
            break
    else:
        if lane.end_s > passed_s:
            gap_s += max(0.0, min(lane.end_s, end_s) - max(now, begin_s))
    return own, gap_s, place


_Plans = dict[tuple[int, int, int], tuple[str, ...]]
"""Top-level phases of a range of the parts with this `id`, "" for waits; () where one phase has
several of them."""


def _plain_sums(
    lane: Lane,
    place: int,
    passed_s: float,
    begin_s: float,
    end_s: float,
    tops: Mapping[str, str],
    plans: _Plans,
) -> tuple[_Sums, float, int] | None:
    """What `_sums` gives, where parts lie wholly within and each is of another phase; else None."""
    times = lane.times
    first = 2 * place
    stop = bisect.bisect_left(times, end_s, first)
    if stop % 2:
        if times[stop] > end_s:
            return None
        stop += 1
    if stop == first or times[first] < passed_s or times[first] < begin_s:
        return None
    stop //= 2
    key = id(lane.parts), place, stop  # the lanes keep it
    plan = plans.get(key)
    if plan is None:
        phases = ["" if part.wait else tops[part.name] for part in lane.parts[place:stop]]
        own_phases = [phase for phase in phases if phase]
        plan = tuple(phases) if len(set(own_phases)) == len(own_phases) else ()
        plans[key] = plan
    if not plan:
        return None
    lows, highs = times[first : 2 * stop : 2], times[first + 1 : 2 * stop : 2]
    own: _Sums = dict(zip(plan, map(sub, highs, lows), strict=True))
    own.pop("", None)
    low, now = lows[0], times[first - 1] if place else lane.begin_s
    gap_s = low - max(now, begin_s) if low > passed_s and low > now else 0.0
    gap_s = sum(map(sub, lows[1:], highs), gap_s)
    until_s = end_s if stop < len(lane.parts) else min(lane.end_s, end_s)
    return own, gap_s + max(0.0, until_s - highs[-1]), stop


_Known = dict[tuple[Part, ...], tuple[tuple[str, ...], bool, str | None]]
"""What the innermost spans of a moment come to: phases at work, whether it waited, the path's."""


def _what_ran(
    moment_parts: tuple[Part, ...], chains: Mapping[str, tuple[str, ...]], known: _Known
) -> tuple[tuple[str, ...], bool, str | None]:
    found = known.get(moment_parts)
    if found is None:
        phases = tuple(dict.fromkeys(chains[p.name][-1] for p in moment_parts if not p.wait))
        waits = any(part.wait for part in moment_parts)
        first = None if moment_parts[0].wait else phases[0]
        found = known[moment_parts] = (phases, waits, first)
    return found


def _shared(
    lane: Lane,
    begin_s: float,
    end_s: float,
    chains: Mapping[str, tuple[str, ...]],
    known: _Known,
) -> tuple[_Sums, _Sums, _Sums, tuple[Ran, ...]]:
    """What ran within `[begin_s, end_s)` of a lane in which spans ran at once: own work, the
    path's, that of each phase alone, and all of it in order."""
    own: _Sums = {}
    path: _Sums = {}
    alone: _Sums = {}
    ran = []
    for place in range(bisect.bisect_right(lane.moments, begin_s, key=_end), len(lane.moments)):
        low, high, parts = lane.moments[place]
        if low >= end_s:
            break
        low, high = max(low, begin_s), min(high, end_s)
        phases, waits, first = _what_ran(parts, chains, known)
        length_s = high - low
        for phase in phases:
            own[phase] = own.get(phase, 0.0) + length_s
        if first is not None:
            path[first] = path.get(first, 0.0) + length_s
        if len(phases) == 1 and not waits:
            alone[phases[0]] = alone.get(phases[0], 0.0) + length_s
        ran.append(_new(Ran, (low, high, phases, waits)))
    return own, path, alone, tuple(ran)


def _end(moment: Moment) -> float:
    return moment[1]


def replay(stages: Stages, longest: Mapping[StageKey, float]) -> float:
    """When the start would end if each stage's longest work were `longest` (absent: nobody).

    A barrier opens at its latest arrival plus its latency as observed.
    """
    into: dict[int, list[StageKey]] = defaultdict(list)
    for key in longest:
        into[key[1]].append(key)
    opens: dict[int, float] = {START: 0.0}
    for gate in range(len(stages.gates)):
        arrivals = [opens[key[0]] + longest[key] for key in into[gate] if key[0] in opens]
        if arrivals:
            opens[gate] = max(arrivals) + stages.gates[gate].latency_s
    ends = [opens[key[0]] + longest[key] for key in into[END] if key[0] in opens]
    return max(ends, default=0.0)


def longest_of(stages: Stages) -> dict[StageKey, float]:
    """Each stage's longest work as observed."""
    return {key: max([s[2] for s in found]) for key, found in stages.stretches.items()}
