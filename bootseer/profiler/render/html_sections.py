"""The sections of the HTML report, one function each: report in, markup out (pure)."""

from __future__ import annotations

import re

from bootseer.profiler.render import summary_sentences
from bootseer.profiler.render import wording as words
from bootseer.profiler.render.html_build import (
    MAX_ROWS,
    Child,
    Markup,
    Nothing,
    bar,
    drawing,
    join,
    legend,
    pct,
    screen_reader_text,
    table,
    tag,
)
from bootseer.profiler.report.model import PhaseStats, Report


def header(report: Report) -> Markup:
    """The page's banner: which start this is."""
    start = report.start
    return tag(
        "header",
        tag("p", "bootseer", class_="brand"),
        tag("p", "start report", class_="kind"),
        tag("p", words.utc_time(start.began_unix_s), class_="when"),
    )


def verdict(report: Report) -> Markup:
    """The answer first: how long, along which path, what to fix."""
    start = report.start
    summary = summary_sentences.verdict(report)
    title = "to the first step" if start.complete else f"observed, {words.missing_steps(start)}"
    advice = [
        tag("li", tag("strong", "Fix first: " if number == 0 else "Then: "), _join_units(line))
        for number, line in enumerate(summary.advice)
    ]
    emulated = "; ".join(report.emulated)
    return tag(
        "section",
        tag(
            "h1",
            tag("span", words.long_seconds(start.duration_s), class_="figure"),
            " ",
            tag("span", title, class_="unit"),
            id="verdict-title",
        ),
        tag("p", _lead(report), class_="lead"),
        tag("p", tag("strong", "Emulated: "), emulated, class_="flag") if emulated else None,
        _ribbon(report),
        tag("p", summary.path, class_="path") if summary.path else None,
        tag("ul", advice, class_="advice") if advice else None,
        _facts(report),
        id="verdict",
        aria_labelledby="verdict-title",
    )


def _join_units(sentence: str) -> str:
    """Keep figures and their units on one line, by no-break spaces."""
    return re.sub(r"(?<=\d) (?=(?:ms|s|min|h)\b)", "\u00a0", sentence)


def _lead(report: Report) -> str:
    hours = report.gpu_hours
    lead = f"On {words.scale(report.start)}."
    if hours.total > 0:
        share = words.percent(hours.waiting / hours.total)
        lead += (
            f" {words.gpu_hours(hours.total)} GPU-hours were held before the first step, "
            f"{share} of them waiting for others."
        )
    return lead


def _facts(report: Report) -> Markup:
    start = report.start
    facts = [
        ("Job", start.job_uid or "not named"),
        ("Kind", words.kind_word(start)),
        ("Attempt", "-" if start.attempt is None else str(start.attempt)),
        ("Nodes", f"{start.nodes:,}"),
        ("Ranks", f"{start.ranks:,}" if start.ranks else "-"),
        ("GPUs", "-" if start.gpus is None else f"{start.gpus:,}"),
        ("Events", f"{start.events:,}"),
        ("Trace", start.trace_id),
    ]
    for name, part in report.parts.items():
        reason = f" ({part.reason})" if part.reason else ""
        facts.append((f"Part {name}", ("used" if part.used else "not used") + reason))
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts],
        class_="facts",
    )


def _ribbon(report: Report) -> Markup | None:
    """The critical path as one strip; the timeline's table says the same in figures."""
    pieces = summary_sentences.path_pieces(report)
    whole_s = pieces[-1].end_s if pieces else 0.0
    if whole_s <= 0:
        return None
    drawn: list[Child] = []
    for piece in pieces:
        begin, end = piece.begin_s / whole_s, piece.end_s / whole_s
        kind = "gap" if piece.gap else "wait" if piece.wait else "own"
        drawn.append(bar(begin, end, kind, y=0, height=30))
        # A line in the background's colour separates neighbours that look the same.
        drawn.append(tag("rect", x=pct(end), y=0, width=1, height=30, class_="cut"))
        if end - begin >= 0.1 and kind == "own":
            label = tag("text", piece.phase, x=8, y=20)
            drawn.append(tag("svg", label, x=pct(begin), y=0, width=pct(end - begin), height=30))
    return tag("div", drawing(drawn, height=30, class_="ribbon"), legend(), class_="strip")


