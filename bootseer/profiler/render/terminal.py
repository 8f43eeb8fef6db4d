"""The report for people at a terminal: compact, readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bootseer.profiler.render import overlap_picture, summary_sentences
from bootseer.profiler.render import wording as words
from bootseer.profiler.report.before_after import Comparison, Side
from bootseer.profiler.report.model import (
    Incident,
    Note,
    PhaseStats,
    Report,
    StartSummary,
)

WIDE_COLUMNS = 100
MAX_ROWS = 10
MAX_NAME = 24

_ASCII = str.maketrans({"→": ">", "█": "#", "░": "=", "·": ".", "▏": "|"})


def render(report: Report, console: Console) -> None:
    """Print the report; what is empty is left out, what was not observed is named."""
    page = Page(console)
    _print_verdict(report, page)
    _print_comparison(report.comparison, page)
    _print_phases(report, page)
    print_overlap(report, page)
    _print_images(report, page)
    _print_critical_path(report, page)
    _print_heat_map(report, page)
    _print_stragglers(report, page)
    _print_gpu_hours(report, page)
    _print_what_if(report, page)
    _print_incidents(report, page)
    _print_starts(report.starts, page)
    _print_problems(report, page)


Justify = Literal["left", "right"]


class Page:
    """Writes sections; keeps text harmless and within the terminal's character set."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_wide = console.width >= WIDE_COLUMNS
        self.encoding = console.encoding or "ascii"
        self.has_unicode = self.encoding.lower().startswith("utf")

    def text(self, value: str, style: str = "") -> Text:
        clean = words.printable(value)
        if not self.has_unicode:
            clean = clean.translate(_ASCII)
            clean = clean.encode(self.encoding, "backslashreplace").decode(self.encoding)
        return Text(clean, style=style)

    def line(self, value: str, style: str = "") -> None:
        self.console.print(self.text(value, style), highlight=False)

    def heading(self, value: str) -> None:
        self.console.print()
        self.line(value, "bold")

    def note(self, value: str) -> None:
        self.console.print(Padding(self.text(value), (0, 0, 0, 2), expand=False), highlight=False)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
        """Print a table whose first `left` columns are text and whose others are figures."""
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for number, name in enumerate(columns):
            justify: Justify = "left" if number < left else "right"
            table.add_column(
                self.text(name),
                justify=justify,
                no_wrap=number >= left,
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(self.text(cell) for cell in row))
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def rest(self, shown: int, total: int, what: str) -> None:
        """Say how many entries a list left out, if any; `what` names them in the plural."""
        if total > shown:
            self.note(f"and {total - shown:,} more {what} (--json has all)")


def _shorten(name: str, limit: int = MAX_NAME) -> str:
    """Leave out a long name's middle: names mostly differ in their beginnings and ends."""
    if len(name) <= limit:
        return name
    head = (limit - 2) // 2
    return f"{name[:head]}..{name[len(name) - (limit - 2 - head) :]}"


def _print_verdict(report: Report, page: Page) -> None:
    verdict = summary_sentences.verdict(report)
    page.line(verdict.headline, "bold")
    if verdict.path:
        page.line(verdict.path)
    for number, advice in enumerate(verdict.advice):
        page.line(f"{'Fix first' if number == 0 else 'Then'}: {advice}", "bold")
    start = report.start
    job = start.job_uid or start.trace_id
    attempt = f", attempt {start.attempt}" if start.attempt is not None else ""
    began = words.utc_time(start.began_unix_s)
    page.line(f"job {job}{attempt}, {words.kind_word(start)}, {began}", "dim")
    if report.emulated:
        page.line(f"Emulated: {'; '.join(report.emulated)}", "bold")


def _print_phases(report: Report, page: Page) -> None:
    is_alone = all(phase.processes <= 1 for phase in report.phases)
    measured = [phase for phase in report.phases if phase.has_figures]
    if measured:
        title = "own work" if is_alone else "own work over processes"
        page.heading(f"Phases: {title}, waiting beside it")
        spread = ["own work"] if is_alone else ["p50", "p90", "p99", "max", "max/med"]
        columns = ["phase", *spread, "waiting" if is_alone else "wait p50"]
        if page.is_wide:
            columns += ["bytes"] if is_alone else ["nodes", "processes", "bytes"]
        page.table(columns, [_phase_row(phase, is_alone, page.is_wide) for phase in measured])
    if report.not_observed:
        page.note(f"not observed: {', '.join(report.not_observed)}")


