"""What the start would have taken had one phase or node been otherwise (pure).

Changes are made to the work of each stage and carried through the barriers (see `stages`):
shortening what nobody waited for saves nothing. Only own work changes; gaps, waits for others
than barriers and the barriers' latencies stay as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from bootseer.profiler.report.lanes import WHOLE, Lanes
from bootseer.profiler.report.model import WhatIf
from bootseer.profiler.report.stages import StageKey, Stages, longest_of, replay

_Uses = dict[str, list[tuple[StageKey, int, float]]]  # phase -> (stage, place in it, own work)


def what_if(
    lanes: Lanes,
    stages: Stages,
    totals: Sequence[Mapping[str, float]],
    medians: Mapping[str, float],
    holders: Sequence[str],
) -> tuple[WhatIf, ...]:
    """Every phase at its median and removed, every node in `holders` likewise; most saved first.

    `totals` is each lane's own work per phase. Nodes that held nobody would save nothing, so
    only `holders` (who arrived last somewhere) are worth asking about.
    """
    base = longest_of(stages)
    now_s = replay(stages, base)
    uses: _Uses = defaultdict(list)
    for key, stretches in stages.stretches.items():
        for place, stretch in enumerate(stretches):
            for phase, own_s in stretch[3].items():
                uses[phase].append((key, place, own_s))
    out = []
    for phase, found in uses.items():
        # Nothing is left of a start without the job itself.
        for change in ("median",) if phase == WHOLE else ("median", "removed"):
            cuts: dict[StageKey, dict[int, float]] = defaultdict(dict)
            limit_s = medians.get(phase, 0.0) if change == "median" else 0.0
            for key, place, own_s in found:
                total_s = totals[stages.stretches[key][place][0]].get(phase, own_s)
                if total_s > limit_s:
                    cuts[key][place] = own_s * (total_s - limit_s) / total_s
            out.append(_result("phase", phase, change, now_s, _shortened(stages, base, cuts)))
    for node in holders:
        slim = _node_at_median(lanes, stages, totals, medians, node, base)
        out.append(_result("node", node, "median", now_s, replay(stages, slim)))
        rest = _without(lanes, stages, node)
        if any(key[1] == -2 for key in rest):
            out.append(_result("node", node, "removed", now_s, replay(stages, rest)))
    return tuple(sorted(out, key=lambda w: (-w.saved_s, w.kind, w.name, w.change)))


def _result(
    kind: Literal["phase", "node"], name: str, change: str, now_s: float, then_s: float
) -> WhatIf:
    which: Literal["median", "removed"] = "median" if change == "median" else "removed"
    return WhatIf(kind, name, which, then_s, max(0.0, now_s - then_s))


def _shortened(
    stages: Stages,
    base: Mapping[StageKey, float],
    cuts: Mapping[StageKey, Mapping[int, float]],
) -> float:
    longest = dict(base)
    for key, cut in cuts.items():
        works = [s[2] for s in stages.stretches[key]]
        for place, less_s in cut.items():
            works[place] -= less_s
        longest[key] = max(works)
    return replay(stages, longest)


def _node_at_median(
    lanes: Lanes,
    stages: Stages,
    totals: Sequence[Mapping[str, float]],
    medians: Mapping[str, float],
    node: str,
    base: Mapping[StageKey, float],
) -> dict[StageKey, float]:
    longest = dict(base)
    mine = {i for i, lane in enumerate(lanes.lanes) if lane.node == node}
    for key, stretches in stages.stretches.items():
        works = []
        for lane, _, work_s, own, _ in stretches:
            less_s = 0.0
            if lane in mine:
                for phase, own_s in own.items():
                    total_s = totals[lane].get(phase, own_s)
                    over_s = total_s - medians.get(phase, total_s)
                    if over_s > 0 and total_s > 0:
                        less_s += own_s * over_s / total_s
            works.append(work_s - less_s)
        longest[key] = max(works)
    return longest


def _without(lanes: Lanes, stages: Stages, node: str) -> dict[StageKey, float]:
    mine = {i for i, lane in enumerate(lanes.lanes) if lane.node == node}
    out = {}
    for key, stretches in stages.stretches.items():
        works = [s[2] for s in stretches if s[0] not in mine]
        if works:
            out[key] = max(works)
    return out