def timeline(report: Report) -> Markup | Nothing:
    """Phases over time: their extent over all nodes, and the critical path within them."""
    pieces = summary_sentences.path_pieces(report)
    whole_s = max(
        report.start.duration_s,
        pieces[-1].end_s if pieces else 0.0,
        max((p.last_end_s for p in report.phases), default=0.0),
    )
    if whole_s <= 0 or not (pieces or report.phases):
        return Nothing("Nothing with a duration was observed.")
    extents = {p.name: p for p in report.phases if p.parent is None}
    on_path = list(dict.fromkeys(p.phase for p in pieces))
    names = sorted({*extents, *on_path}, key=lambda n: _order_of_row(n, extents, pieces))
    lines = [
        tag("line", x1=pct(b.exit_s / whole_s), x2=pct(b.exit_s / whole_s), y1=0, y2="100%",
            class_="barrier")
        for b in report.barriers
    ]  # fmt: skip
    rows = [_timeline_row(name, extents.get(name), pieces, whole_s, lines) for name in names]
    axis: list[Child] = [
        tag("text", words.seconds(t), x=pct(t / whole_s), y=15,
            text_anchor="start" if t == 0 else "end" if t > whole_s * 0.94 else "middle")
        for t in words.ticks(whole_s)
    ]  # fmt: skip
    columns = (("Phase", ""), ("When", "g"), ("Own", "n"), ("Waiting", "n"), ("On node", "wide"))
    heads: list[Child] = [tag("th", "Phase", scope="col")]
    axis_head = (screen_reader_text("When"), drawing(axis, class_="axis"))
    heads.append(tag("th", *axis_head, scope="col", class_="g"))
    heads += [tag("th", t, scope="col", class_=c) for t, c in columns[2:]]
    return join(
        (
            tag(
                "p",
                "Pale: from the first node's begin to the last node's end (hatched: waiting only). "
                "Strong: the critical path; its own work and waiting are in the columns. ",
                "Dashed lines: barriers." if report.barriers else "",
                class_="hint",
            ),
            table("Critical path by phase", columns, rows, class_="gantt", header=heads),
            _barriers(report),
        )
    )


def _order_of_row(
    name: str, extents: dict[str, PhaseStats], pieces: tuple[summary_sentences.PathPiece, ...]
) -> tuple[float, str]:
    """The sort key of a phase's row: by its first begin, time that is not described last."""
    if name == words.GAP:
        return float("inf"), name
    begins = [p.begin_s for p in pieces if p.phase == name]
    if name in extents:
        begins.append(extents[name].first_begin_s)
    return min(begins), name


def _timeline_row(
    name: str,
    extent: PhaseStats | None,
    pieces: tuple[summary_sentences.PathPiece, ...],
    whole_s: float,
    lines: list[Markup],
) -> tuple[Child, ...]:
    mine = [p for p in pieces if p.phase == name]
    drawn: list[Child] = []
    if extent is not None:
        waiting = extent.p50_s is None and extent.wait_p50_s is not None
        kind = "wait-span" if waiting else "span"
        drawn.append(bar(extent.first_begin_s / whole_s, extent.last_end_s / whole_s, kind, y=5))
    for p in mine:
        kind = "gap" if p.gap else "wait" if p.wait else "own"
        drawn.append(bar(p.begin_s / whole_s, p.end_s / whole_s, kind, y=5))
    own = sum(p.duration_s for p in mine if not p.wait)
    wait = sum(p.duration_s for p in mine if p.wait)
    nodes = list(dict.fromkeys(node for p in mine for node in p.nodes))
    where = nodes[0] + (f" +{len(nodes) - 1}" if len(nodes) > 1 else "") if nodes else "-"
    return (
        name,
        drawing(drawn, lines),
        words.seconds(own) if own else "-",
        words.seconds(wait) if wait else "-",
        where,
    )