def _phase_row(phase: PhaseStats, is_alone: bool, is_wide: bool) -> list[str]:
    """One phase's cells; where no phase has more than one process, quantiles would say nothing."""
    row = ["  " + _shorten(phase.name, MAX_NAME - 2) if phase.parent else _shorten(phase.name)]
    figures = (phase.p50_s, phase.p90_s, phase.p99_s, phase.max_s)
    row += [words.seconds(figure) for figure in (figures[:1] if is_alone else figures)]
    row += [] if is_alone else [words.ratio(phase.max_over_median)]
    row += [words.seconds(phase.wait_p50_s)]
    if is_wide:
        row += [] if is_alone else [f"{phase.nodes:,}", f"{phase.processes:,}"]
        row += [words.size(phase.bytes)]
    return row


def print_overlap(report: Report, page: Page) -> None:
    """Print when each phase ran, where some ran at once."""
    bars = overlap_picture.draw_bars(report, 60 if page.is_wide else 36)
    if not bars:
        return
    page.heading("At once: when each phase ran")
    rows = [
        (
            _shorten(bar.phase),
            f"▏{bar.drawn}▏",
            words.seconds(bar.begin_s),
            words.seconds(bar.end_s),
        )
        for bar in bars
    ]
    page.table(("phase", "when", "from", "to"), rows, left=2)


def _print_critical_path(report: Report, page: Page) -> None:
    pieces = summary_sentences.path_pieces(report)
    if not pieces:
        return
    page.heading("Critical path (█ own work, ░ waiting, · not described)")
    whole_s = pieces[-1].end_s or 1.0
    bar = 36 if page.is_wide else 20
    shown = [p for p in pieces if p.share >= words.NEGLIGIBLE_SHARE / 10] or list(pieces)
    kept = sorted(
        sorted(shown, key=lambda p: -p.duration_s)[: 2 * MAX_ROWS], key=lambda p: p.begin_s
    )
    rows = []
    for piece in kept:
        begin = min(int(piece.begin_s / whole_s * bar), bar - 1)
        end = max(begin + 1, min(bar, round(piece.end_s / whole_s * bar)))
        mark = "·" if piece.gap else "░" if piece.wait else "█"
        drawn = " " * begin + mark * (end - begin) + " " * (bar - end)
        node = _shorten(piece.nodes[0], 22 if not page.is_wide else 44)
        if len(piece.nodes) > 1:
            node += f" +{len(piece.nodes) - 1}"
        figures = (words.seconds(piece.duration_s), words.percent(piece.share))
        rows.append((_shorten(piece.phase), f"▏{drawn}▏", node, *figures))
    page.table(("phase", "when", "on", "time", "share"), rows, left=3)
    if len(pieces) > len(kept):
        page.note(f"{words.count(len(pieces) - len(kept), 'short piece')} left out")
    for barrier in sorted(report.barriers, key=lambda b: -b.held_s)[:3]:
        rank = f" rank {barrier.last_rank}" if barrier.last_rank is not None else ""
        by = f" by {barrier.held_by_phase}" if barrier.held_by_phase else ""
        page.note(
            f"{barrier.name} opened at {words.seconds(barrier.exit_s)}: "
            f"{barrier.last_node}{rank} came last, held{by} "
            f"{words.seconds(barrier.held_s)} after the median"
        )


