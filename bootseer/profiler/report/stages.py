"""The barriers' structure: which lanes work between which barriers, and when each opens (pure).

A *stage* is a pair (barrier before, barrier after). A lane's work in a stage is its arrival at
the barrier after minus the moment the barrier before opened: own work, gaps and waits for
something else than a barrier. A barrier opens when the last lane of any stage that leads to it
arrives; the time that it then still takes is its latency. So a start's duration follows from the
longest work of each stage, and a what-if only changes those.
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


class Interval(NamedTuple):
    """`[begin_s, end_s)` of a stretch: the top-level phases at work then, and whether the process
    also waited for something."""

    begin_s: float
    end_s: float
    phases: tuple[str, ...]
    waits: bool


_new = tuple.__new__  # a quarter of the time of Interval(...)


class Stretch(NamedTuple):
    """One lane's way through one stage: its begin, its work in seconds, and its own work per
    top-level phase.

    `path_s` gives each moment of it to one phase; `alone_s` is what a phase did while nothing else
    ran. Both are `own_s`, and `intervals` is empty, where nothing ran at once in this lane.
    """

    lane: int
    begin_s: float
    work_s: float
    own_s: Mapping[str, float]
    gap_s: float
    path_s: Mapping[str, float]
    alone_s: Mapping[str, float]
    intervals: tuple[Interval, ...]


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
    gates, passed = _find_gates(lanes.lanes)
    stretches: dict[StageKey, list[Stretch]] = defaultdict(list)
    known: _ActivityByParts = {}
    plans: _Plans = {}
    tops = {name: chain[-1] for name, chain in lanes.chains.items()}
    for number, lane in enumerate(lanes.lanes):
        _cut_lane(number, lane, passed[number], gates, lanes, tops, stretches, known, plans)
    return Stages(tuple(gates), {k: tuple(v) for k, v in stretches.items()}, lanes.end_s)


class _Cluster(NamedTuple):
    """Passages through one barrier, by exit: lanes, waits, and these waits' times."""

    lanes: list[int]
    waits: list[Wait]
    arrivals_s: list[float]
    exits_s: list[float]


def _find_gates(lanes: Sequence[Lane]) -> tuple[list[Gate], list[list[tuple[int, Wait]]]]:
    """The gates, and for each lane the gates it passed with its wait there."""
    by_key: dict[tuple[str, int], tuple[list[int], list[Wait]]] = {}
    for number, lane in enumerate(lanes):
        for wait in lane.waits:
            members = by_key.get(wait[0])
            if members is None:
                members = by_key[wait[0]] = ([], [])
            members[0].append(number)
            members[1].append(wait)
    held: list[tuple[float, _Cluster]] = []  # when each opened
    for numbers, waits in by_key.values():
        for cluster in _split_clusters(numbers, waits):
            exit_s, last_s = cluster.exits_s[0], max(cluster.arrivals_s)
            if len(cluster.lanes) > 1 and last_s <= exit_s + _CLUSTER_S:
                held.append((max(exit_s, last_s), cluster))
    held.sort(key=lambda item: item[0])
    gates: list[Gate] = []
    passed: list[list[tuple[int, Wait]]] = [[] for _ in lanes]
    for gate, (exit_s, cluster) in enumerate(held):
        name, index = cluster.waits[0].key
        gates.append(
            Gate(
                name=name,
                index=index,
                lanes=tuple(cluster.lanes),
                arrivals_s=tuple(cluster.arrivals_s),
                exit_s=exit_s,
                latency_s=exit_s - max(cluster.arrivals_s),
                waited_s=sum(map(sub, cluster.exits_s, cluster.arrivals_s)),
            )
        )
        for number, wait in zip(cluster.lanes, cluster.waits, strict=True):
            passed[number].append((gate, wait))
    return gates, passed


