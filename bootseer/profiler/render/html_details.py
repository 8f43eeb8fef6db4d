"""Further sections of the HTML report: comparison, clocks, and what went wrong (pure)."""

from __future__ import annotations

from bootseer.profiler.render import wording as words
from bootseer.profiler.render.html_build import (
    MAX_ROWS,
    Child,
    Markup,
    Nothing,
    bar,
    drawing,
    join,
    pct,
    rest,
    table,
    tag,
)
from bootseer.profiler.report.before_after import Comparison, Side, Spread
from bootseer.profiler.report.model import NAMED_NODES, Incident, Note, Report


def comparison(report: Report) -> Markup | Nothing:
    """Before against after; without a claim where there are too few starts."""
    both = report.comparison
    if both is None:
        return Nothing(
            "No earlier starts were given to compare with: bootseer report --baseline PATH."
        )
    claim: Child = None
    if both.claim and both.speedup is not None:
        interval = ""
        if both.low is not None and both.high is not None:
            interval = (
                f" ({words.ratio(both.low)} to {words.ratio(both.high)} at "
                f"{both.confidence * 100:.0f}% confidence"
            )
            interval += f", p = {both.p_value:.3g})" if both.p_value is not None else ")"
        claim = tag("p", tag("strong", words.ratio(both.speedup), class_="figure"),
                    tag("span", f" as fast{interval}"), class_="speedup")  # fmt: skip
    return join((claim, tag("p", both.statement), _comparison_table(both)))


def _comparison_table(both: Comparison) -> Markup:
    speedups = {each.phase: each.speedup for each in both.phase_speedups}
    names = list(dict.fromkeys([*both.baseline.phases, *both.candidate.phases]))
    pairs: list[tuple[str, Spread | None, Spread | None, float | None]] = [
        ("Whole start", _whole_start(both.baseline), _whole_start(both.candidate), both.speedup)
    ]
    pairs += [
        (n, both.baseline.phases.get(n), both.candidate.phases.get(n), speedups.get(n))
        for n in names
    ]
    longest_s = max((s.max for _, a, b, _ in pairs for s in (a, b) if s), default=0.0) or 1.0
    rows = [
        (
            name,
            drawing(
                _spread_bar(before, longest_s, "before", 2),
                _spread_bar(after, longest_s, "after", 18),
                height=34,
            ),
            _spread_words(before),
            _spread_words(after),
            words.ratio(speedup),
        )
        for name, before, after, speedup in pairs
    ]
    columns = (
        ("What", ""), ("Outline = before, solid = after", "g"), ("Before", "n"), ("After", "n"),
        ("Factor", "n"),
    )  # fmt: skip
    caption = (
        f"Medians, least to greatest, of {words.count(both.baseline.starts, 'start')} before and "
        f"{words.count(both.candidate.starts, 'start')} after"
    )
    has_factors = both.phase_speedups and both.speedup is not None
    explanation = tag("p", words.PHASE_FACTORS) if has_factors else None
    return join((table(caption, columns, rows), explanation))


def _whole_start(side: Side) -> Spread | None:
    if side.median is None or side.min is None or side.max is None:
        return None
    return Spread(side.starts, side.median, side.min, side.max)


def _spread_bar(spread: Spread | None, longest_s: float, kind: str, y: int) -> Markup | None:
    if spread is None:
        return None
    middle = y + 7
    low, high = pct(spread.min / longest_s), pct(spread.max / longest_s)
    return join(
        (
            bar(0, spread.median / longest_s, kind, y=y, height=14),
            tag("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker"),
        )
    )


def _spread_words(spread: Spread | None) -> Child:
    if spread is None:
        return "-"
    low, high = words.seconds(spread.min), words.seconds(spread.max)
    return [words.seconds(spread.median), " ", tag("small", f"{low} to {high}")]


def clocks(report: Report) -> Markup | Nothing:
    """How far the nodes' clocks were apart, and how well that is known."""
    skew = report.skew
    if skew.reference is None:
        return Nothing("Not compared: one node, or no barrier to compare them by.")
    text = (
        f"Clocks were compared at {words.count(skew.barriers, 'barrier exit')}. The largest skew "
        f"against {skew.reference} was {words.seconds(skew.max_abs_s)}, known within "
        f"{words.seconds(skew.max_uncertainty_s)}; all times here are corrected."
    )
    if skew.unknown_nodes:
        text += (
            f" {words.count(skew.unknown_nodes, 'node')} could not be compared and kept "
            f"{'its' if skew.unknown_nodes == 1 else 'their'} own clock."
        )
    known = [n for n in report.nodes if n.skew_s is not None]
    known.sort(key=lambda n: -abs(n.skew_s or 0.0))
    rows = [
        (n.name, f"{(n.skew_s or 0.0) * 1000:+.1f} ms",
         "-" if n.skew_uncertainty_s is None else f"{n.skew_uncertainty_s * 1000:.1f} ms")
        for n in known[:10]
    ]  # fmt: skip
    columns = (("Node", ""), ("Ahead by", "n"), ("Within", "n"))
    listing = table("Largest skews", columns, rows, class_="narrow") if rows else None
    return join((tag("p", text), listing))


def not_observed(report: Report) -> Markup | Nothing:
    """Standard phases that were not observed: their length is unknown, not zero."""
    if not report.not_observed:
        return Nothing("Every standard phase was observed.")
    return join(
        (
            tag("p", "Nobody observed these phases. Their length is unknown, not zero.",
                class_="hint"),
            tag("ul", [tag("li", tag("code", name)) for name in report.not_observed],
                class_="chips"),
        )
    )  # fmt: skip


