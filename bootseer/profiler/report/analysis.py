"""From loaded starts to the report: the one entry to all analyses.

Those of large starts are shared out between two processes (see `forked`); else all is pure.
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
from bootseer.profiler.report import (
    critical_path as critical,
)
from bootseer.profiler.report import (
    forked,
    images,
    incidents,
    notes,
    phase_totals,
    stages,
    stragglers,
    whatif,
)
from bootseer.profiler.report import lanes as lanes_of
from bootseer.profiler.report.before_after import Comparison
from bootseer.profiler.report.compare import StartFigures, compare
from bootseer.profiler.report.lanes import Lanes
from bootseer.profiler.report.load import clock_skew as skews
from bootseer.profiler.report.load import wall_clock
from bootseer.profiler.report.load.clock_skew import Skew
from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.spans import Loaded, Start
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
from bootseer.profiler.report.phase_totals import LaneTotals
from bootseer.profiler.report.tries import last_tries

_KINDS: dict[str, StartKind] = {
    "first": "first",
    "restart": "restart",
    "restart_in_place": "restart_in_place",
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A start with its clocks corrected, its lanes and their sums: what all analyses use.

    `start` is all that was read, `last` each rank's last try alone, which all figures are of;
    `earlier` names the tries before it.
    """

    start: Start
    last: Start
    earlier: tuple[Problem, ...]
    skew: Skew
    lanes: Lanes
    totals: tuple[LaneTotals, ...]
    summary: StartSummary


def prepare(start: Start) -> Prepared:
    """Correct clocks, cut into lanes, add up."""
    tries = last_tries(start)
    last = tries.start
    skew = skews.estimate(last)
    lanes = lanes_of.build(last, skew)
    sums = phase_totals.of_lanes(lanes)
    return Prepared(start, last, tries.problems, skew, lanes, sums, _summary(start, lanes))


def _summary(start: Start, lanes: Lanes) -> StartSummary:
    kind, attempt, job_uid = incidents.kind_of([s.identity for s in start.sources])
    gpus, assumed = phase_totals.group_gpus(lanes)
    unreached = len(incidents.unreached_ranks(lanes))
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
        gpus=None if assumed else sum(gpus),
        events=sum(source.events for source in start.sources),
    )


