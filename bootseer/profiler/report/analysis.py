"""From loaded starts to the report: the one entry to all analyses.

Those of large starts are divided between two processes (see `forked_call`); all else is pure.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import bootseer
from bootseer.errors import NotFoundError
from bootseer.profiler.report import incidents, phase_totals
from bootseer.profiler.report.before_after import Comparison
from bootseer.profiler.report.compare import StartFigures, compare
from bootseer.profiler.report.critical_path import (
    describe_barriers,
    find_critical_path,
    find_holders,
)
from bootseer.profiler.report.images import find_image_uses
from bootseer.profiler.report.lanes import Lanes, build_lanes, shifts_of
from bootseer.profiler.report.load.clock_skew import Skew, estimate_skew
from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.forked_call import call_forked
from bootseer.profiler.report.load.spans import Loaded, Start
from bootseer.profiler.report.load.wall_clock import find_unconfirmed
from bootseer.profiler.report.model import (
    STANDARD_PHASES,
    Barrier,
    CriticalStep,
    Problem,
    Report,
    StartKind,
    StartSummary,
    WhatIf,
)
from bootseer.profiler.report.notes import find_notes
from bootseer.profiler.report.phase_totals import LaneTotals
from bootseer.profiler.report.stages import find_stages
from bootseer.profiler.report.stragglers import find_stragglers
from bootseer.profiler.report.tries import keep_last_tries
from bootseer.profiler.report.whatif import compute_what_ifs

_KINDS: dict[str, StartKind] = {
    "first": "first",
    "restart": "restart",
    "restart_in_place": "restart_in_place",
    "standby": "standby",
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A start with its clocks corrected, its lanes and their sums: what all analyses use.

    `start` is all that was read; `last` has each rank's last try only, and all figures are of
    that. `earlier` names the tries before it.
    """

    start: Start
    last: Start
    earlier: tuple[Problem, ...]
    skew: Skew
    lanes: Lanes
    totals: tuple[LaneTotals, ...]
    summary: StartSummary


def prepare_start(start: Start) -> Prepared:
    """Correct clocks, cut into lanes, add up."""
    tries = keep_last_tries(start)
    last = tries.start
    skew = estimate_skew(last)
    lanes = build_lanes(last, skew)
    totals = phase_totals.sum_lanes(lanes)
    return Prepared(start, last, tries.problems, skew, lanes, totals, _summarize(start, lanes))


def _summarize(start: Start, lanes: Lanes) -> StartSummary:
    kind, attempt, job_uid = incidents.find_kind([s.identity for s in start.sources])
    gpus, are_assumed = phase_totals.count_gpus(lanes)
    unreached = len(incidents.find_unreached_ranks(lanes))
    return StartSummary(
        trace_id=start.trace_id,
        kind=_KINDS.get(kind, "unknown"),
        job_uid=job_uid,
        attempt=attempt,
        began_unix_s=lanes.zero_ns / 1e9,
        duration_s=lanes.end_s,
        complete=lanes.complete and not unreached,
        unreached=unreached,
        nodes=len({lane.node for lane in lanes.lanes}),
        processes=len(start.sources),
        ranks=sum(lane.rank is not None for lane in lanes.lanes),
        gpus=None if are_assumed else sum(gpus),
        events=sum(source.events for source in start.sources),
    )


def choose_start(loaded: Loaded, trace_id: str | None) -> Start:
    """The start that a report is about: the newest, or the one whose id begins with `trace_id`.

    Raises NotFoundError when there is none, or more than one.
    """
    if trace_id is None:
        return loaded.starts[0]
    exact = [s for s in loaded.starts if s.trace_id == trace_id]
    matching = exact or [s for s in loaded.starts if s.trace_id.startswith(trace_id.lower())]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(s.trace_id[:12] for s in loaded.starts[:5])
    what = "several starts begin with" if matching else "no start has"
    raise NotFoundError(f"{what} trace id {trace_id}; known are {known}")


def analyse(
    loaded: Loaded, *, trace_id: str | None = None, baseline: Loaded | None = None
) -> Report:
    """Report everything about one start, list the others, and compare them with `baseline`'s."""
    chosen = prepare_start(choose_start(loaded, trace_id))
    is_large = len(chosen.lanes.lanes) >= LEAST_LANES
    with call_forked(lambda: _find_held(chosen), fork=is_large) as wait_for_held:
        return _analyse_chosen(chosen, wait_for_held, loaded, baseline)