def _print_heat_map(report: Report, page: Page) -> None:
    """Print the nodes and phases with the greatest excess over the phase's median, as factors."""
    heat = report.heat_map
    if len(heat.nodes) < 2:
        return
    medians = words.column_medians(heat.own_s, len(heat.phases))
    excess = [
        [
            max(0.0, v - (m or 0.0)) if v is not None else 0.0
            for v, m in zip(row, medians, strict=True)
        ]
        for row in heat.own_s
    ]
    nodes = sorted(range(len(heat.nodes)), key=lambda i: -sum(excess[i]))[: MAX_ROWS // 2]
    if not any(sum(excess[i]) >= report.start.duration_s * words.NEGLIGIBLE_SHARE for i in nodes):
        return
    room = max(1, (page.console.width - MAX_NAME - 2) // 17)
    worst = sorted(range(len(heat.phases)), key=lambda j: -max(row[j] for row in excess))[:room]
    phases = sorted(worst)
    page.heading("Slowest nodes: own work by phase, as a factor of the phase's median")
    rows = []
    for i in nodes:
        cells = []
        for j in phases:
            own, median = heat.own_s[i][j], medians[j]
            factor = own / median if own is not None and median else None
            shade = words.shade(own, median, report.start.duration_s)
            cells.append(words.ratio(factor) + " !" * (shade >= 3))
        rows.append((_shorten(heat.nodes[i]), *cells))
    page.table(("node", *(_shorten(heat.phases[j], 15) for j in phases)), rows)


def _print_stragglers(report: Report, page: Page) -> None:
    ordered = sorted(report.stragglers, key=lambda s: -s.excess_s)
    within_noise = sum(phase.within_noise for phase in report.phases)
    if ordered:
        page.heading(f"Stragglers ({len(ordered):,})")
        rows = []
        for each in ordered[:MAX_ROWS]:
            ranks = words.ranks(each.ranks) or "all"
            figures = (words.seconds(each.own_s), words.seconds(each.median_s))
            rows.append((each.node, ranks, each.phase, *figures, words.ratio(each.ratio)))
        page.table(("node", "ranks", "phase", "own", "median", "factor"), rows, left=3)
        page.rest(MAX_ROWS, len(ordered), "stragglers")
    elif report.start.nodes > 1 or within_noise:
        page.heading("Stragglers: none")
    if within_noise:
        times = words.count(within_noise, "time")
        page.note(f"not named, as within its phase's own spread: {times} a slow process")
    skew = report.skew
    if skew.reference is not None:
        unknown = (
            f"; {words.count(skew.unknown_nodes, 'node')} could not be compared"
            if skew.unknown_nodes
            else ""
        )
        page.note(
            f"clocks: skew up to {words.seconds(skew.max_abs_s)} corrected at "
            f"{words.count(skew.barriers, 'barrier exit')}, "
            f"within {words.seconds(skew.max_uncertainty_s)}{unknown}"
        )
    elif skew.unknown_nodes > 1:
        page.note(words.RAW_CLOCKS)


def _print_gpu_hours(report: Report, page: Page) -> None:
    hours = report.gpu_hours
    if hours.total <= 0:
        return
    assumed = " (one GPU a rank assumed where none was named)" if hours.gpus_assumed else ""
    page.heading(f"GPU-hours held before the first step: {words.gpu_hours(hours.total)}{assumed}")
    parts = (
        ("own work", hours.own),
        ("waiting for others", hours.waiting),
        ("not described", hours.unobserved),
    )
    page.note(
        ", ".join(
            f"{name} {words.gpu_hours(value)} ({words.percent(value / hours.total)})"
            for name, value in parts
        )
    )


def _print_what_if(report: Report, page: Page) -> None:
    ordered = [w for w in sorted(report.what_if, key=lambda w: -w.saved_s) if w.saved_s > 0]
    if not ordered:
        return
    page.heading("What if")
    kept = ordered[: MAX_ROWS // 2]
    # A phase or node can usually be brought to its median; removals must not crowd that out.
    kept += [w for w in ordered if w.change == "median" and w not in kept][: MAX_ROWS // 2]
    page.table(
        ("change", "start", "saved"),
        [
            (summary_sentences.what_if_words(w), words.seconds(w.start_s), words.seconds(w.saved_s))
            for w in kept
        ],
    )


def _print_comparison(comparison: Comparison | None, page: Page) -> None:
    if comparison is None:
        return
    page.heading("Before and after")
    page.note(comparison.statement)
    if comparison.claim and comparison.low is not None and comparison.high is not None:
        p = "" if comparison.p_value is None else f", p = {comparison.p_value:.3g}"
        page.note(
            f"speed-up {words.ratio(comparison.speedup)} "
            f"({words.ratio(comparison.low)} to {words.ratio(comparison.high)} "
            f"at {comparison.confidence * 100:.0f} % confidence{p})"
        )
    speedups = {each.phase: each.speedup for each in comparison.phase_speedups}
    names = list(dict.fromkeys([*comparison.baseline.phases, *comparison.candidate.phases]))
    whole = (*_side_cells(comparison.baseline), *_side_cells(comparison.candidate))
    rows: list[tuple[str, ...]] = [("whole start", *whole, words.ratio(comparison.speedup))]
    for name in names:
        before, after = comparison.baseline.phases.get(name), comparison.candidate.phases.get(name)
        cells: tuple[str, ...] = ()
        for spread in (before, after):
            cells += (
                (words.seconds(spread.median), _range(spread.min, spread.max))
                if spread
                else ("-", "")
            )
        rows.append((_shorten(name), *cells, words.ratio(speedups.get(name))))
    page.table(("", "before", "range", "after", "range", "factor"), rows)
    if comparison.phase_speedups and comparison.speedup is not None:
        page.note(words.PHASE_FACTORS)


def _side_cells(side: Side) -> tuple[str, str]:
    return words.seconds(side.median), _range(side.min, side.max)


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{words.seconds(low)}-{words.seconds(high)}"


def _print_images(report: Report, page: Page) -> None:
    if not report.images:
        return
    page.heading("Images")
    columns = ["image", "node", "hot set", "ready", "replayed", "missed reads", "blocked"]
    if page.is_wide:
        columns += ["on demand", "filled"]
    rows = []
    for use in report.images[:MAX_ROWS]:
        row = [_shorten(words.image_name(use)), _shorten(use.node), *words.image_cells(use)]
        rows.append(row[: len(columns)])
    page.table(columns, rows, left=3)
    page.rest(MAX_ROWS, len(report.images), "images")


def _print_incidents(report: Report, page: Page) -> None:
    fallbacks = [i for i in report.incidents if i.status == "fallback"]
    errors = [i for i in report.incidents if i.status == "error"]
    for title, incidents in (("Fallbacks", fallbacks), ("Errors", errors)):
        if incidents:
            page.heading(title)
            for incident in incidents[:MAX_ROWS]:
                reason = incident.reason or "no reason given"
                page.note(_occurrence_line(incident.phase, reason, incident))
            page.rest(MAX_ROWS, len(incidents), title.lower())
    if report.notes:
        page.heading("Notes")
        for note in report.notes[:MAX_ROWS]:
            page.note(_occurrence_line(note.phase, note.text, note))
        page.rest(MAX_ROWS, len(report.notes), "notes")
    killed = words.killed_groups(report)
    if killed:
        page.heading(f"Began and never ended ({len(report.killed):,})")
        for each in killed[:MAX_ROWS]:
            number = "rank" if len(each.ranks) == 1 else "ranks"
            ranks = f" {number} {words.ranks(each.ranks)}" if each.ranks else ""
            page.note(f"{each.phase} on {each.node}{ranks}, from {words.seconds(each.began_s)} on")
        page.rest(MAX_ROWS, len(killed), "nodes and phases")
    if report.unreached:
        page.heading(f"Ranks without a first step ({len(report.unreached):,})")
        for rank in report.unreached[:MAX_ROWS]:
            page.note(f"rank {rank.rank} on {rank.node}: {words.last_seen(rank)}")
        page.rest(MAX_ROWS, len(report.unreached), "ranks")
    if report.parts:
        page.heading("Parts")
        for name, part in report.parts.items():
            reason = f" ({part.reason})" if part.reason else ""
            page.note(f"{name}: {'used' if part.used else 'not used'}{reason}")


def _occurrence_line(phase: str, text: str, seen: Incident | Note) -> str:
    nodes = ", ".join(seen.nodes[:3])
    more = ", ..." if seen.count > 3 and len(seen.nodes) > 3 else ""
    times = f" {seen.count:,} times" if seen.count > 1 else ""
    return f"{phase}: {text}{times}, on {nodes}{more}"


def _print_starts(starts: Sequence[StartSummary], page: Page) -> None:
    if len(starts) < 2:
        return
    page.heading(f"Starts ({len(starts):,}, newest first)")
    rows = []
    for start in starts[:MAX_ROWS]:
        why = words.missing_steps(start)
        took = words.seconds(start.duration_s) + (f" ({why})" if why else "")
        row = (start.trace_id[:8], words.kind_word(start), words.utc_time(start.began_unix_s))
        rows.append((*row, f"{start.nodes:,}", took))
    page.table(("trace", "kind", "began", "nodes", "time"), rows, left=3)
    page.rest(MAX_ROWS, len(starts), "starts")


def _print_problems(report: Report, page: Page) -> None:
    if not report.problems:
        return
    page.heading(f"Problems in the input ({len(report.problems):,})")
    groups = words.problem_groups(report)
    for group in groups[:MAX_ROWS]:
        page.note(f"{group.kind}: {group.detail}; in {words.first_files(group.files)}")
    page.rest(MAX_ROWS, len(groups), "kinds")
