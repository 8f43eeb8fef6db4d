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


def of_lanes(lanes: Lanes) -> tuple[LaneTotals, ...]:
    """Add up each lane's pieces, or its moments where spans ran at once."""
    known: _Known = {}
    flat = all(len(chain) == 1 for chain in lanes.chains.values())
    return tuple(
        _overlapping_totals(lane, lanes.chains, known)
        if lane.moments
        else _plain_totals(lane)
        if flat and (lane.first or not any(part[2] for part in lane.parts))
        else _lane_totals(lane, lanes.chains)
        for lane in lanes.lanes
    )


def _plain_totals(lane: Lane) -> LaneTotals:
    """Add up the pieces of a lane that all count in it, where no phase has parts."""
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


def _lane_totals(lane: Lane, chains: Mapping[str, tuple[str, ...]]) -> LaneTotals:
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
        if not shared or lane.first:
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


_Known = dict[tuple[tuple[Part, ...], bool], _Running]


def _running(
    parts: tuple[Part, ...], first: bool, chains: Mapping[str, tuple[str, ...]], known: _Known
) -> _Running:
    found = known.get((parts, first))
    if found is None:
        tops: dict[bool, dict[str, None]] = {False: {}, True: {}}
        phases: dict[bool, dict[str, None]] = {False: {}, True: {}}
        for name, waiting, shared in parts:
            tops[waiting][chains[name][-1]] = None
            if not shared or first:
                phases[waiting].update(dict.fromkeys(chains[name]))
        own, wait = tuple(tops[False]), tuple(tops[True])
        counted, counted_wait = tuple(phases[False]), tuple(phases[True])
        found = _Running(own, wait, counted, counted_wait, 1 / len(own or wait))
        known[parts, first] = found
    return found