def _analyse_chosen(
    chosen: Prepared, wait_for_held: Callable[[], _Held], loaded: Loaded, baseline: Loaded | None
) -> Report:
    others = [prepare_start(s) for s in loaded.starts if s is not chosen.start]
    every = sorted([chosen, *others], key=lambda p: p.summary.began_unix_s, reverse=True)
    problems = (
        *loaded.problems,
        *chosen.earlier,
        *incidents.report_missing_ranks(chosen.start),
        *incidents.report_halted_ranks(chosen.last, chosen.lanes),
        *_find_unconfirmed(chosen),
    )
    comparison = None
    if baseline is not None:
        comparison = _compare_starts([prepare_start(s) for s in baseline.starts], every)
        problems = (*problems, *(p for p in baseline.problems if p not in problems))
    return dataclasses.replace(
        _assemble(chosen, wait_for_held),
        starts=tuple(p.summary for p in every),
        problems=problems,
        comparison=comparison,
    )


def _find_unconfirmed(prepared: Prepared) -> tuple[Problem, ...]:
    lanes, last = prepared.lanes, prepared.last
    end_ns = lanes.zero_ns + round(lanes.end_s * 1e9)
    return find_unconfirmed(last, shifts_of(last, prepared.skew), lanes.zero_ns, end_ns)


def _figures_of(prepared: Prepared) -> StartFigures:
    """What a comparison needs of one start."""
    longest: dict[str, float] = {}
    for total in prepared.totals:
        for phase, seconds in total.own.items():
            longest[phase] = max(longest.get(phase, 0.0), seconds)
    return StartFigures(prepared.summary.duration_s, longest)


def _compare_starts(baseline: Sequence[Prepared], candidate: Sequence[Prepared]) -> Comparison:
    """Compare the complete starts of both sides."""
    before = [_figures_of(p) for p in baseline if p.summary.complete]
    after = [_figures_of(p) for p in candidate if p.summary.complete]
    left_out = len(baseline) + len(candidate) - len(before) - len(after)
    return compare(before, after, left_out)


LEAST_LANES = 4096
"""Fewer lanes are analysed sooner than a second process is started for a part of them."""


class _Held(NamedTuple):
    """What follows from the barriers: what held them, and what the start would have taken else."""

    barriers: tuple[Barrier, ...]
    critical_path: tuple[CriticalStep, ...]
    what_if: tuple[WhatIf, ...]


def _find_held(prepared: Prepared) -> _Held:
    lanes, totals = prepared.lanes, prepared.totals
    stages = find_stages(lanes)
    medians = phase_totals.compute_medians(totals)
    what_if: tuple[WhatIf, ...] = ()
    # How long a start that never ended, for all or one, would have taken is not known.
    if prepared.summary.complete:
        own = [total.own for total in totals]
        what_if = compute_what_ifs(lanes, stages, own, medians, find_holders(lanes, stages))
    path = find_critical_path(lanes, stages, medians)
    return _Held(describe_barriers(lanes, stages), path, what_if)


def _assemble(prepared: Prepared, wait_for_held: Callable[[], _Held]) -> Report:
    """The report without what depends on other starts and on the input as a whole."""
    start, lanes, totals = prepared.last, prepared.lanes, prepared.totals
    own = [total.own for total in totals]
    tops = {chain[-1] for chain in lanes.chains.values()}
    counted = [
        total.own
        if total.counted is total.own
        else {p: s for p, s in total.counted.items() if p in tops}
        for total in totals
    ]
    slow = find_stragglers(lanes.lanes, own, counted)
    killed = incidents.find_killed_phases(lanes)
    shifts = shifts_of(start, prepared.skew)
    facts = incidents.find_phase_facts(start, shifts, lanes, killed)
    phases = phase_totals.compute_phase_stats(lanes, totals, facts, slow.within_noise)
    observed = {phase.name for phase in phases}
    for names, _, _, points in {columns_of(source.spans).form for source in start.sources}:
        observed.update(compress(names, points))
    columns = [p.name for p in phases if p.parent is None and (p.p50_s or p.wait_p50_s or p.killed)]
    killed_on = Counter(k.node for k in killed)
    nodes = phase_totals.summarize_nodes(lanes, totals, prepared.skew, killed_on)
    heat_map = phase_totals.build_heat_map(lanes, totals, columns)
    gpu_hours = phase_totals.compute_gpu_hours(lanes, totals)
    incidents_seen = incidents.find_incidents(start, shifts, lanes.zero_ns)
    images = find_image_uses(start)
    barriers, critical_path, what_if = wait_for_held()
    return Report(
        version=bootseer.__version__,
        start=prepared.summary,
        starts=(prepared.summary,),
        problems=(),
        phases=phases,
        not_observed=tuple(p for p in STANDARD_PHASES if p not in observed),
        nodes=nodes,
        skew=prepared.skew.summary,
        barriers=barriers,
        critical_path=critical_path,
        heat_map=heat_map,
        stragglers=slow.stragglers,
        gpu_hours=gpu_hours,
        what_if=what_if,
        killed=killed,
        incidents=incidents_seen,
        unreached=incidents.find_unreached_ranks(lanes),
        images=images,
        notes=find_notes(start, shifts, lanes.zero_ns),
    )
