"""Sums over lanes: own work and waiting per phase, and the figures made of them (pure).

What ran at once counts in full for each phase's own work (see `overlap`), so such sums may exceed
the time that passed; where they have to add up, as in GPU-hours, a moment is shared out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bootseer.profiler.report.lanes import Lane, Lanes
from bootseer.profiler.report.load.clock_skew import Skew
from bootseer.profiler.report.model import (
    GpuHours,
    HeatMap,
    NodeSummary,
    PhaseGpuHours,
    PhaseStats,
)
from bootseer.profiler.report.overlap import Part
from bootseer.profiler.report.quantiles import quantile

NOT_HELD = ("queue", "schedule")
"""Phases in which a job has no GPUs yet."""


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """One lane's seconds. `own` and `wait` are per top-level phase: all time in which it ran.
    `counted` and `counted_wait` also hold sub-phases, and leave out what is shared with the
    group's first lane. `held` and `held_wait` share each moment out among the phases that ran in
    it, own work before waiting; together with `gap_s` they make the lane's length. Where nothing
    ran at once they are `own` and `wait`."""

    own: Mapping[str, float]
    wait: Mapping[str, float]
    counted: Mapping[str, float]
    counted_wait: Mapping[str, float]
    gap_s: float
    held: Mapping[str, float]
    held_wait: Mapping[str, float]


def sum_lanes(lanes: Lanes) -> tuple[LaneTotals, ...]:
    """Add up each lane's pieces, or its moments where spans ran at once."""
    known: _RunningByParts = {}
    is_flat = all(len(chain) == 1 for chain in lanes.chains.values())
    return tuple(
        _sum_moments(lane, lanes.chains, known)
        if lane.moments
        else _sum_flat_pieces(lane)
        if is_flat and (lane.is_first or not any(part[2] for part in lane.parts))
        else _sum_pieces(lane, lanes.chains)
        for lane in lanes.lanes
    )


def _sum_flat_pieces(lane: Lane) -> LaneTotals:
    """Add up the pieces of a lane that all count in it, where no phase has sub-phases."""
    own: dict[str, float] = {}
    wait: dict[str, float] = {}
    gap_s, now = 0.0, lane.begin_s
    times = iter(lane.times)
    for (name, waiting, _), begin_s, end_s in zip(lane.parts, times, times, strict=True):
        gap_s += begin_s - now
        now = end_s
        into = wait if waiting else own
        into[name] = into.get(name, 0.0) + (end_s - begin_s)
    gap_s += lane.end_s - now
    return LaneTotals(own, wait, own, wait, gap_s, own, wait)


def _sum_pieces(lane: Lane, chains: Mapping[str, tuple[str, ...]]) -> LaneTotals:
    """Add up a lane's pieces."""
    own: dict[str, float] = {}
    wait: dict[str, float] = {}
    counted: dict[str, float] = {}
    counted_wait: dict[str, float] = {}
    gap_s, now = 0.0, lane.begin_s
    times = iter(lane.times)
    for (name, waiting, shared), begin_s, end_s in zip(lane.parts, times, times, strict=True):
        gap_s += begin_s - now
        now = end_s
        length_s = end_s - begin_s
        chain = chains[name]
        top = chain[-1]
        into, into_counted = (wait, counted_wait) if waiting else (own, counted)
        into[top] = into.get(top, 0.0) + length_s
        if not shared or lane.is_first:
            for phase in chain:
                into_counted[phase] = into_counted.get(phase, 0.0) + length_s
    gap_s += lane.end_s - now
    return LaneTotals(own, wait, counted, counted_wait, gap_s, own, wait)


@dataclass(frozen=True, slots=True)
class _Running:
    """What the innermost spans of a moment come to: top-level phases at work and waiting, and all
    phases that count in this lane; `share` is each one's part of what is held."""

    own: tuple[str, ...]
    wait: tuple[str, ...]
    counted: tuple[str, ...]
    counted_wait: tuple[str, ...]
    share: float


_RunningByParts = dict[tuple[tuple[Part, ...], bool], _Running]
"""By a moment's parts, and whether the lane is the first of its group."""


def _find_running(
    parts: tuple[Part, ...],
    is_first: bool,
    chains: Mapping[str, tuple[str, ...]],
    known: _RunningByParts,
) -> _Running:
    running = known.get((parts, is_first))
    if running is None:
        tops: dict[bool, dict[str, None]] = {False: {}, True: {}}
        phases: dict[bool, dict[str, None]] = {False: {}, True: {}}
        for name, waiting, shared in parts:
            tops[waiting][chains[name][-1]] = None
            if not shared or is_first:
                phases[waiting].update(dict.fromkeys(chains[name]))
        own, wait = tuple(tops[False]), tuple(tops[True])
        counted, counted_wait = tuple(phases[False]), tuple(phases[True])
        running = _Running(own, wait, counted, counted_wait, 1 / len(own or wait))
        known[parts, is_first] = running
    return running


