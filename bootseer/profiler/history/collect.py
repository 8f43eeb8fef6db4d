"""From one start's events to the record that the history keeps (pure)."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeVar

from bootseer.profiler.history.model import KINDS, Kind, NodePhase, NodeTime, StartRecord
from bootseer.profiler.report import lanes as lanes_
from bootseer.profiler.report import phase_totals as totals_
from bootseer.profiler.report.load import clock_skew as skew_
from bootseer.profiler.report.load.spans import Identity, Start
from bootseer.profiler.report.overlap import WHOLE
from bootseer.profiler.report.tries import last_tries

_T = TypeVar("_T")

NO_GPU_PHASES = ("queue", "schedule")
"""Phases before any GPU is held; they are no node's own work either."""

_TRAINING_S = 1.0
"""Events that trail the last first step by less than this still belong to the start."""


def record_of(start: Start) -> StartRecord:
    """Condense one start.

    A node's own work in a phase is the median over its processes, as in the report's heat map.
    The job's end is the end of its `job` span; where there is none, the last event, if that
    came later than the last first step; else it was not observed.
    """
    event_count = sum(source.events for source in start.sources)
    start = last_tries(start).start
    skew = skew_.estimate(start)
    cut = lanes_.build(start, skew)
    identities = [source.identity for source in start.sources]
    job_uid = _first(i.job_uid for i in identities)
    held_s = _held_from(start, skew, cut)
    node_phases = _node_phases(cut)
    own_s: dict[str, float] = {lane.node: 0.0 for lane in cut.lanes}
    for each in node_phases:
        own_s[each.node] += each.own_s
    start_s = cut.end_s if cut.complete else None
    gpus = [number for number in cut.gpus if number is not None]
    return StartRecord(
        trace_id=start.trace_id,
        job=job_uid or start.trace_id,
        attempt=_first(i.attempt for i in identities),
        declared_kind=_kind(identities),
        places=tuple(sorted({_place(i) for i in identities} - {""})),
        begin_unix_nano=cut.zero_ns,
        held_unix_nano=cut.zero_ns + round(held_s * 1e9),
        start_s=start_s,
        held_start_s=None if start_s is None else max(0.0, start_s - held_s),
        job_s=_job_s(start, skew, cut),
        gpu_count=sum(gpus) or None,
        rank_count=sum(lane.rank is not None for lane in cut.lanes),
        event_count=event_count,
        nodes=tuple(NodeTime(node, own_s[node]) for node in sorted(own_s)),
        node_phases=node_phases,
    )


def _first(values: Iterable[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)


def _place(identity: Identity) -> str:
    if identity.place:
        return identity.place
    return f"{identity.node}:{identity.boot_id}" if identity.boot_id else ""


def _kind(identities: list[Identity]) -> Kind | None:
    """The kind most processes declare."""
    declared: Counter[Kind] = Counter(k for i in identities for k in KINDS if i.kind == k)
    return declared.most_common(1)[0][0] if declared else None


def _is_free(name: str | None) -> bool:
    return name is not None and name.split(".", 1)[0] in NO_GPU_PHASES


def _held_from(start: Start, skew: skew_.Skew, cut: lanes_.Lanes) -> float:
    """Seconds from the first event to the first one that is no queueing."""
    moments = [
        moment + shift - cut.zero_ns
        for source, shift in zip(start.sources, lanes_.shifts_of(start, skew), strict=True)
        for span in source.spans
        if not _is_free(span.name)
        for moment in (span.begin_ns, span.end_ns)
        if moment is not None
    ]
    return max(0, min(moments, default=0)) / 1e9


def _job_s(start: Start, skew: skew_.Skew, cut: lanes_.Lanes) -> float | None:
    ends: list[int] = []
    last = 0
    for source, shift in zip(start.sources, lanes_.shifts_of(start, skew), strict=True):
        for span in source.spans:
            for moment in (span.begin_ns, span.end_ns):
                if moment is not None:
                    last = max(last, moment + shift - cut.zero_ns)
            if span.name == WHOLE and not span.point and span.end_ns is not None:
                ends.append(span.end_ns + shift - cut.zero_ns)
    if ends:
        # A short `job` span of one process does not end a start that went on elsewhere.
        return max(max(ends) / 1e9, cut.end_s)
    if not cut.complete:
        return last / 1e9
    return last / 1e9 if last / 1e9 > cut.end_s + _TRAINING_S else None


def _node_phases(cut: lanes_.Lanes) -> tuple[NodePhase, ...]:
    own: dict[tuple[str, str], list[float]] = defaultdict(list)
    for lane, total in zip(cut.lanes, totals_.of_lanes(cut), strict=True):
        for phase, seconds in total.own.items():
            if phase != WHOLE and not _is_free(phase):
                own[lane.node, phase].append(seconds)
    return tuple(
        NodePhase(node, phase, statistics.median(values))
        for (node, phase), values in sorted(own.items())
    )
