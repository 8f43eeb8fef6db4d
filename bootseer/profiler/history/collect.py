"""Condenses one start's events into the record that the history keeps (pure)."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from bootseer.profiler.history.model import KINDS, Kind, NodePhase, NodeTime, StartRecord
from bootseer.profiler.report.lanes import Lanes, build_lanes, shifts_of
from bootseer.profiler.report.load.clock_skew import Skew, estimate_skew
from bootseer.profiler.report.load.spans import Identity, Span, Start
from bootseer.profiler.report.model import JOB
from bootseer.profiler.report.phase_totals import NOT_HELD, sum_lanes
from bootseer.profiler.report.tries import keep_last_tries

_T = TypeVar("_T")

_TRAINING_S = 1.0
"""Events that trail the last first step by less than this still belong to the start."""


def record_of(start: Start) -> StartRecord:
    """Return the record of one start.

    A node's own work in a phase is the median over its processes, as in the report's heat map.
    The job's end is the end of its `job` span; where there is none, the last event, if that
    came later than the last first step; else it was not observed.
    """
    event_count = sum(source.events for source in start.sources)
    start = keep_last_tries(start).start
    skew = estimate_skew(start)
    lanes = build_lanes(start, skew)
    identities = [source.identity for source in start.sources]
    job_uid = _get_first_known(identity.job_uid for identity in identities)
    held_from_s = _find_held_from_s(start, skew, lanes)
    node_phases = _compute_node_phases(lanes)
    own_s: dict[str, float] = {lane.node: 0.0 for lane in lanes.lanes}
    for node_phase in node_phases:
        own_s[node_phase.node] += node_phase.own_s
    start_s = lanes.end_s if lanes.complete else None
    gpus = [number for number in lanes.gpus if number is not None]
    return StartRecord(
        trace_id=start.trace_id,
        job=job_uid or start.trace_id,
        attempt=_get_first_known(identity.attempt for identity in identities),
        declared_kind=_choose_declared_kind(identities),
        places=tuple(sorted({_get_place(identity) for identity in identities} - {""})),
        begin_unix_nano=lanes.zero_ns,
        held_unix_nano=lanes.zero_ns + round(held_from_s * 1e9),
        start_s=start_s,
        held_start_s=None if start_s is None else max(0.0, start_s - held_from_s),
        job_s=_find_job_s(start, skew, lanes),
        gpu_count=sum(gpus) or None,
        rank_count=sum(lane.rank is not None for lane in lanes.lanes),
        event_count=event_count,
        nodes=tuple(NodeTime(node, own_s[node]) for node in sorted(own_s)),
        node_phases=node_phases,
    )


def _get_first_known(values: Iterable[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)


def _get_place(identity: Identity) -> str:
    if identity.place:
        return identity.place
    return f"{identity.node}:{identity.boot_id}" if identity.boot_id else ""


def _choose_declared_kind(identities: list[Identity]) -> Kind | None:
    """Return the kind that most processes declare."""
    declared: Counter[Kind] = Counter(k for i in identities for k in KINDS if i.kind == k)
    return declared.most_common(1)[0][0] if declared else None


def _is_before_gpus(name: str) -> bool:
    """Whether no GPU is held yet in the phase; such a phase is no node's own work either."""
    return name.split(".", 1)[0] in NOT_HELD


def _shift_spans(start: Start, skew: Skew, zero_ns: int) -> Iterator[tuple[Span, int]]:
    """Yield each span, and what to add to its times to get nanoseconds after `zero_ns`."""
    for source, shift_ns in zip(start.sources, shifts_of(start, skew), strict=True):
        for span in source.spans:
            yield span, shift_ns - zero_ns


def _find_held_from_s(start: Start, skew: Skew, lanes: Lanes) -> float:
    """Return the seconds from the first event to the first one after queueing."""
    times_ns = [
        time_ns + shift_ns
        for span, shift_ns in _shift_spans(start, skew, lanes.zero_ns)
        if not _is_before_gpus(span.name)
        for time_ns in (span.begin_ns, span.end_ns)
        if time_ns is not None
    ]
    return max(0, min(times_ns, default=0)) / 1e9


def _find_job_s(start: Start, skew: Skew, lanes: Lanes) -> float | None:
    """Return the seconds from the first event to the job's end; None if it was not observed."""
    job_ends_ns: list[int] = []
    last_ns = 0
    for span, shift_ns in _shift_spans(start, skew, lanes.zero_ns):
        for time_ns in (span.begin_ns, span.end_ns):
            if time_ns is not None:
                last_ns = max(last_ns, time_ns + shift_ns)
        if span.name == JOB and not span.point and span.end_ns is not None:
            job_ends_ns.append(span.end_ns + shift_ns)
    if job_ends_ns:
        # A short `job` span of one process does not end a start that continued elsewhere.
        return max(max(job_ends_ns) / 1e9, lanes.end_s)
    last_s = last_ns / 1e9
    if not lanes.complete:
        return last_s
    return last_s if last_s > lanes.end_s + _TRAINING_S else None


def _compute_node_phases(lanes: Lanes) -> tuple[NodePhase, ...]:
    own_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for lane, totals in zip(lanes.lanes, sum_lanes(lanes), strict=True):
        for phase, seconds in totals.own.items():
            if phase != JOB and not _is_before_gpus(phase):
                own_s[lane.node, phase].append(seconds)
    return tuple(
        NodePhase(node, phase, statistics.median(values))
        for (node, phase), values in sorted(own_s.items())
    )
