"""From the records of many starts to the history's report (pure)."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from bootseer.profiler.history import slow_nodes as history_slow
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
    """Everything the history's report says; `problems` are passed through."""
    ordered = sorted(records, key=lambda r: (r.begin_unix_nano, r.trace_id))
    jobs: dict[str, list[StartRecord]] = defaultdict(list)
    for record in ordered:
        jobs[record.job].append(record)
    kinds = kinds_of(ordered)
    slow, tested = history_slow.find(ordered)
    return HistoryReport(
        jobs=len(jobs),
        starts=len(ordered),
        unfinished=sum(r.start_s is None for r in ordered),
        from_unix_nano=ordered[0].begin_unix_nano if ordered else None,
        to_unix_nano=ordered[-1].begin_unix_nano if ordered else None,
        gpu_time=_gpu_time(ordered, jobs),
        kinds=tuple(_kind_row(kind, ordered, kinds) for kind in KINDS),
        classes=tuple(_class_row(name, rows) for name, rows in _by_class(ordered)),
        job_rows=_job_rows(jobs, kinds),
        starts_per_job=spread(len(each) for each in jobs.values()),
        nodes_tested=tested,
        slow_nodes=slow,
        problems=tuple(problems),
    )


def spread(values: Iterable[float]) -> Spread | None:
    """Order statistics, or None of nothing; p90 by linear interpolation between ranks."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = 0.9 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    p90 = ordered[low] + (ordered[high] - ordered[low]) * (at - low)
    return Spread(len(ordered), ordered[0], statistics.median(ordered), p90, ordered[-1])


def kinds_of(ordered: Sequence[StartRecord]) -> dict[str, Kind]:
    """Each trace's kind of start: as declared, else from what the same job did before.

    "first" is what processes declare that know of no attempt number, so it is believed of a
    job's earliest start only. Without a declaration, a job's earliest start is the first unless
    its attempt number is above 0 (earlier ones are then unknown), and a later one is a restart
    in place when it runs in exactly the places (pods, else containers, else node + boot) of the
    job's start before it, else a restart.
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


def _gpu_time(ordered: Sequence[StartRecord], jobs: Mapping[str, Sequence[StartRecord]]) -> GpuTime:
    starting = total = 0.0
    counted = 0
    for record in ordered:
        held = held_job_s(record)
        if held is None or record.held_start_s is None or not record.gpu_count:
            continue
        counted += 1
        starting += record.gpu_count * record.held_start_s
        total += record.gpu_count * held
    return GpuTime(
        starts=counted,
        left_out=len(ordered) - counted,
        starting_gpu_s=starting if counted else None,
        total_gpu_s=total if counted else None,
        share=starting / total if total > 0 else None,
        effective_ratio=_overall_effective(jobs),
    )


def _overall_effective(jobs: Mapping[str, Sequence[StartRecord]]) -> float | None:
    """Over all jobs, weighted by GPUs; by wall time alone where no job names its GPUs."""
    named = any(_gpus(records) for records in jobs.values())
    training_s = wall_s = 0.0
    for records in jobs.values():
        ratio, job_wall_s = effective(records)
        weight = (_gpus(records) or 0) if named else 1
        if ratio is not None and job_wall_s is not None:
            training_s += weight * ratio * job_wall_s
            wall_s += weight * job_wall_s
    return training_s / wall_s if wall_s > 0 else None


def held_job_s(record: StartRecord) -> float | None:
    """Seconds from the moment GPUs were held to the job's end."""
    if record.job_s is None:
        return None
    return record.job_s - (record.held_unix_nano - record.begin_unix_nano) / NANO


