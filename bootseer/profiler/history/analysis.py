"""Computes the history's report from the records of many starts (pure)."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from bootseer.profiler.history import slow_nodes
from bootseer.profiler.history.model import (
    GPU_CLASSES,
    KINDS,
    ClassPhase,
    ClassRow,
    GpuTime,
    HistoryReport,
    JobRow,
    Kind,
    KindRow,
    Problem,
    Spread,
    StartRecord,
)

NANO = 1e9


def analyse(records: Sequence[StartRecord], problems: Sequence[Problem] = ()) -> HistoryReport:
    """Return the history's report; `problems` become part of it."""
    ordered = sorted(records, key=lambda r: (r.begin_unix_nano, r.trace_id))
    jobs: dict[str, list[StartRecord]] = defaultdict(list)
    for record in ordered:
        jobs[record.job].append(record)
    kinds = classify_starts(ordered)
    slow, tested = slow_nodes.find(ordered)
    return HistoryReport(
        jobs=len(jobs),
        starts=len(ordered),
        unfinished=sum(r.start_s is None for r in ordered),
        from_unix_nano=ordered[0].begin_unix_nano if ordered else None,
        to_unix_nano=ordered[-1].begin_unix_nano if ordered else None,
        gpu_time=_sum_gpu_time(ordered, jobs),
        kinds=tuple(_build_kind_row(kind, ordered, kinds) for kind in KINDS),
        classes=tuple(_build_class_row(name, rows) for name, rows in _group_by_class(ordered)),
        job_rows=_build_job_rows(jobs, kinds),
        starts_per_job=compute_spread(len(starts) for starts in jobs.values()),
        nodes_tested=tested,
        slow_nodes=slow,
        problems=tuple(problems),
    )


def compute_spread(values: Iterable[float]) -> Spread | None:
    """Return order statistics, None without values; p90 by linear interpolation between ranks."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = 0.9 * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    p90 = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
    return Spread(len(ordered), ordered[0], statistics.median(ordered), p90, ordered[-1])


def classify_starts(ordered: Sequence[StartRecord]) -> dict[str, Kind]:
    """Return each trace's kind of start: as declared, or else by the same job's earlier starts.

    "first" is what processes declare that know no attempt number, so it is believed of a job's
    earliest start only. Without a declaration, a job's earliest start is the first unless its
    attempt number is above 0 (earlier ones are then unknown), and a later one is a restart in
    place when it runs in exactly the places (pods, else containers, else node + boot) of the job's
    previous start, else a restart.
    """
    previous: dict[str, StartRecord] = {}
    kinds: dict[str, Kind] = {}
    for record in ordered:
        before = previous.get(record.job)
        previous[record.job] = record
        if record.declared_kind and (record.declared_kind != "first" or before is None):
            kinds[record.trace_id] = record.declared_kind
        elif before is None:
            kinds[record.trace_id] = "restart" if record.attempt else "first"
        elif record.places and set(record.places) == set(before.places):
            kinds[record.trace_id] = "restart_in_place"
        else:
            kinds[record.trace_id] = "restart"
    return kinds


def _sum_gpu_time(
    ordered: Sequence[StartRecord], jobs: Mapping[str, Sequence[StartRecord]]
) -> GpuTime:
    starting = total = 0.0
    counted = 0
    for record in ordered:
        held_s = compute_held_job_s(record)
        if held_s is None or record.held_start_s is None or not record.gpu_count:
            continue
        counted += 1
        starting += record.gpu_count * record.held_start_s
        total += record.gpu_count * held_s
    return GpuTime(
        starts=counted,
        left_out=len(ordered) - counted,
        starting_gpu_s=starting if counted else None,
        total_gpu_s=total if counted else None,
        share=starting / total if total > 0 else None,
        effective_ratio=_compute_overall_ratio(jobs),
    )


def _compute_overall_ratio(jobs: Mapping[str, Sequence[StartRecord]]) -> float | None:
    """Return the effective training time ratio over all jobs, weighted by their GPUs.

    By wall time alone where no job's GPU count is known.
    """
    any_gpus_known = any(_get_gpu_count(records) for records in jobs.values())
    training_s = wall_s = 0.0
    for records in jobs.values():
        ratio, job_wall_s = compute_effective_ratio(records)
        weight = (_get_gpu_count(records) or 0) if any_gpus_known else 1
        if ratio is not None and job_wall_s is not None:
            training_s += weight * ratio * job_wall_s
            wall_s += weight * job_wall_s
    return training_s / wall_s if wall_s > 0 else None


def compute_held_job_s(record: StartRecord) -> float | None:
    """Return the seconds from the moment GPUs were held to the job's end."""
    if record.job_s is None:
        return None
    return record.job_s - (record.held_unix_nano - record.begin_unix_nano) / NANO


