"""What the start would have taken had one phase or node been otherwise (pure).

Changes are made to the work of each stage and carried through the barriers (see `stages`):
shortening what no process waited for saves nothing. Only own work changes; gaps, waits for
others than barriers and the barriers' latencies stay as they were.

Of phases that ran at once, shortening one saves what it did alone. A phase is shortened from its
end, in each stage by the same share: the time that is saved lies in its last part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from bootseer.profiler.report.lanes import Lanes
from bootseer.profiler.report.model import JOB, WhatIf
from bootseer.profiler.report.stages import (
    END,
    Interval,
    StageKey,
    Stages,
    Stretch,
    compute_end_s,
    longest_of,
)

_Order = Mapping[StageKey, Sequence[Stretch]]
"""Each stage's stretches, the longest work first."""


def compute_what_ifs(
    lanes: Lanes,
    stages: Stages,
    totals: Sequence[Mapping[str, float]],
    medians: Mapping[str, float],
    holders: Sequence[str],
) -> tuple[WhatIf, ...]:
    """Every phase at its median and removed, every node in `holders` likewise; most saved first.

    `totals` is each lane's own work per phase. Only `holders`, nodes that arrived last at some
    barrier, are considered: a change to any other node would save nothing.
    """
    base = longest_of(stages)
    now_s = compute_end_s(stages, base)
    order = {k: sorted(each, key=_work_of, reverse=True) for k, each in stages.stretches.items()}
    stages_of: dict[str, list[StageKey]] = defaultdict(list)
    for key, stretches in stages.stretches.items():
        for phase in set().union(*[stretch[3] for stretch in stretches]):
            stages_of[phase].append(key)
    what_ifs = []
    for phase, keys in stages_of.items():
        # Nothing is left of a start without the job itself.
        for change in ("median",) if phase == JOB else ("median", "removed"):
            limit_s = medians.get(phase, 0.0) if change == "median" else 0.0
            longest = dict(base)
            for key in keys:
                longest[key] = _find_longest(order[key], phase, limit_s, totals)
            end_s = compute_end_s(stages, longest)
            what_ifs.append(_make_what_if("phase", phase, change, now_s, end_s))
    for node in holders:
        mine = {number for number, lane in enumerate(lanes.lanes) if lane.node == node}
        at_median = _find_longest_at_median(order, totals, medians, mine)
        end_s = compute_end_s(stages, at_median)
        what_ifs.append(_make_what_if("node", node, "median", now_s, end_s))
        removed = _find_longest_without(order, mine)
        if any(key[1] == END for key in removed):
            end_s = compute_end_s(stages, removed)
            what_ifs.append(_make_what_if("node", node, "removed", now_s, end_s))
    return tuple(sorted(what_ifs, key=lambda w: (-w.saved_s, w.kind, w.name, w.change)))


def _make_what_if(
    kind: Literal["phase", "node"], name: str, change: str, now_s: float, end_s: float
) -> WhatIf:
    which: Literal["median", "removed"] = "median" if change == "median" else "removed"
    return WhatIf(kind, name, which, end_s, max(0.0, now_s - end_s))


def _work_of(stretch: Stretch) -> float:
    return stretch[2]


def _find_longest(
    order: Sequence[Stretch], phase: str, limit_s: float, totals: Sequence[Mapping[str, float]]
) -> float:
    """A stage's longest work in seconds with no lane longer than `limit_s` in `phase`."""
    longest_s = -math.inf
    for stretch in order:  # fields by number: this loop is most of the work
        work_s = stretch[2]
        if work_s <= longest_s:  # nothing gets longer, so no later one can be the longest
            break
        own_s = stretch[3].get(phase)
        if own_s is not None:
            total_s = totals[stretch[0]].get(phase, own_s)
            if total_s > limit_s:
                less_s = own_s * (total_s - limit_s) / total_s
                if stretch[7]:
                    less_s = _compute_saved_s(stretch, {phase: less_s})
                work_s -= less_s
        if work_s > longest_s:
            longest_s = work_s
    return longest_s


def _find_longest_at_median(
    order: _Order,
    totals: Sequence[Mapping[str, float]],
    medians: Mapping[str, float],
    mine: set[int],
) -> dict[StageKey, float]:
    """Each stage's longest work with no phase of the lanes in `mine` above its median."""
    longest = {}
    for key, stretches in order.items():
        longest_s = -math.inf
        for stretch in stretches:
            if stretch.work_s <= longest_s:
                break
            less_s = 0.0
            if stretch.lane in mine:
                less = _find_above_median(stretch, totals[stretch.lane], medians)
                if stretch.intervals:
                    less_s = _compute_saved_s(stretch, less)
                else:
                    less_s = sum(less.values())
            longest_s = max(longest_s, stretch.work_s - less_s)
        longest[key] = longest_s
    return longest


def _find_above_median(
    stretch: Stretch, total: Mapping[str, float], medians: Mapping[str, float]
) -> dict[str, float]:
    """A stretch's share of what its lane spent in each phase above the phase's median."""
    above = {}
    for phase, own_s in stretch.own_s.items():
        total_s = total.get(phase, own_s)
        over_s = total_s - medians.get(phase, total_s)
        if over_s > 0 and total_s > 0:
            above[phase] = own_s * over_s / total_s
    return above


def _compute_saved_s(stretch: Stretch, less: Mapping[str, float]) -> float:
    """By how much a stretch gets shorter without the last `less` seconds of each phase's own work.

    By the moments of these in which nothing else ran.
    """
    if len(less) == 1:
        ((phase, less_s),) = less.items()
        own_s, alone_s = stretch.own_s[phase], stretch.alone_s.get(phase, 0.0)
        if alone_s == 0 or less_s >= own_s:
            return alone_s
        if alone_s >= own_s:
            return less_s
    since = {phase: _find_last(phase, less_s, stretch.intervals) for phase, less_s in less.items()}
    saved_s = 0.0
    for begin_s, end_s, phases, waits in stretch.intervals:
        if phases and not waits and all(phase in since for phase in phases):
            saved_s += max(0.0, end_s - max(begin_s, *(since[phase] for phase in phases)))
    return saved_s


def _find_last(phase: str, length_s: float, intervals: Sequence[Interval]) -> float:
    """The moment from which on `phase` worked for `length_s` in all."""
    moment_s = intervals[-1].end_s
    for begin_s, end_s, phases, _ in reversed(intervals):
        if phase in phases:
            moment_s = max(begin_s, end_s - length_s)
            length_s -= end_s - begin_s
            if length_s <= 0:
                break
    return moment_s


def _find_longest_without(order: _Order, mine: set[int]) -> dict[StageKey, float]:
    """Each stage's longest work without the lanes in `mine`; stages of these alone are absent."""
    longest = {}
    for key, stretches in order.items():
        longest_s = next((s[2] for s in stretches if s[0] not in mine), None)
        if longest_s is not None:
            longest[key] = longest_s
    return longest
