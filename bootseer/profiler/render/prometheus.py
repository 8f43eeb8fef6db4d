"""A report in Prometheus' text exposition format, for node_exporter's textfile collector (pure).

All metrics are gauges of one start. Unknown figures are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bootseer.exposition import Sample, format_metric
from bootseer.profiler.report.model import Report


def render(report: Report) -> str:
    """The metrics of one start; every sample carries the job's uid and kind of start."""
    start = report.start
    base = {"job_uid": start.job_uid or "", "kind": start.kind}
    metrics = [
        _metric("start_duration_seconds", "First event to last first step", base, _whole(report)),
        _metric("start_time_seconds", "Unix time of the first event", base, _began(report)),
        _metric(
            "start_complete",
            "1 if every rank reached its first step",
            base,
            [({}, start.complete)],
        ),
        _metric("start_nodes", "Nodes seen", base, [({}, start.nodes)]),
        _metric("start_ranks", "Ranks seen", base, [({}, start.ranks)]),
        _metric("phase_own_seconds", "Own work per process", base, _quantiles(report)),
        _metric("phase_killed", "Begins without an end", base, _counts(report, "killed")),
        _metric("phase_errors", "Phases ended in error", base, _counts(report, "errors")),
        _metric("phase_fallbacks", "Fall-backs", base, _counts(report, "fallbacks")),
        _metric("phase_bytes", "Bytes moved", base, _counts(report, "bytes")),
        _metric("start_gpu_hours", "GPU-hours held before the first step", base, _gpu(report)),
        _metric("stragglers", "Stragglers by phase", base, _stragglers(report)),
        _metric("clock_skew_max_seconds", "Largest skew found", base, _skew(report)),
        _metric("input_problems", "Faults of the event files", base, _problems(report)),
    ]
    return "".join(metrics)


def _metric(name: str, help_text: str, base: Mapping[str, str], samples: Iterable[Sample]) -> str:
    return format_metric(name, help_text, (({**base, **mine}, value) for mine, value in samples))


def _whole(report: Report) -> list[Sample]:
    return [({}, report.start.duration_s)] if report.start.complete else []


def _began(report: Report) -> list[Sample]:
    return [({}, report.start.began_unix_s)]


def _quantiles(report: Report) -> list[Sample]:
    return [
        ({"phase": phase.name, "quantile": label}, value)
        for phase in report.phases
        for label, value in (
            ("0.5", phase.p50_s),
            ("0.9", phase.p90_s),
            ("0.99", phase.p99_s),
            ("1", phase.max_s),
        )
    ]


def _counts(report: Report, field: str) -> list[Sample]:
    return [({"phase": phase.name}, getattr(phase, field)) for phase in report.phases]


def _gpu(report: Report) -> list[Sample]:
    hours = report.gpu_hours
    parts = {"own": hours.own, "waiting": hours.waiting, "unobserved": hours.unobserved}
    return [({"part": part}, value) for part, value in parts.items()]


def _stragglers(report: Report) -> list[Sample]:
    count = {phase.name: 0 for phase in report.phases if phase.parent is None}
    for straggler in report.stragglers:
        count[straggler.phase] = count.get(straggler.phase, 0) + 1
    return [({"phase": phase}, value) for phase, value in count.items()]


def _skew(report: Report) -> list[Sample]:
    return [({}, report.skew.max_abs_s)] if report.skew.reference is not None else []


def _problems(report: Report) -> list[Sample]:
    count: dict[str, int] = {}
    for problem in report.problems:
        count[problem.kind] = count.get(problem.kind, 0) + problem.count
    return [({"problem": kind}, value) for kind, value in count.items()]