def _barriers(report: Report) -> Markup | None:
    if not report.barriers:
        return None
    ordered = sorted(report.barriers, key=lambda b: -b.held_s)[:MAX_ROWS]
    rows = [
        (
            b.name if b.index == 0 else f"{b.name} #{b.index + 1}",
            words.seconds(b.exit_s),
            b.last_node + ("" if b.last_rank is None else f" rank {b.last_rank}"),
            b.held_by_phase or "-",
            words.seconds(b.held_s),
            words.seconds(b.waited_s),
        )
        for b in ordered
    ]
    columns = (
        ("Barrier", ""), ("Opened at", "n"), ("Last to arrive", ""), ("Held by", ""),
        ("After the median", "n"), ("All waiting", "n"),
    )  # fmt: skip
    return table("Barriers, the costliest first", columns, rows)


def phases(report: Report) -> Markup | Nothing:
    """The table of order statistics."""
    measured = [phase for phase in report.phases if phase.has_figures]
    if not measured:
        return Nothing("No phase was observed.")
    longest_s = max((p.max_s or 0.0 for p in measured), default=0.0) or 1.0
    rows = [_phase_row(p, longest_s) for p in measured]
    columns = (
        ("Phase", ""), ("Median to slowest", "g"), ("p50", "n"), ("p90", "n"), ("p99", "n"),
        ("Max", "n"), ("Max/median", "n"), ("Waiting p50", "n"), ("Waiting max", "n"),
        ("Nodes", "n"), ("Bytes", "n"), ("Notes", "keep"),
    )  # fmt: skip
    # A column without any figure is left out.
    kept = [j for j in range(len(columns)) if any(row[j] != "-" for row in rows)]
    return table(
        "Own work by phase, over processes",
        [columns[j] for j in kept],
        [[row[j] for j in kept] for row in rows],
        class_="phases",
    )


def _phase_row(phase: PhaseStats, longest_s: float) -> tuple[Child, ...]:
    drawn: list[Child] = []
    if phase.p50_s is not None and phase.max_s is not None:
        drawn.append(bar(0, phase.p50_s / longest_s, "own", y=5, height=12))
        if phase.max_s > phase.p50_s:
            x = pct(phase.max_s / longest_s)
            drawn.append(tag("line", x1=pct(phase.p50_s / longest_s), x2=x, y1=11, y2=11,
                             class_="whisker"))  # fmt: skip
            for value in (phase.p90_s, phase.p99_s, phase.max_s):
                at = pct((value or 0.0) / longest_s)
                drawn.append(tag("line", x1=at, x2=at, y1=7, y2=15, class_="whisker"))
    notes = [
        words.count(number, one, many)
        for number, one, many in (
            (phase.killed, "killed", "killed"),
            (phase.errors, "error", None),
            (phase.fallbacks, "fallback", None),
        )
        if number
    ]
    name: Child = phase.name
    if phase.parent:
        own_name = phase.name.removeprefix(phase.parent + ".")
        name = tag("span", screen_reader_text(f"{phase.parent}, "), own_name, class_="sub")
    return (
        name,
        drawing(drawn),
        words.seconds(phase.p50_s),
        words.seconds(phase.p90_s),
        words.seconds(phase.p99_s),
        words.seconds(phase.max_s),
        words.ratio(phase.max_over_median),
        words.seconds(phase.wait_p50_s),
        words.seconds(phase.wait_max_s),
        f"{phase.nodes:,}",
        words.size(phase.bytes),
        ", ".join(notes) or "-",
    )
