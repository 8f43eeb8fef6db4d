"""The history's report for people at a terminal."""

from __future__ import annotations

from rich.console import Console

from bootseer.profiler.history.model import ClassRow, HistoryReport, Spread
from bootseer.profiler.render import wording as words
from bootseer.profiler.render.terminal import MAX_ROWS, Page

NOT_OBSERVED = "not observed"


def render(report: HistoryReport, console: Console) -> None:
    """Print the report; figures that could not be known read "not observed"."""
    page = Page(console)
    if not report.starts:
        page.line("The history is empty; add starts with: bootseer history add PATH", "bold")
        _problems(report, page)
        return
    _verdict(report, page)
    _kinds(report, page)
    _classes(report, page)
    _jobs(report, page)
    _slow_nodes(report, page)
    _problems(report, page)


def _verdict(report: HistoryReport, page: Page) -> None:
    starts, jobs = words.count(report.starts, "start"), words.count(report.jobs, "job")
    since = ""
    if report.from_unix_nano is not None and report.to_unix_nano is not None:
        days = [words.when(t / 1e9)[:10] for t in (report.from_unix_nano, report.to_unix_nano)]
        since = f", {days[0]}" + (f" to {days[1]}" if days[0] != days[1] else "")
    page.line(f"{starts} of {jobs}{since}.", "bold")
    gpu = report.gpu_time
    if gpu.share is None:
        page.line(f"Share of GPU time spent starting: {NOT_OBSERVED}.", "bold")
    else:
        held = (gpu.starting_gpu_s or 0.0) / 3600, (gpu.total_gpu_s or 0.0) / 3600
        page.line(
            f"Share of GPU time spent starting: {words.percent(gpu.share)} "
            f"({words.gpu_hours(held[0])} of {words.gpu_hours(held[1])} GPU-hours).",
            "bold",
        )
    effective = gpu.effective_ratio
    shown = NOT_OBSERVED if effective is None else words.percent(effective)
    page.line(f"Effective training time ratio: {shown}.", "bold")
    if gpu.left_out:
        page.line(
            f"{words.count(gpu.left_out, 'start')} left out of the GPU time: first step, job end "
            "or GPU count not observed.",
            "dim",
        )
    if report.unfinished:
        page.line(f"{words.count(report.unfinished, 'start')} never reached a first step.", "dim")


def _median(spread: Spread | None) -> str:
    return words.seconds(spread.median) if spread else "-"


def _hours(gpu_s: float | None) -> str:
    return words.gpu_hours(None if gpu_s is None else gpu_s / 3600)


def _kinds(report: HistoryReport, page: Page) -> None:
    page.heading("Kinds of start")
    rows = []
    for row in report.kinds:
        spread = row.start_s
        rows.append(
            (
                words.KIND_WORDS[row.kind],
                f"{row.starts:,}",
                _median(spread),
                words.seconds(spread.p90) if spread else "-",
                words.seconds(spread.max) if spread else "-",
                words.seconds(row.cumulated_s),
                words.gpu_hours(
                    None if row.cumulated_gpu_s is None else row.cumulated_gpu_s / 3600
                ),
            )
        )
    page.table(("kind", "starts", "median", "p90", "max", "cumulated", "GPU-hours"), rows)
    per_job = report.starts_per_job
    if per_job:
        page.note(
            f"starts per job: median {per_job.median:g}, p90 {per_job.p90:.3g}, max {per_job.max:g}"
        )


def _classes(report: HistoryReport, page: Page) -> None:
    known = [row for row in report.classes if row.starts]
    if not known:
        page.heading(f"By number of GPUs: GPU counts {NOT_OBSERVED}")
        return
    page.heading("By number of GPUs: the job's start, and its nodes' own work in it")
    rows = [
        (
            row.name,
            f"{row.starts:,}",
            _median(row.start_s),
            words.seconds(row.start_s.max) if row.start_s else "-",
            _median(row.node_s),
            _median(row.slowest_node_s),
            words.ratio(row.max_over_median.median) if row.max_over_median else "-",
            words.percent(row.node_share.median) if row.node_share else "-",
        )
        for row in known
    ]
    columns = ("GPUs", "starts", "job p50", "job max", "node p50", "slowest", "max/med", "node/job")
    page.table(columns, rows)
    for row in known:
        page.note(_worst_phases(row))


def _worst_phases(row: ClassRow) -> str:
    shown = [
        f"{p.phase} {words.seconds(p.node_s.median)}"
        + (f" ({words.ratio(p.max_over_median.median)})" if p.max_over_median else "")
        for p in row.phases[:3]
    ]
    return f"{row.name} GPUs, longest phases (max/median): {', '.join(shown) or NOT_OBSERVED}"


def _jobs(report: HistoryReport, page: Page) -> None:
    page.heading("Jobs that spent most on starting")
    rows = [
        (
            row.job,
            f"{row.starts:,}",
            f"{row.first}/{row.restart}/{row.restart_in_place}",
            "-" if row.gpu_count is None else f"{row.gpu_count:,}",
            words.seconds(row.cumulated_s),
            _hours(row.cumulated_gpu_s),
            words.percent(row.effective_ratio),
        )
        for row in report.job_rows[:MAX_ROWS]
    ]
    columns = ("job", "starts", "f/r/in place", "GPUs", "starting", "GPU-hours", "effective")
    page.table(columns, rows)
    page.rest(MAX_ROWS, len(report.job_rows), "jobs")


def _slow_nodes(report: HistoryReport, page: Page) -> None:
    tested = words.count(report.nodes_tested, "node")
    if not report.slow_nodes:
        page.heading(f"Nodes slow again and again: none named ({tested} with 5 starts or more)")
        return
    page.heading(f"Nodes slow again and again (of {tested} with 5 starts or more)")
    rows = [
        (
            row.node,
            row.phase or "-",
            f"{row.slow} of {row.starts}",
            f"{row.expected:.1f}",
            words.seconds(row.excess_s),
            words.ratio(row.ratio),
            f"{row.p:.1g}",
        )
        for row in report.slow_nodes[: 2 * MAX_ROWS]
    ]
    columns = ("node", "mostly in", "slow in", "by chance", "above", "factor", "p")
    page.table(columns, rows, left=2)
    page.rest(2 * MAX_ROWS, len(report.slow_nodes), "nodes")


def _problems(report: HistoryReport, page: Page) -> None:
    if not report.problems:
        return
    page.heading(f"Files left out ({len(report.problems):,})")
    for problem in report.problems[:MAX_ROWS]:
        page.note(f"{problem.path}: {problem.reason}")
    page.rest(MAX_ROWS, len(report.problems), "files")
