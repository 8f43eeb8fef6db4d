"""Sections of the HTML report about what a start cost and what would help (pure)."""

from __future__ import annotations

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
    rest,
    table,
    tag,
)
from bootseer.profiler.report.model import Report, Straggler

STRAGGLER_MARK = "at least 1.5 times its phase's median and at least 2 s above it"


def stragglers(report: Report) -> Markup | Nothing:
    """Which nodes and ranks were slow, in which phase."""
    within_noise = sum(phase.within_noise for phase in report.phases)
    noise = ""
    if within_noise:
        noise = (
            f"{words.count(within_noise, 'time')} a process passed this mark by no more than its "
            "phase's own spread explains; these are not named."
        )
    if not report.stragglers:
        return Nothing(f"None: nobody's own work was {STRAGGLER_MARK}. {noise}".rstrip())
    rule = tag(
        "p", f"A straggler's own work, waiting excluded, is {STRAGGLER_MARK}.", class_="hint"
    )
    ordered = sorted(report.stragglers, key=lambda s: -s.excess_s)
    longest_s = max(s.own_s for s in ordered)
    rows = [_straggler_row(s, longest_s) for s in ordered[:MAX_ROWS]]
    columns = (
        ("Node", ""), ("Ranks", ""), ("Phase", ""), ("Own work, line = median", "g"),
        ("Own", "n"), ("Median", "n"), ("Factor", "n"), ("Above", "n"),
    )  # fmt: skip
    return join(
        (
            rule,
            tag("p", noise, class_="hint") if noise else None,
            table("Stragglers, the costliest first", columns, rows),
            rest(len(ordered)),
        )
    )


def _straggler_row(s: Straggler, longest_s: float) -> tuple[Child, ...]:
    median = pct(s.median_s / longest_s)
    return (
        s.node,
        words.ranks(s.ranks) or "all",
        s.phase,
        drawing(
            bar(0, s.own_s / longest_s, "own", y=5, height=12),
            tag("line", x1=median, x2=median, y1=1, y2=21, class_="median"),
        ),
        words.seconds(s.own_s),
        words.seconds(s.median_s),
        words.ratio(s.ratio),
        words.seconds(s.excess_s),
    )


def gpu_hours(report: Report) -> Markup | Nothing:
    """What the start cost, and how much of it was waiting."""
    hours = report.gpu_hours
    if hours.total <= 0:
        return Nothing("No GPU time was observed.")
    parts = (("own", "own work", hours.own), ("wait", "waiting for others", hours.waiting),
             ("gap", words.GAP, hours.unobserved))  # fmt: skip
    at, drawn = 0.0, []
    for kind, _, value in parts:
        drawn.append(bar(at, at + value / hours.total, kind, y=0, height=24))
        at += value / hours.total
    listed = ", ".join(
        f"{name} {words.gpu_hours(value)} ({words.percent(value / hours.total)})"
        for _, name, value in parts
    )
    assumed = " One GPU a rank was assumed where none was named." if hours.gpus_assumed else ""
    most = max((p.own + p.waiting for p in hours.phases), default=0.0) or 1.0
    rows = [
        (
            p.phase or words.GAP,
            drawing(
                bar(0, p.own / most, "own" if p.phase else "gap", y=5, height=12),
                bar(p.own / most, (p.own + p.waiting) / most, "wait", y=5, height=12)
                if p.waiting
                else None,
            ),
            words.gpu_hours(p.own),
            words.gpu_hours(p.waiting),
        )
        for p in hours.phases
    ]
    columns = (("Phase", ""), ("Share", "g"), ("Own", "n"), ("Waiting", "n"))
    return join(
        (
            tag("p", tag("strong", words.gpu_hours(hours.total)), " GPU-hours on ",
                words.count(hours.gpus, "GPU"), " before the first step: ", listed, ".", assumed),
            drawing(drawn, height=24, class_="stack"),
            legend(),
            table("GPU-hours by phase", columns, rows) if rows else None,
        )
    )  # fmt: skip


def what_if(report: Report) -> Markup | Nothing:
    """What single changes would have saved, computed through the barriers."""
    ordered = [w for w in sorted(report.what_if, key=lambda w: -w.saved_s) if w.saved_s > 0]
    if not ordered:
        return Nothing("No single change would have shortened this start.")
    kept = [w for w in ordered if w.kind == "phase"][: MAX_ROWS // 2]
    kept += [w for w in ordered if w.kind == "node"][:10]
    kept.sort(key=lambda w: -w.saved_s)
    whole_s = report.start.duration_s or ordered[0].saved_s
    rows = [
        (
            summary_sentences.what_if_words(w),
            drawing(
                bar(0, w.start_s / whole_s, "own", y=5, height=12),
                bar(w.start_s / whole_s, 1, "saved", y=5, height=12),
            ),
            words.seconds(w.start_s),
            words.seconds(w.saved_s),
            words.percent(w.saved_s / whole_s),
        )
        for w in kept
    ]
    columns = (
        ("Change", ""), ("Start, outline = saved", "g"), ("Start", "n"), ("Saved", "n"),
        ("Share", "n"),
    )  # fmt: skip
    left = len(ordered) - len(kept)
    return join(
        (
            table("The start with one thing changed, greatest gain first", columns, rows),
            tag("p", f"{left:,} smaller ones are in the JSON report.", class_="hint")
            if left
            else None,
        )
    )
