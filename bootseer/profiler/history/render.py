"""Prints the history's report to a terminal."""

from __future__ import annotations

from rich.console import Console

from bootseer.profiler.history.model import ClassRow, HistoryReport, Spread
from bootseer.profiler.render import wording as words
from bootseer.profiler.render.terminal import MAX_ROWS, Page

NOT_OBSERVED = "not observed"


def render(report: HistoryReport, console: Console) -> None:
    """Print the report; figures that were not observed are shown as "not observed"."""
    page = Page(console)
    if not report.starts:
        page.line("The history is empty; add starts with: bootseer history add PATH", "bold")
        _print_problems(report, page)
        return
    _print_verdict(report, page)
    _print_kinds(report, page)
    _print_classes(report, page)
    _print_jobs(report, page)
    _print_slow_nodes(report, page)
    _print_problems(report, page)


def _print_verdict(report: HistoryReport, page: Page) -> None:
    starts, jobs = words.count(report.starts, "start"), words.count(report.jobs, "job")
    period = ""
    if report.from_unix_nano is not None and report.to_unix_nano is not None:
        days = [words.utc_time(t / 1e9)[:10] for t in (report.from_unix_nano, report.to_unix_nano)]
        period = f", {days[0]}" + (f" to {days[1]}" if days[0] != days[1] else "")
    page.line(f"{starts} of {jobs}{period}.", "bold")
    gpu = report.gpu_time
    if gpu.share is None:
        page.line(f"Share of GPU time spent starting: {NOT_OBSERVED}.", "bold")
    else:
        starting_hours = _format_gpu_hours(gpu.starting_gpu_s or 0.0)
        total_hours = _format_gpu_hours(gpu.total_gpu_s or 0.0)
        page.line(
            f"Share of GPU time spent starting: {words.percent(gpu.share)} "
            f"({starting_hours} of {total_hours} GPU-hours).",
            "bold",
        )
    ratio = gpu.effective_ratio
    ratio_text = NOT_OBSERVED if ratio is None else words.percent(ratio)
    page.line(f"Effective training time ratio: {ratio_text}.", "bold")
    if gpu.left_out:
        page.line(
            f"{words.count(gpu.left_out, 'start')} left out of the GPU time: first step, job end "
            "or GPU count not observed.",
            "dim",
        )
    if report.unfinished:
        page.line(f"{words.count(report.unfinished, 'start')} never reached a first step.", "dim")


def _format_median(spread: Spread | None) -> str:
    return words.seconds(spread.median) if spread else "-"


def _format_gpu_hours(gpu_s: float | None) -> str:
    return words.gpu_hours(None if gpu_s is None else gpu_s / 3600)


def _print_kinds(report: HistoryReport, page: Page) -> None:
    page.heading("Kinds of start")
    rows = []
    for row in report.kinds:
        spread = row.start_s
        rows.append(
            (
                words.KIND_WORDS[row.kind],
                f"{row.starts:,}",
                _format_median(spread),
                words.seconds(spread.p90) if spread else "-",
                words.seconds(spread.max) if spread else "-",
                words.seconds(row.cumulated_s),
                _format_gpu_hours(row.cumulated_gpu_s),
            )
        )
    page.table(("kind", "starts", "median", "p90", "max", "cumulated", "GPU-hours"), rows)
    per_job = report.starts_per_job
    if per_job:
        page.note(
            f"starts per job: median {per_job.median:g}, p90 {per_job.p90:.3g}, max {per_job.max:g}"
        )


def _print_classes(report: HistoryReport, page: Page) -> None:
    classes = [row for row in report.classes if row.starts]
    if not classes:
        page.heading(f"By number of GPUs: GPU counts {NOT_OBSERVED}")
        return
    page.heading("By number of GPUs: the job's start, and its nodes' own work in it")
    rows = [
        (
            row.name,
            f"{row.starts:,}",
            _format_median(row.start_s),
            words.seconds(row.start_s.max) if row.start_s else "-",
            _format_median(row.node_s),
            _format_median(row.slowest_node_s),
            words.ratio(row.max_over_median.median) if row.max_over_median else "-",
            words.percent(row.node_share.median) if row.node_share else "-",
        )
        for row in classes
    ]
    columns = ("GPUs", "starts", "job p50", "job max", "node p50", "slowest", "max/med", "node/job")
    page.table(columns, rows)
    for row in classes:
        page.note(_describe_longest_phases(row))


def _describe_longest_phases(row: ClassRow) -> str:
    phases = [
        f"{p.phase} {words.seconds(p.node_s.median)}"
        + (f" ({words.ratio(p.max_over_median.median)})" if p.max_over_median else "")
        for p in row.phases[:3]
    ]
    return f"{row.name} GPUs, longest phases (max/median): {', '.join(phases) or NOT_OBSERVED}"


def _print_jobs(report: HistoryReport, page: Page) -> None:
    page.heading("Jobs that spent most on starting")
    rows = [
        (
            row.job,
            f"{row.starts:,}",
            f"{row.first}/{row.restart}/{row.restart_in_place}",
            "-" if row.gpu_count is None else f"{row.gpu_count:,}",
            words.seconds(row.cumulated_s),
            _format_gpu_hours(row.cumulated_gpu_s),
            words.percent(row.effective_ratio),
        )
        for row in report.job_rows[:MAX_ROWS]
    ]
    columns = ("job", "starts", "f/r/in place", "GPUs", "starting", "GPU-hours", "effective")
    page.table(columns, rows)
    page.rest(MAX_ROWS, len(report.job_rows), "jobs")


def _print_slow_nodes(report: HistoryReport, page: Page) -> None:
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


def _print_problems(report: HistoryReport, page: Page) -> None:
    if not report.problems:
        return
    page.heading(f"Files left out ({len(report.problems):,})")
    for problem in report.problems[:MAX_ROWS]:
        page.note(f"{problem.path}: {problem.reason}")
    page.rest(MAX_ROWS, len(report.problems), "files")