def _sum_moments(
    lane: Lane, chains: Mapping[str, tuple[str, ...]], known: _RunningByParts
) -> LaneTotals:
    """Add up the moments of a lane in which several spans ran at once."""
    own: dict[str, float] = {}
    wait: dict[str, float] = {}
    counted: dict[str, float] = {}
    counted_wait: dict[str, float] = {}
    held: dict[str, float] = {}
    held_wait: dict[str, float] = {}
    for begin_s, end_s, parts in lane.moments:
        length_s = end_s - begin_s
        running = _find_running(parts, lane.is_first, chains, known)
        _add_seconds(own, running.own, length_s)
        _add_seconds(counted, running.counted, length_s)
        if running.own:
            _add_seconds(held, running.own, length_s * running.share)
        else:
            _add_seconds(held_wait, running.wait, length_s * running.share)
        if running.wait:
            _add_seconds(wait, running.wait, length_s)
            _add_seconds(counted_wait, running.counted_wait, length_s)
    gap_s = sum([piece.end_s - piece.begin_s for piece in lane.pieces if piece.name is None])
    return LaneTotals(own, wait, counted, counted_wait, gap_s, held, held_wait)


def _add_seconds(into: dict[str, float], phases: Sequence[str], seconds: float) -> None:
    for phase in phases:
        into[phase] = into.get(phase, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """A phase's extent on the start's clock, and its faults and bytes, over all processes."""

    first_begin_s: float
    last_end_s: float
    killed: int
    errors: int
    fallbacks: int
    bytes: int | None


def compute_phase_stats(
    lanes: Lanes,
    totals: Sequence[LaneTotals],
    facts: Mapping[str, PhaseFacts],
    within_noise: Mapping[str, int],
) -> tuple[PhaseStats, ...]:
    """Statistics of every observed phase, by first begin; sub-phases follow their phase."""
    own: dict[str, list[float]] = defaultdict(list)
    wait: dict[str, list[float]] = defaultdict(list)
    nodes: dict[str, set[str]] = defaultdict(set)
    count: dict[str, int] = defaultdict(int)
    for lane, total in zip(lanes.lanes, totals, strict=True):
        for phase, value in total.counted.items():
            own[phase].append(value)
            nodes[phase].add(lane.node)
            count[phase] += 1
        for phase, value in total.counted_wait.items():
            wait[phase].append(value)
            nodes[phase].add(lane.node)
            count[phase] += phase not in total.counted
    stats = []
    for phase, facts_of_phase in facts.items():
        chain = lanes.chains.get(phase, (phase,))
        stats.append(
            _make_phase_stats(
                phase,
                chain[1] if len(chain) > 1 else None,
                (len(nodes[phase]), count[phase]),
                (sorted(own[phase]), sorted(wait[phase])),
                facts_of_phase,
                within_noise.get(phase, 0),
            )
        )
    begins = {phase: each.first_begin_s for phase, each in facts.items()}

    def order(each: PhaseStats) -> list[tuple[float, str]]:
        chain = lanes.chains.get(each.name, (each.name,))
        return [(begins.get(name, 0.0), name) for name in reversed(chain)]

    return tuple(sorted(stats, key=order))


def _make_phase_stats(
    phase: str,
    parent: str | None,
    counts: tuple[int, int],
    values: tuple[list[float], list[float]],
    facts: PhaseFacts,
    within_noise: int,
) -> PhaseStats:
    own, wait = values
    p50_s = quantile(own, 0.5) if own else None
    return PhaseStats(
        name=phase,
        parent=parent,
        nodes=counts[0],
        processes=counts[1],
        p50_s=p50_s,
        p90_s=quantile(own, 0.9) if own else None,
        p99_s=quantile(own, 0.99) if own else None,
        max_s=own[-1] if own else None,
        max_over_median=own[-1] / p50_s if p50_s else None,
        wait_p50_s=quantile(wait, 0.5) if wait else None,
        wait_max_s=wait[-1] if wait else None,
        first_begin_s=facts.first_begin_s,
        last_end_s=facts.last_end_s,
        killed=facts.killed,
        errors=facts.errors,
        fallbacks=facts.fallbacks,
        bytes=facts.bytes,
        within_noise=within_noise,
    )


def node_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key for node names: numbers in them by value."""
    parts: list[tuple[int, int, str]] = []
    text = ""
    for char in name:
        # Equal kinds run together; a change between digits and others starts a new part.
        if text and (char.isdecimal() != text[-1].isdecimal()):
            parts.append(_order_of_part(text))
            text = ""
        text += char
    if text:
        parts.append(_order_of_part(text))
    return tuple(parts)


def _order_of_part(text: str) -> tuple[int, int, str]:
    return (0, int(text), text) if text.isdecimal() else (1, 0, text)


def _group_by_node(lanes: Lanes) -> dict[str, list[int]]:
    """Lane numbers of each node, nodes in order."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, lane in enumerate(lanes.lanes):
        numbers[lane.node].append(number)
    return {node: numbers[node] for node in sorted(numbers, key=node_order)}


def build_heat_map(lanes: Lanes, totals: Sequence[LaneTotals], phases: Sequence[str]) -> HeatMap:
    """Medians over each node's lanes; `phases` are the columns (top-level ones)."""
    nodes = _group_by_node(lanes)
    own = []
    wait = []
    for numbers in nodes.values():
        own.append(_median_row([totals[n].own for n in numbers], phases))
        wait.append(_median_row([totals[n].wait for n in numbers], phases))
    return HeatMap(tuple(nodes), tuple(phases), tuple(own), tuple(wait))


def _median_row(
    totals: Sequence[Mapping[str, float]], phases: Sequence[str]
) -> tuple[float | None, ...]:
    row: list[float | None] = []
    for phase in phases:
        values = sorted([seconds[phase] for seconds in totals if phase in seconds])
        row.append(quantile(values, 0.5) if values else None)
    return tuple(row)


def count_gpus(lanes: Lanes) -> tuple[list[int], bool]:
    """GPUs of each group, and whether one GPU a rank had to be assumed for any.

    A process names how many GPUs it may see: all of its node's, or its own one. So a group has
    the most that any of its processes named, but at least one a rank if it has any.
    """
    ranks = [0] * len(lanes.gpus)
    for lane in lanes.lanes:
        ranks[lane.group] += lane.rank is not None
    gpus = []
    for named, count in zip(lanes.gpus, ranks, strict=True):
        gpus.append(count if named is None else max(named, count) if named else 0)
    return gpus, any(named is None for named in lanes.gpus)


def compute_gpu_hours(lanes: Lanes, totals: Sequence[LaneTotals]) -> GpuHours:
    """GPU-hours from each group's first event to each lane's first step, queueing left out."""
    gpus, are_assumed = count_gpus(lanes)
    size = [0] * len(gpus)
    began_s = [float("inf")] * len(gpus)
    for lane in lanes.lanes:
        size[lane.group] += 1
        began_s[lane.group] = min(began_s[lane.group], lane.begin_s)
    own: dict[str, float] = defaultdict(float)
    wait: dict[str, float] = defaultdict(float)
    gap = 0.0
    for lane, total in zip(lanes.lanes, totals, strict=True):
        share = gpus[lane.group] / size[lane.group] / 3600
        for phase, seconds in total.held.items():
            if phase not in NOT_HELD:
                own[phase] += seconds * share
        for phase, seconds in total.held_wait.items():
            if phase not in NOT_HELD:
                wait[phase] += seconds * share
        gap += (total.gap_s + lane.begin_s - began_s[lane.group]) * share
    names = sorted({*own, *wait}, key=lambda phase: (-own[phase] - wait[phase], phase))
    phases = [PhaseGpuHours(phase, own[phase], wait[phase]) for phase in names]
    if gap > 0:
        phases.append(PhaseGpuHours(None, gap, 0.0))
    own_sum, wait_sum = sum(own.values()), sum(wait.values())
    return GpuHours(
        own_sum + wait_sum + gap, own_sum, wait_sum, gap, sum(gpus), are_assumed, tuple(phases)
    )


def summarize_nodes(
    lanes: Lanes, totals: Sequence[LaneTotals], skew: Skew, killed: Mapping[str, int]
) -> tuple[NodeSummary, ...]:
    """One record a node; `killed` counts the phases of each that never ended."""
    summaries = []
    for node, numbers in _group_by_node(lanes).items():
        mine = [lanes.lanes[n] for n in numbers]
        named = [lanes.gpus[group] for group in {lane.group for lane in mine}]
        ahead = skew.ahead_ns.get(node)
        uncertainty = skew.uncertainty_ns.get(node)
        all_reached = all(lane.reached for lane in mine)
        summaries.append(
            NodeSummary(
                name=node,
                processes=len(mine),
                gpus=sum(n or 0 for n in named) if any(n is not None for n in named) else None,
                own_s=fmean([sum(totals[n].held.values()) for n in numbers]),
                wait_s=fmean([sum(totals[n].held_wait.values()) for n in numbers]),
                gap_s=fmean([totals[n].gap_s for n in numbers]),
                first_step_s=max(lane.end_s for lane in mine) if all_reached else None,
                killed=killed.get(node, 0),
                skew_s=None if ahead is None else ahead / 1e9,
                skew_uncertainty_s=None if uncertainty is None else uncertainty / 1e9,
            )
        )
    return tuple(summaries)


def compute_medians(totals: Sequence[LaneTotals]) -> dict[str, float]:
    """Each top-level phase's median own work over the lanes that had it."""
    values_of: dict[str, list[float]] = defaultdict(list)
    for total in totals:
        for phase, seconds in total.own.items():
            values_of[phase].append(seconds)
    return {phase: median(values) for phase, values in values_of.items()}