def effective(records: Sequence[StartRecord]) -> tuple[float | None, float | None]:
    """A job's effective training time ratio, and its wall time in seconds.

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


def _gpus(records: Sequence[StartRecord]) -> int | None:
    return max((r.gpu_count for r in records if r.gpu_count), default=None)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _gpu_seconds(record: StartRecord) -> float | None:
    if record.held_start_s is None or not record.gpu_count:
        return None
    return record.gpu_count * record.held_start_s


def _kind_row(kind: Kind, ordered: Sequence[StartRecord], kinds: Mapping[str, Kind]) -> KindRow:
    records = [r for r in ordered if kinds[r.trace_id] == kind]
    return KindRow(
        kind=kind,
        starts=len(records),
        start_s=spread(r.start_s for r in records if r.start_s is not None),
        cumulated_s=_sum(r.start_s for r in records),
        cumulated_gpu_s=_sum(_gpu_seconds(r) for r in records),
    )


def _job_rows(
    jobs: Mapping[str, Sequence[StartRecord]], kinds: Mapping[str, Kind]
) -> tuple[JobRow, ...]:
    """One row a job, the one that lost most time first."""
    rows = []
    for job, records in jobs.items():
        count = Counter(kinds[r.trace_id] for r in records)
        ratio, wall_s = effective(records)
        row = JobRow(
            job=job,
            starts=len(records),
            first=count["first"],
            restart=count["restart"],
            restart_in_place=count["restart_in_place"],
            gpu_count=_gpus(records),
            cumulated_s=_sum(r.start_s for r in records),
            cumulated_gpu_s=_sum(_gpu_seconds(r) for r in records),
            wall_s=wall_s,
            effective_ratio=ratio,
        )
        rows.append(row)
    rows.sort(key=lambda row: (-(row.cumulated_gpu_s or 0), -(row.cumulated_s or 0), row.job))
    return tuple(rows)


def class_of(gpu_count: int) -> str:
    """The class of a GPU count (at least 1)."""
    return next(name for bound, name in GPU_CLASSES if gpu_count <= bound)


def _by_class(ordered: Sequence[StartRecord]) -> list[tuple[str, list[StartRecord]]]:
    classes: dict[str, list[StartRecord]] = {name: [] for _, name in GPU_CLASSES}
    for record in ordered:
        if record.gpu_count:
            classes[class_of(record.gpu_count)].append(record)
    return list(classes.items())


def _class_row(name: str, records: Sequence[StartRecord]) -> ClassRow:
    own = [sorted(n.own_s for n in r.nodes) for r in records if r.nodes]
    return ClassRow(
        name=name,
        starts=len(records),
        start_s=spread(r.start_s for r in records if r.start_s is not None),
        max_over_median=spread(_max_over_median(own)),
        node_s=spread(statistics.median(times) for times in own),
        slowest_node_s=spread(times[-1] for times in own),
        node_share=spread(
            statistics.median(n.own_s for n in r.nodes) / r.start_s
            for r in records
            if r.nodes and r.start_s
        ),
        phases=_class_phases(records),
    )


def _max_over_median(own: Iterable[Sequence[float]]) -> list[float]:
    """Per start, slowest / median node; only where there are at least two nodes to compare."""
    out = []
    for times in own:
        median = statistics.median(times)
        if len(times) >= 2 and median > 0:
            out.append(max(times) / median)
    return out


def _class_phases(records: Sequence[StartRecord]) -> tuple[ClassPhase, ...]:
    """Phases by the median node's own work, longest first."""
    by_phase: dict[str, list[list[float]]] = defaultdict(list)
    for record in records:
        times: dict[str, list[float]] = defaultdict(list)
        for each in record.node_phases:
            times[each.phase].append(each.own_s)
        for phase, values in times.items():
            by_phase[phase].append(values)
    rows = []
    for phase, own in by_phase.items():
        node_s = spread(statistics.median(values) for values in own)
        assert node_s is not None
        rows.append(ClassPhase(phase, len(own), node_s, spread(_max_over_median(own))))
    rows.sort(key=lambda row: (-row.node_s.median, row.phase))
    return tuple(rows)
