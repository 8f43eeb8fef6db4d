"""The critical path: which process held the others at each barrier, from start to end (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median

from bootseer.profiler.report.lanes import Lane, Lanes
from bootseer.profiler.report.model import Barrier, CriticalStep
from bootseer.profiler.report.stages import END, START, StageKey, Stages, Stretch

_LEAST_S = 0.01  # pieces shorter than this and than 0.1 % of all are joined to the one before


def _find_last_arrivals(stages: Stages) -> dict[int, tuple[StageKey, Stretch]]:
    """For each barrier (and END): the stage and stretch that arrived last."""
    last: dict[int, tuple[StageKey, Stretch]] = {}
    for key, stretches in stages.stretches.items():
        last_of_stage = max(stretches, key=_arrival_of)
        known = last.get(key[1])
        if known is None or _arrival_of(last_of_stage) > _arrival_of(known[1]):
            last[key[1]] = (key, last_of_stage)
    return last


def _arrival_of(stretch: Stretch) -> float:
    return stretch.begin_s + stretch.work_s


def find_holders(lanes: Lanes, stages: Stages) -> list[str]:
    """The nodes that arrived last at some barrier or at the end, each once."""
    nodes = [lanes.lanes[stretch.lane].node for _, stretch in _find_last_arrivals(stages).values()]
    return sorted(set(nodes))


def describe_barriers(lanes: Lanes, stages: Stages) -> tuple[Barrier, ...]:
    """Each barrier with the process that held it, and in which phase that lost the time."""
    last = _find_last_arrivals(stages)
    barriers = []
    for number, gate in enumerate(stages.gates):
        key, stretch = last[number]
        lane = lanes.lanes[stretch.lane]
        barriers.append(
            Barrier(
                name=gate.name,
                index=gate.index,
                processes=len(gate.lanes),
                exit_s=gate.exit_s,
                last_node=lane.node,
                last_rank=lane.rank,
                held_by_phase=_find_holding_phase(stretch, stages.stretches[key]),
                held_s=max(gate.arrivals_s) - median(gate.arrivals_s),
                waited_s=gate.waited_s,
            )
        )
    return tuple(barriers)


def _find_holding_phase(last: Stretch, all_of_stage: tuple[Stretch, ...]) -> str | None:
    """The phase in which `last` is furthest above the stage's median; None: unobserved time."""
    above = {
        phase: path_s - median([s.path_s.get(phase, 0.0) for s in all_of_stage])
        for phase, path_s in last.path_s.items()
    }
    gap_s = last.gap_s - median([s.gap_s for s in all_of_stage])
    if not above or gap_s > max(above.values()):
        return None
    return max(above, key=lambda phase: (above[phase], last.path_s[phase]))


def find_critical_path(
    lanes: Lanes, stages: Stages, medians: Mapping[str, float]
) -> tuple[CriticalStep, ...]:
    """Go back from the last first step: in each stage along the lane that arrived last.

    `medians` is each phase's median own work in seconds.
    """
    last = _find_last_arrivals(stages)
    steps: list[CriticalStep] = []
    target = END
    while target != START and target in last:
        key, stretch = last[target]
        if target != END and key[0] >= target:  # gates are in order, so this cannot lead back
            break
        lane = lanes.lanes[stretch.lane]
        barrier = None if target == END else stages.gates[target].name
        arrival_s = stretch.begin_s + stretch.work_s
        part = _cut_steps(lane, stretch.begin_s, arrival_s, lanes, medians, barrier)
        exit_s = arrival_s if target == END else stages.gates[target].exit_s
        part.append(
            CriticalStep(arrival_s, exit_s, lane.node, lane.rank, barrier, True, None, barrier)
        )
        steps = part + steps
        target = key[0]
    return tuple(_join_short(_connect(steps), min(_LEAST_S, lanes.end_s / 1000)))


def _connect(steps: Sequence[CriticalStep]) -> list[CriticalStep]:
    """Let each step begin at the end of the one before.

    A lane may wait at two barriers at a time, and arrivals lie past an exit by as much as clocks
    differ.
    """
    connected: list[CriticalStep] = []
    for step in steps:
        begin_s = connected[-1].end_s if connected else step.begin_s
        end_s = max(begin_s, step.end_s)
        connected.append(dataclasses.replace(step, begin_s=begin_s, end_s=end_s))
    return connected


def _join_short(steps: Sequence[CriticalStep], least_s: float) -> list[CriticalStep]:
    """Join what is shorter than `least_s` to the step before, else to the one after."""
    joined: list[CriticalStep] = []
    begin_s: float | None = None
    for step in steps:
        if step.duration_s < least_s or step.duration_s <= 0:
            if joined:
                joined[-1] = dataclasses.replace(joined[-1], end_s=step.end_s)
            elif begin_s is None:
                begin_s = step.begin_s
            continue
        low = step.begin_s if begin_s is None else begin_s
        begin_s = None
        joined.append(dataclasses.replace(step, begin_s=low))
    return joined


def _cut_steps(
    lane: Lane,
    begin_s: float,
    end_s: float,
    lanes: Lanes,
    medians: Mapping[str, float],
    barrier: str | None,
) -> list[CriticalStep]:
    """A lane's pieces within `[begin_s, end_s)`, sub-phases joined to their phase."""
    steps: list[CriticalStep] = []

    def add(low: float, high: float, phase: str | None, wait: bool) -> None:
        if high <= low:
            return
        if steps and steps[-1].phase == phase and steps[-1].wait == wait:
            low = steps.pop().begin_s
        median_s = None if phase is None or wait else medians.get(phase)
        steps.append(CriticalStep(low, high, lane.node, lane.rank, phase, wait, median_s, barrier))

    now = begin_s
    for piece in lane.pieces:
        low, high = max(piece.begin_s, begin_s), min(piece.end_s, end_s)
        if high <= low:
            continue
        add(now, low, None, False)
        add(low, high, piece.name and lanes.chains[piece.name][-1], piece.wait)
        now = high
    add(now, end_s, None, False)
    return steps