def _overlapping_totals(
    lane: Lane, chains: Mapping[str, tuple[str, ...]], known: _Known
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
        running = _running(parts, lane.first, chains, known)
        _add(own, running.own, length_s)
        _add(counted, running.counted, length_s)
        if running.own:
            _add(held, running.own, length_s * running.share)
        else:
            _add(held_wait, running.wait, length_s * running.share)
        if running.wait:
            _add(wait, running.wait, length_s)
            _add(counted_wait, running.counted_wait, length_s)
    gap_s = sum([piece.end_s - piece.begin_s for piece in lane.pieces if piece.name is None])
    return LaneTotals(own, wait, counted, counted_wait, gap_s, held, held_wait)


def _add(into: dict[str, float], phases: Sequence[str], seconds: float) -> None:
    for phase in phases:
        into[phase] = into.get(phase, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Extras:
    """What a phase's own events say beside their times, and over how many processes."""

    first_begin_s: float
    last_end_s: float
    killed: int
    errors: int
    fallbacks: int
    bytes: int | None


def phase_stats(
    lanes: Lanes,
    totals: Sequence[LaneTotals],
    extras: Mapping[str, Extras],
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
    out = []
    for phase, extra in extras.items():
        chain = lanes.chains.get(phase, (phase,))
        out.append(
            _stats(
                phase,
                chain[1] if len(chain) > 1 else None,
                (len(nodes[phase]), count[phase]),
                (sorted(own[phase]), sorted(wait[phase])),
                extra,
                within_noise.get(phase, 0),
            )
        )
    begins = {phase: extra.first_begin_s for phase, extra in extras.items()}

    def order(stats: PhaseStats) -> list[tuple[float, str]]:
        chain = lanes.chains.get(stats.name, (stats.name,))
        return [(begins.get(name, 0.0), name) for name in reversed(chain)]

    return tuple(sorted(out, key=order))


def _stats(
    phase: str,
    parent: str | None,
    counts: tuple[int, int],
    values: tuple[list[float], list[float]],
    extra: Extras,
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
        first_begin_s=extra.first_begin_s,
        last_end_s=extra.last_end_s,
        killed=extra.killed,
        errors=extra.errors,
        fallbacks=extra.fallbacks,
        bytes=extra.bytes,
        within_noise=within_noise,
    )


def node_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key for node names: numbers in them by value."""
    out: list[tuple[int, int, str]] = []
    text = ""
    for char in name:
        # Equal kinds run together; a change between digits and others starts a new part.
        if text and (char.isdecimal() != text[-1].isdecimal()):
            out.append(_part(text))
            text = ""
        text += char
    if text:
        out.append(_part(text))
    return tuple(out)


def _part(text: str) -> tuple[int, int, str]:
    return (0, int(text), text) if text.isdecimal() else (1, 0, text)


def by_node(lanes: Lanes) -> dict[str, list[int]]:
    """Lane numbers of each node, nodes in order."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, lane in enumerate(lanes.lanes):
        found[lane.node].append(number)
    return {node: found[node] for node in sorted(found, key=node_order)}


def heat_map(lanes: Lanes, totals: Sequence[LaneTotals], phases: Sequence[str]) -> HeatMap:
    """Medians over each node's lanes; `phases` are the columns (top-level ones)."""
    nodes = by_node(lanes)
    own = []
    wait = []
    for numbers in nodes.values():
        own.append(_row([totals[n].own for n in numbers], phases))
        wait.append(_row([totals[n].wait for n in numbers], phases))
    return HeatMap(tuple(nodes), tuple(phases), tuple(own), tuple(wait))


def _row(found: Sequence[Mapping[str, float]], phases: Sequence[str]) -> tuple[float | None, ...]:
    row: list[float | None] = []
    for phase in phases:
        values = sorted([seconds[phase] for seconds in found if phase in seconds])
        row.append(quantile(values, 0.5) if values else None)
    return tuple(row)


def group_gpus(lanes: Lanes) -> tuple[list[int], bool]:
    """GPUs of each group, and whether one a rank had to be assumed somewhere.

    A process names how many GPUs it may see: all of its node's, or its own one. So a group has
    the most that any of its processes named, but at least one a rank if it has any.
    """
    ranks = [0] * len(lanes.gpus)
    for lane in lanes.lanes:
        ranks[lane.group] += lane.rank is not None
    out = []
    for named, count in zip(lanes.gpus, ranks, strict=True):
        out.append(count if named is None else max(named, count) if named else 0)
    return out, any(named is None for named in lanes.gpus)


def gpu_hours(lanes: Lanes, totals: Sequence[LaneTotals]) -> GpuHours:
    """GPU-hours from each group's first event to each lane's first step, queueing left out."""
    gpus, assumed = group_gpus(lanes)
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
        own_sum + wait_sum + gap, own_sum, wait_sum, gap, sum(gpus), assumed, tuple(phases)
    )


def node_summaries(
    lanes: Lanes, totals: Sequence[LaneTotals], skew: Skew, killed: Mapping[str, int]
) -> tuple[NodeSummary, ...]:
    """One record a node."""
    out = []
    for node, numbers in by_node(lanes).items():
        mine = [lanes.lanes[n] for n in numbers]
        named = [lanes.gpus[group] for group in {lane.group for lane in mine}]
        ahead = skew.ahead_ns.get(node)
        unsure = skew.uncertainty_ns.get(node)
        whole = all(lane.reached for lane in mine)
        out.append(
            NodeSummary(
                name=node,
                processes=len(mine),
                gpus=sum(n or 0 for n in named) if any(n is not None for n in named) else None,
                own_s=fmean([sum(totals[n].held.values()) for n in numbers]),
                wait_s=fmean([sum(totals[n].held_wait.values()) for n in numbers]),
                gap_s=fmean([totals[n].gap_s for n in numbers]),
                first_step_s=max(lane.end_s for lane in mine) if whole else None,
                killed=killed.get(node, 0),
                skew_s=None if ahead is None else ahead / 1e9,
                skew_uncertainty_s=None if unsure is None else unsure / 1e9,
            )
        )
    return tuple(out)


def medians(totals: Sequence[LaneTotals]) -> dict[str, float]:
    """Each top-level phase's median own work over the lanes that had it."""
    found: dict[str, list[float]] = defaultdict(list)
    for total in totals:
        for phase, seconds in total.own.items():
            found[phase].append(seconds)
    return {phase: median(values) for phase, values in found.items()}
