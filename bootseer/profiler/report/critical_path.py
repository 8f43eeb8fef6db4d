"""The critical path: who held everybody at each barrier, chained from start to end (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median

from bootseer.profiler.report.lanes import Lane, Lanes
from bootseer.profiler.report.model import Barrier, CriticalStep
from bootseer.profiler.report.stages import END, START, StageKey, Stages, Stretch

_LEAST_S = 0.01  # shorter pieces are joined to the one before; also those under 0.1 % of all


def last_into(stages: Stages) -> dict[int, tuple[StageKey, Stretch]]:
    """For each barrier (and END): the stage and stretch that arrived last."""
    out: dict[int, tuple[StageKey, Stretch]] = {}
    for key, stretches in stages.stretches.items():
        last = max(stretches, key=_arrival)
        best = out.get(key[1])
        if best is None or _arrival(last) > _arrival(best[1]):
            out[key[1]] = (key, last)
    return out


def _arrival(stretch: Stretch) -> float:
    return stretch.begin_s + stretch.work_s


def holders(lanes: Lanes, stages: Stages) -> list[str]:
    """The nodes that arrived last at some barrier or at the end, each once."""
    nodes = [lanes.lanes[stretch.lane].node for _, stretch in last_into(stages).values()]
    return sorted(set(nodes))


def barriers(lanes: Lanes, stages: Stages) -> tuple[Barrier, ...]:
    """Each barrier with the process that held it, and in which phase it lost the time."""
    last = last_into(stages)
    out = []
    for number, gate in enumerate(stages.gates):
        key, stretch = last[number]
        lane = lanes.lanes[stretch.lane]
        out.append(
            Barrier(
                name=gate.name,
                index=gate.index,
                processes=len(gate.lanes),
                exit_s=gate.exit_s,
                last_node=lane.node,
                last_rank=lane.rank,
                held_by_phase=_held_by(stretch, stages.stretches[key]),
                held_s=max(gate.arrivals_s) - median(gate.arrivals_s),
                waited_s=gate.waited_s,
            )
        )
    return tuple(out)


def _held_by(last: Stretch, all_of_stage: tuple[Stretch, ...]) -> str | None:
    """The phase in which `last` is furthest above the stage's median; None: unobserved time."""
    above = {
        phase: path_s - median([s.path_s.get(phase, 0.0) for s in all_of_stage])
        for phase, path_s in last.path_s.items()
    }
    gap_s = last.gap_s - median([s.gap_s for s in all_of_stage])
    if not above or gap_s > max(above.values()):
        return None
    return max(above, key=lambda phase: (above[phase], last.path_s[phase]))


def critical_path(
    lanes: Lanes, stages: Stages, medians: Mapping[str, float]
) -> tuple[CriticalStep, ...]:
    """Go back from the last first step: in each stage the last lane, before it the barrier's."""
    last = last_into(stages)
    steps: list[CriticalStep] = []
    target = END
    while target != START and target in last:
        key, stretch = last[target]
        if target != END and key[0] >= target:  # gates are in order, so this cannot lead back
            break
        lane = lanes.lanes[stretch.lane]
        barrier = None if target == END else stages.gates[target].name
        arrival_s = stretch.begin_s + stretch.work_s
        part = _steps(lane, stretch.begin_s, arrival_s, lanes, medians, barrier)
        exit_s = arrival_s if target == END else stages.gates[target].exit_s
        part.append(
            CriticalStep(arrival_s, exit_s, lane.node, lane.rank, barrier, True, None, barrier)
        )
        steps = part + steps
        target = key[0]
    return tuple(_joined(_in_order(steps), min(_LEAST_S, lanes.end_s / 1000)))


def _in_order(steps: Sequence[CriticalStep]) -> list[CriticalStep]:
    """Each step from the end of the one before: a lane may wait at two barriers at a time, and
    arrivals lie past an exit by as much as clocks differ."""
    out: list[CriticalStep] = []
    for step in steps:
        begin_s = out[-1].end_s if out else step.begin_s
        out.append(dataclasses.replace(step, begin_s=begin_s, end_s=max(begin_s, step.end_s)))
    return out


def _joined(steps: Sequence[CriticalStep], least_s: float) -> list[CriticalStep]:
    """Join what is shorter than `least_s` to the step before, else to the one after."""
    out: list[CriticalStep] = []
    begin_s: float | None = None
    for step in steps:
        if step.duration_s < least_s or step.duration_s <= 0:
            if out:
                out[-1] = dataclasses.replace(out[-1], end_s=step.end_s)
            elif begin_s is None:
                begin_s = step.begin_s
            continue
        low = step.begin_s if begin_s is None else begin_s
        begin_s = None
        out.append(dataclasses.replace(step, begin_s=low))
    return out


def _steps(
    lane: Lane,
    begin_s: float,
    end_s: float,
    lanes: Lanes,
    medians: Mapping[str, float],
    barrier: str | None,
) -> list[CriticalStep]:
    """A lane's pieces within `[begin_s, end_s)`, sub-phases joined to their phase."""
    out: list[CriticalStep] = []

    def add(low: float, high: float, phase: str | None, wait: bool) -> None:
        if high <= low:
            return
        if out and out[-1].phase == phase and out[-1].wait == wait:
            low = out.pop().begin_s
        typical = None if phase is None or wait else medians.get(phase)
        out.append(CriticalStep(low, high, lane.node, lane.rank, phase, wait, typical, barrier))

    now = begin_s
    for piece in lane.pieces:
        low, high = max(piece.begin_s, begin_s), min(piece.end_s, end_s)
        if high <= low:
            continue
        add(now, low, None, False)
        add(low, high, piece.name and lanes.chains[piece.name][-1], piece.wait)
        now = high
    add(now, end_s, None, False)
    return out