def choose(loaded: Loaded, trace_id: str | None) -> Start:
    """The start that a report is about: the newest, or the one whose id begins with `trace_id`.

    Raises NotFoundError when there is none, or more than one.
    """
    if trace_id is None:
        return loaded.starts[0]
    exact = [s for s in loaded.starts if s.trace_id == trace_id]
    found = exact or [s for s in loaded.starts if s.trace_id.startswith(trace_id.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(s.trace_id[:12] for s in loaded.starts[:5])
    what = "several starts begin with" if found else "no start has"
    raise NotFoundError(f"{what} trace id {trace_id}; known are {known}")


def analyse(
    loaded: Loaded, *, trace_id: str | None = None, baseline: Loaded | None = None
) -> Report:
    """Everything about one start; the others are listed, and compared with `baseline`'s."""
    chosen = prepare(choose(loaded, trace_id))
    large = len(chosen.lanes.lanes) >= LEAST_LANES
    with forked.computed(lambda: _find_held(chosen), fork=large) as held:
        return _analysed(chosen, held, loaded, baseline)


def _analysed(
    chosen: Prepared, held: Callable[[], _Held], loaded: Loaded, baseline: Loaded | None
) -> Report:
    others = [prepare(s) for s in loaded.starts if s is not chosen.start]
    every = sorted([chosen, *others], key=lambda p: p.summary.began_unix_s, reverse=True)
    problems = (*loaded.problems, *chosen.earlier, *incidents.repeated(chosen.start))
    problems = (*problems, *incidents.missing_ranks(chosen.start))
    problems = (*problems, *incidents.halted_problems(chosen.last, chosen.lanes))
    problems = (*problems, *_unconfirmed(chosen))
    comparison = None
    if baseline is not None:
        comparison = compare_starts([prepare(s) for s in baseline.starts], every)
        problems = (*problems, *(p for p in baseline.problems if p not in problems))
    return dataclasses.replace(
        _assembled(chosen, held),
        starts=tuple(p.summary for p in every),
        problems=problems,
        comparison=comparison,
    )


def _unconfirmed(prepared: Prepared) -> tuple[Problem, ...]:
    lanes, last = prepared.lanes, prepared.last
    end_ns = lanes.zero_ns + round(lanes.end_s * 1e9)
    shifts = lanes_of.shifts_of(last, prepared.skew)
    return wall_clock.find_unconfirmed(last, shifts, lanes.zero_ns, end_ns)


def figures(prepared: Prepared) -> StartFigures:
    """What a comparison needs of one start."""
    longest: dict[str, float] = {}
    for total in prepared.totals:
        for phase, seconds in total.own.items():
            longest[phase] = max(longest.get(phase, 0.0), seconds)
    return StartFigures(prepared.summary.duration_s, longest)


def compare_starts(baseline: Sequence[Prepared], candidate: Sequence[Prepared]) -> Comparison:
    """Compare the complete starts of both sides."""
    before = [figures(p) for p in baseline if p.summary.complete]
    after = [figures(p) for p in candidate if p.summary.complete]
    left_out = len(baseline) + len(candidate) - len(before) - len(after)
    return compare(before, after, left_out)


LEAST_LANES = 4096
"""Of fewer lanes all is analysed sooner than a process is made for a part of it."""


class _Held(NamedTuple):
    """What follows from the barriers: who held them, and what the start would have taken else."""

    barriers: tuple[Barrier, ...]
    critical_path: tuple[CriticalStep, ...]
    what_if: tuple[WhatIf, ...]


def _find_held(prepared: Prepared) -> _Held:
    lanes, sums = prepared.lanes, prepared.totals
    cut = stages.find_stages(lanes)
    medians = phase_totals.medians(sums)
    what_if: tuple[WhatIf, ...] = ()
    # How long a start that never ended, for all or one, would have taken, nothing tells.
    if prepared.summary.complete:
        own = [total.own for total in sums]
        what_if = whatif.what_if(lanes, cut, own, medians, critical.holders(lanes, cut))
    path = critical.critical_path(lanes, cut, medians)
    return _Held(critical.barriers(lanes, cut), path, what_if)


def _assembled(prepared: Prepared, held: Callable[[], _Held]) -> Report:
    start, lanes, sums = prepared.last, prepared.lanes, prepared.totals
    own = [total.own for total in sums]
    tops = {chain[-1] for chain in lanes.chains.values()}
    counted = [
        total.own
        if total.counted is total.own
        else {p: s for p, s in total.counted.items() if p in tops}
        for total in sums
    ]
    found = stragglers.find(lanes.lanes, own, counted)
    killed = incidents.killed_phases(lanes)
    shifts = lanes_of.shifts_of(start, prepared.skew)
    extras = incidents.extras(start, shifts, lanes, killed)
    phases = phase_totals.phase_stats(lanes, sums, extras, found.within_noise)
    observed = {phase.name for phase in phases}
    for names, _, _, points in {columns_of(source.spans).form for source in start.sources}:
        observed.update(compress(names, points))
    columns = [p.name for p in phases if p.parent is None and (p.p50_s or p.wait_p50_s or p.killed)]
    nodes = phase_totals.node_summaries(lanes, sums, prepared.skew, Counter(k.node for k in killed))
    heat_map = phase_totals.heat_map(lanes, sums, columns)
    gpu_hours = phase_totals.gpu_hours(lanes, sums)
    seen = incidents.incidents(start, shifts, lanes.zero_ns)
    shown = images.images(start)
    barriers, critical_path, what_if = held()
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
        stragglers=found.stragglers,
        gpu_hours=gpu_hours,
        what_if=what_if,
        killed=killed,
        incidents=seen,
        unreached=incidents.unreached_ranks(lanes),
        images=shown,
        notes=notes.find_notes(start, shifts, lanes.zero_ns),
    )