def compute_effective_ratio(records: Sequence[StartRecord]) -> tuple[float | None, float | None]:
    """Return a job's effective training time ratio, and its wall time in seconds.

    Ratio = time after the first step, over all starts / time from the first start's first event
    to the end of the last one. Starts whose job end was not observed make both None, except
    that a start which never reached its first step trained for 0 s.
    """
    if not records or any(r.job_s is None for r in records):
        return None, None
    begin = min(r.begin_unix_nano for r in records)
    end = max(r.begin_unix_nano + (r.job_s or 0.0) * NANO for r in records)
    wall_s = (end - begin) / NANO
    training_s = sum(
        (r.job_s or 0.0) - r.start_s if r.start_s is not None else 0.0 for r in records
    )
    return (max(0.0, training_s) / wall_s if wall_s > 0 else None), wall_s


def _get_gpu_count(records: Sequence[StartRecord]) -> int | None:
    return max((r.gpu_count for r in records if r.gpu_count), default=None)


def _sum_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _compute_start_gpu_s(record: StartRecord) -> float | None:
    if record.held_start_s is None or not record.gpu_count:
        return None
    return record.gpu_count * record.held_start_s


def _build_kind_row(
    kind: Kind, ordered: Sequence[StartRecord], kinds: Mapping[str, Kind]
) -> KindRow:
    records = [r for r in ordered if kinds[r.trace_id] == kind]
    return KindRow(
        kind=kind,
        starts=len(records),
        start_s=compute_spread(r.start_s for r in records if r.start_s is not None),
        cumulated_s=_sum_known(r.start_s for r in records),
        cumulated_gpu_s=_sum_known(_compute_start_gpu_s(r) for r in records),
    )


def _build_job_rows(
    jobs: Mapping[str, Sequence[StartRecord]], kinds: Mapping[str, Kind]
) -> tuple[JobRow, ...]:
    """Return one row per job, the one that lost most time first."""
    rows = []
    for job, records in jobs.items():
        kind_counts = Counter(kinds[r.trace_id] for r in records)
        ratio, wall_s = compute_effective_ratio(records)
        row = JobRow(
            job=job,
            starts=len(records),
            first=kind_counts["first"] + kind_counts["standby"],
            restart=kind_counts["restart"],
            restart_in_place=kind_counts["restart_in_place"],
            gpu_count=_get_gpu_count(records),
            cumulated_s=_sum_known(r.start_s for r in records),
            cumulated_gpu_s=_sum_known(_compute_start_gpu_s(r) for r in records),
            wall_s=wall_s,
            effective_ratio=ratio,
        )
        rows.append(row)
    rows.sort(key=lambda row: (-(row.cumulated_gpu_s or 0), -(row.cumulated_s or 0), row.job))
    return tuple(rows)


def get_gpu_class(gpu_count: int) -> str:
    """Return the name of the class of a GPU count (at least 1)."""
    return next(name for bound, name in GPU_CLASSES if gpu_count <= bound)


def _group_by_class(ordered: Sequence[StartRecord]) -> list[tuple[str, list[StartRecord]]]:
    classes: dict[str, list[StartRecord]] = {name: [] for _, name in GPU_CLASSES}
    for record in ordered:
        if record.gpu_count:
            classes[get_gpu_class(record.gpu_count)].append(record)
    return list(classes.items())


def _build_class_row(name: str, records: Sequence[StartRecord]) -> ClassRow:
    node_times = [sorted(node.own_s for node in r.nodes) for r in records if r.nodes]
    return ClassRow(
        name=name,
        starts=len(records),
        start_s=compute_spread(r.start_s for r in records if r.start_s is not None),
        max_over_median=compute_spread(_compute_max_over_median(node_times)),
        node_s=compute_spread(statistics.median(times) for times in node_times),
        slowest_node_s=compute_spread(times[-1] for times in node_times),
        node_share=compute_spread(
            statistics.median(node.own_s for node in r.nodes) / r.start_s
            for r in records
            if r.nodes and r.start_s
        ),
        phases=_build_class_phases(records),
    )


def _compute_max_over_median(node_times: Iterable[Sequence[float]]) -> list[float]:
    """Return slowest / median node of each start that has at least two nodes to compare."""
    ratios = []
    for times in node_times:
        median = statistics.median(times)
        if len(times) >= 2 and median > 0:
            ratios.append(max(times) / median)
    return ratios


def _build_class_phases(records: Sequence[StartRecord]) -> tuple[ClassPhase, ...]:
    """Return the phases by the median node's own work, longest first."""
    node_times_by_phase: dict[str, list[list[float]]] = defaultdict(list)
    for record in records:
        start_times: dict[str, list[float]] = defaultdict(list)
        for node_phase in record.node_phases:
            start_times[node_phase.phase].append(node_phase.own_s)
        for phase, times in start_times.items():
            node_times_by_phase[phase].append(times)
    rows = []
    for phase, node_times in node_times_by_phase.items():
        node_s = compute_spread(statistics.median(times) for times in node_times)
        assert node_s is not None
        max_over_median = compute_spread(_compute_max_over_median(node_times))
        rows.append(ClassPhase(phase, len(node_times), node_s, max_over_median))
    rows.sort(key=lambda row: (-row.node_s.median, row.phase))
    return tuple(rows)