def _nodes(seen: Incident | Note) -> str:
    """The nodes that something was seen on; no more than these are kept of it."""
    more = ", ..." if len(seen.nodes) == NAMED_NODES and seen.count > NAMED_NODES else ""
    return ", ".join(seen.nodes) + more


def incidents(report: Report) -> Markup | Nothing:
    """Fall-backs with their reasons, errors, notes, and phases that began and never ended."""
    if not any((report.incidents, report.notes, report.killed, report.unreached)):
        return Nothing("None.")
    out: list[Child] = []
    ordered = sorted(report.incidents, key=lambda i: (i.status != "fallback", i.first_s))
    if ordered:
        rows = [
            (
                i.phase,
                tag("span", "Fallback" if i.status == "fallback" else "Error", class_=i.status),
                i.reason or "no reason given",
                f"{i.count:,}",
                words.seconds(i.first_s),
                _nodes(i),
            )
            for i in ordered[:MAX_ROWS]
        ]
        columns = (
            ("Phase", ""), ("What", ""), ("Reason", "w"), ("Times", "n"), ("First at", "n"),
            ("On", "w"),
        )  # fmt: skip
        out += [table("What fell back or failed, and why", columns, rows), rest(len(ordered))]
    if report.notes:
        noted = [
            (n.phase, n.text, f"{n.count:,}", words.seconds(n.first_s), _nodes(n))
            for n in report.notes[:MAX_ROWS]
        ]  # fmt: skip
        columns_noted = (
            ("Phase", ""), ("What", "w"), ("Times", "n"), ("First at", "n"), ("On", "w")
        )  # fmt: skip
        out.append(table("Notes, which are no faults", columns_noted, noted))
        out.append(rest(len(report.notes)))
    killed = words.killed_groups(report)
    if killed:
        rows_killed = [
            (
                k.node,
                words.ranks(k.ranks) or words.count(k.processes, "process", "processes"),
                k.phase,
                words.seconds(k.began_s),
                words.first_files((k.file,) * k.processes),
            )
            for k in killed[:MAX_ROWS]
        ]
        columns_killed = (
            ("Node", ""), ("Ranks", ""), ("Phase", ""), ("Began at", "n"), ("File", "w")
        )  # fmt: skip
        out.append(table("Began and never ended", columns_killed, rows_killed))
        out.append(rest(len(killed)))
    if report.unreached:
        rows_unreached = [
            (str(r.rank), r.node, words.last_seen(r)) for r in report.unreached[:MAX_ROWS]
        ]
        columns_unreached = (("Rank", "n"), ("Node", ""), ("Last seen", "w"))
        out.append(table("Ranks without a first step", columns_unreached, rows_unreached))
        out.append(rest(len(report.unreached)))
    return join(out)


def images(report: Report) -> Markup | Nothing:
    """What each image that was mounted lazily, or read ahead, cost."""
    if not report.images:
        return Nothing("No image was mounted or read ahead by bootseer.")
    rows = [
        (words.image_name(use), use.node, *words.image_cells(use))
        for use in report.images[:MAX_ROWS]
    ]
    columns = (
        ("Image", ""), ("Node", ""), ("Hot set", ""), ("Ready", "n"), ("Replayed", "n"),
        ("Missed reads", "n"), ("Blocked", "n"), ("On demand", "n"), ("Filled", "n"),
    )  # fmt: skip
    caption = "Images: until the tree was there, and what its programs waited for"
    return join((table(caption, columns, rows), rest(len(report.images), "images")))


def problems(report: Report) -> Markup | Nothing:
    """Faults of the input that were worked around."""
    if not report.problems:
        return Nothing("None.")
    groups = words.problem_groups(report)
    rows = [
        (
            g.kind,
            f"{len(g.files):,}",
            f"{g.times:,}",
            g.detail,
            words.first_files(g.files),
        )
        for g in groups[:MAX_ROWS]
    ]
    columns = (("Problem", ""), ("Files", "n"), ("Times", "n"), ("Meaning", "w"), ("In", "w"))
    listing = table("What was wrong with the event files", columns, rows)
    return join((listing, rest(len(groups))))


def starts(report: Report) -> Markup:
    """Every start that was given."""
    longest_s = max((s.duration_s for s in report.starts), default=0.0) or 1.0
    rows = [
        (
            tag("code", s.trace_id[:12]),
            words.kind_word(s) + ("" if s.trace_id != report.start.trace_id else " (shown here)"),
            words.utc_time(s.began_unix_s),
            f"{s.nodes:,}",
            "-" if s.gpus is None else f"{s.gpus:,}",
            drawing(
                bar(0, s.duration_s / longest_s, "own" if s.complete else "gap", y=5, height=12)
            ),
            words.seconds(s.duration_s) + ("" if s.complete else f", {words.missing_steps(s)}"),
        )
        for s in report.starts[:MAX_ROWS]
    ]
    columns = (
        ("Trace", ""), ("Kind", ""), ("Began", ""), ("Nodes", "n"), ("GPUs", "n"), ("Time", "g"),
        ("Seconds", "n"),
    )  # fmt: skip
    return join(
        (table("All starts, newest first", columns, rows), rest(len(report.starts), "starts"))
    )