def _split_clusters(numbers: Sequence[int], waits: Sequence[Wait]) -> list[_Cluster]:
    """Split waits of one name where their exits lie apart: groups with barriers of their own."""
    exits = [wait[2] for wait in waits]
    order = sorted(range(len(exits)), key=exits.__getitem__)
    numbers, waits = [numbers[index] for index in order], [waits[index] for index in order]
    exits.sort()
    arrivals = [wait[1] for wait in waits]
    gaps_s = map(sub, exits[1:], exits)
    cuts = [index for index, gap_s in enumerate(gaps_s, 1) if gap_s > _CLUSTER_S]
    return [
        _Cluster(numbers[low:high], waits[low:high], arrivals[low:high], exits[low:high])
        for low, high in itertools.pairwise([0, *cuts, len(exits)])
    ]


def _cut_lane(
    number: int,
    lane: Lane,
    passed: Sequence[tuple[int, Wait]],
    gates: Sequence[Gate],
    lanes: Lanes,
    tops: Mapping[str, str],
    stretches: dict[StageKey, list[Stretch]],
    known: _ActivityByParts,
    plans: _Plans,
) -> None:
    """Add one lane's stretches; one that did not reach a gate or the end has no last stretch."""
    before, opened_s, index = START, 0.0, 0
    stops = [(gate, wait.arrival_s, wait.exit_s) for gate, wait in passed]
    if lane.reached or not lanes.complete:
        stops.append((END, lane.end_s, lane.end_s))
    passed_s = -math.inf
    for gate, arrival_s, exit_s in stops:
        sums = _sum_columns(lane, index, passed_s, opened_s, arrival_s, tops, plans)
        own, gap_s, index = sums or _sum_parts(lane, index, passed_s, opened_s, arrival_s, tops)
        if before == START:
            gap_s += max(0.0, lane.begin_s)
        path = alone = own
        intervals: tuple[Interval, ...] = ()
        if lane.moments:
            own, path, alone, intervals = _sum_moments(
                lane, opened_s, arrival_s, lanes.chains, known
            )
        work_s = max(0.0, arrival_s - opened_s)  # it may wait at two barriers at a time
        stretches[before, gate].append(
            _new(Stretch, (number, opened_s, work_s, own, gap_s, path, alone, intervals))
        )
        if gate == END:
            break
        passed_s = max(passed_s, arrival_s, exit_s)
        while index < len(lane.parts) and lane.times[2 * index + 1] <= exit_s:
            index += 1
        before, opened_s = gate, gates[gate].exit_s


_Sums = dict[str, float]


def _sum_parts(
    lane: Lane,
    index: int,
    passed_s: float,
    begin_s: float,
    end_s: float,
    tops: Mapping[str, str],
) -> tuple[_Sums, float, int]:
    """Sum a lane's parts within `[begin_s, end_s)`, from part `index` on.

    Gives the own work per top-level phase, the seconds that no part describes, and the index of
    the first part that goes on after `end_s`. Gaps that ended by `passed_s` belong to an earlier
    stage.
    """
    own: _Sums = {}
    gap_s = 0.0
    times = lane.times
    now = times[2 * index - 1] if index else lane.begin_s
    columns = itertools.islice(times, 2 * index, None)
    for (name, wait, _), low, high in zip(lane.parts[index:], columns, columns, strict=True):
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
            index += 1
        if high > low and not wait:
            top = tops[name]
            own[top] = own.get(top, 0.0) + high - low
        if high == end_s:
            break
    else:
        if lane.end_s > passed_s:
            gap_s += max(0.0, min(lane.end_s, end_s) - max(now, begin_s))
    return own, gap_s, index


_Plans = dict[tuple[int, int, int], tuple[str, ...]]
"""Top-level phases of a range of the parts with this `id`, "" for waits; () where one phase has
several of them."""


def _sum_columns(
    lane: Lane,
    index: int,
    passed_s: float,
    begin_s: float,
    end_s: float,
    tops: Mapping[str, str],
    plans: _Plans,
) -> tuple[_Sums, float, int] | None:
    """What `_sum_parts` gives, faster, where parts lie wholly within and each is of another phase.

    None elsewhere.
    """
    times = lane.times
    first = 2 * index
    stop = bisect.bisect_left(times, end_s, first)
    if stop % 2:
        if times[stop] > end_s:
            return None
        stop += 1
    if stop == first or times[first] < passed_s or times[first] < begin_s:
        return None
    stop //= 2
    key = id(lane.parts), index, stop  # the lanes keep the parts
    plan = plans.get(key)
    if plan is None:
        phases = ["" if part.wait else tops[part.name] for part in lane.parts[index:stop]]
        own_phases = [phase for phase in phases if phase]
        plan = tuple(phases) if len(set(own_phases)) == len(own_phases) else ()
        plans[key] = plan
    if not plan:
        return None
    lows, highs = times[first : 2 * stop : 2], times[first + 1 : 2 * stop : 2]
    own: _Sums = dict(zip(plan, map(sub, highs, lows), strict=True))
    own.pop("", None)
    low, now = lows[0], times[first - 1] if index else lane.begin_s
    gap_s = low - max(now, begin_s) if low > passed_s and low > now else 0.0
    gap_s = sum(map(sub, lows[1:], highs), gap_s)
    until_s = end_s if stop < len(lane.parts) else min(lane.end_s, end_s)
    return own, gap_s + max(0.0, until_s - highs[-1]), stop


_ActivityByParts = dict[tuple[Part, ...], tuple[tuple[str, ...], bool, str | None]]
"""What the innermost spans of a moment come to: the phases at work, whether the process waited,
and the phase that the moment goes to on the critical path."""


def _find_activity(
    parts: tuple[Part, ...], chains: Mapping[str, tuple[str, ...]], known: _ActivityByParts
) -> tuple[tuple[str, ...], bool, str | None]:
    activity = known.get(parts)
    if activity is None:
        phases = tuple(dict.fromkeys(chains[part.name][-1] for part in parts if not part.wait))
        waits = any(part.wait for part in parts)
        on_path = None if parts[0].wait else phases[0]
        activity = known[parts] = (phases, waits, on_path)
    return activity


def _sum_moments(
    lane: Lane,
    begin_s: float,
    end_s: float,
    chains: Mapping[str, tuple[str, ...]],
    known: _ActivityByParts,
) -> tuple[_Sums, _Sums, _Sums, tuple[Interval, ...]]:
    """Sum `[begin_s, end_s)` of a lane in which spans ran at once.

    Gives own work, the path's, that of each phase alone, and all of it in order.
    """
    own: _Sums = {}
    path: _Sums = {}
    alone: _Sums = {}
    intervals = []
    first = bisect.bisect_right(lane.moments, begin_s, key=_end_of)
    for index in range(first, len(lane.moments)):
        low, high, parts = lane.moments[index]
        if low >= end_s:
            break
        low, high = max(low, begin_s), min(high, end_s)
        phases, waits, on_path = _find_activity(parts, chains, known)
        length_s = high - low
        for phase in phases:
            own[phase] = own.get(phase, 0.0) + length_s
        if on_path is not None:
            path[on_path] = path.get(on_path, 0.0) + length_s
        if len(phases) == 1 and not waits:
            alone[phases[0]] = alone.get(phases[0], 0.0) + length_s
        intervals.append(_new(Interval, (low, high, phases, waits)))
    return own, path, alone, tuple(intervals)


def _end_of(moment: Moment) -> float:
    return moment[1]


def compute_end_s(stages: Stages, longest: Mapping[StageKey, float]) -> float:
    """When the start would end if each stage's longest work were `longest`, in seconds.

    A barrier opens at its latest arrival plus its latency as observed. A stage that is absent from
    `longest` has no lanes.
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
    """Each stage's longest work as observed, in seconds."""
    return {key: max([s[2] for s in stretches]) for key, stretches in stages.stretches.items()}
