"""The report in three sentences: how long, along which path, and what to fix first (pure)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bootseer.profiler.render.wording import (
    GAP,
    NEGLIGIBLE_SHARE,
    count,
    last_seen,
    long_seconds,
    scale,
    seconds,
)
from bootseer.profiler.report.incidents import HALTED, MISSING
from bootseer.profiler.report.load.wall_clock import KIND as WALL_CLOCK_ALONE
from bootseer.profiler.report.model import JOB, CriticalStep, Report, WhatIf
from bootseer.profiler.report.tries import KIND as EARLIER_TRY


@dataclass(frozen=True, slots=True)
class PathPiece:
    """Neighbouring critical steps of the same phase, all own work or all waiting, joined.

    `share` is of the whole start; `nodes` are those the path ran through, in order.
    """

    phase: str
    wait: bool
    gap: bool
    begin_s: float
    end_s: float
    share: float
    nodes: tuple[str, ...]

    @property
    def duration_s(self) -> float:
        """Length of this piece in seconds."""
        return self.end_s - self.begin_s


def path_pieces(report: Report) -> tuple[PathPiece, ...]:
    """The critical path with neighbours joined that are alike."""
    whole_s = report.start.duration_s
    groups: list[list[CriticalStep]] = []
    for step in report.critical_path:
        if groups and (groups[-1][-1].phase, groups[-1][-1].wait) == (step.phase, step.wait):
            groups[-1].append(step)
        else:
            groups.append([step])
    return tuple(
        PathPiece(
            phase=steps[0].phase or GAP,
            wait=steps[0].wait,
            gap=steps[0].phase is None,
            begin_s=steps[0].begin_s,
            end_s=steps[-1].end_s,
            share=(steps[-1].end_s - steps[0].begin_s) / whole_s if whole_s > 0 else 0.0,
            nodes=tuple(dict.fromkeys(step.node for step in steps)),
        )
        for steps in groups
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The report in three sentences; `advice` is empty when nothing would help noticeably."""

    headline: str
    path: str
    advice: tuple[str, ...]


def verdict(report: Report) -> Verdict:
    """How long, along which path, and what to fix first."""
    return Verdict(_headline(report), _path_sentence(report), tuple(_find_advice(report)))


def _headline(report: Report) -> str:
    start = report.start
    if start.complete:
        return f"The start took {long_seconds(start.duration_s)} on {scale(start)}."
    waiting = _describe_waiting(report)
    if waiting:
        return f"The start did not reach a first step: {waiting}."
    if start.unreached:
        return (
            f"{_describe_unreached(report)}; the others reached theirs within "
            f"{long_seconds(start.duration_s)} on {scale(start)}."
        )
    return (
        f"The start did not reach a first step; {long_seconds(start.duration_s)} were observed "
        f"on {scale(start)}."
    )


def _describe_waiting(report: Report) -> str:
    """How many ranks wait in which phase, and for which; empty unless most never left one."""
    unreached = {each.rank for each in report.unreached}
    ranks: dict[str, set[int]] = defaultdict(set)
    for each in report.killed:
        if each.rank is not None and each.rank not in unreached:
            ranks[each.phase].add(each.rank)
    phase = max(ranks, key=lambda name: len(ranks[name]), default="")
    if not phase or len(ranks[phase]) < 2 or 2 * len(ranks[phase]) < report.start.ranks:
        return ""
    awaited = []
    if report.unreached:
        first, others = report.unreached[0], len(report.unreached) - 1
        more = f" and {count(others, 'other rank')}" if others else ""
        awaited.append(f"for rank {first.rank} on {first.node}{more} ({last_seen(first)})")
    awaited += [p.detail for p in report.problems if p.kind == MISSING]
    return "; ".join([f"{count(len(ranks[phase]), 'rank')} are still in {phase}", *awaited])


def _describe_unreached(report: Report) -> str:
    first = report.unreached[0]
    others = report.start.unreached - 1
    more = f" and {count(others, 'other rank')}" if others else ""
    return (
        f"Rank {first.rank} on {first.node}{more} did not reach the first step ({last_seen(first)})"
    )


def _path_sentence(report: Report) -> str:
    pieces = [p for p in path_pieces(report) if p.share >= NEGLIGIBLE_SHARE]
    if not pieces:
        return ""
    shown = sorted(sorted(pieces, key=lambda p: -p.duration_s)[:6], key=lambda p: p.begin_s)
    words = [f"{'waiting in ' if p.wait else ''}{p.phase} {seconds(p.duration_s)}" for p in shown]
    dropped = len(pieces) - len(shown)
    rest = f" (and {count(dropped, 'shorter piece')})" if dropped else ""
    return "Critical path: " + " → ".join(words) + rest


def _find_advice(report: Report) -> list[str]:
    """What helps most: one thing removed, or one brought to its median; the better lead first.

    Where most of what removing a phase would save is already saved by bringing its slowest to
    the median, the slow one is the finding and not the phase.
    """
    if report.unreached:  # how long the start would have taken is not known
        first = report.unreached[0]
        return [f"rank {first.rank} on {first.node}, {last_seen(first)}."]
    if not report.start.complete:
        return [f"{p.detail}." for p in report.problems if p.kind in (MISSING, HALTED)]
    worth_s = report.start.duration_s * NEGLIGIBLE_SHARE
    removal = _find_best(report, "removed", "phase")
    phase, node = _find_best(report, "median", "phase"), _find_best(report, "median", "node")
    at_median = phase
    if node and len(report.nodes) > 1 and (not phase or node.saved_s >= 0.8 * phase.saved_s):
        at_median = node
    both = [removal, at_median]
    if removal and at_median:
        least_s = _least_share(at_median, report) * removal.saved_s
        if at_median.saved_s >= least_s:
            both.reverse()
    lines = [_advice_line(item, report) for item in both if item and item.saved_s >= worth_s]
    doubts = [f"{p.detail}." for p in report.problems if p.kind in (HALTED, WALL_CLOCK_ALONE)]
    return [*doubts, *(_describe_lost(report) or _describe_unknown(report)), *lines]


def _least_share(at_median: WhatIf, report: Report) -> float:
    """The least share of a phase's removal with which `at_median` becomes the finding.

    A phase can rarely be removed; a node that stands out in it can be replaced.
    """
    is_node = at_median.kind == "node"
    stands_out = is_node and any(s.node == at_median.name for s in report.stragglers)
    return 0.2 if stands_out else 0.5


def _describe_lost(report: Report) -> list[str]:
    """The earlier try of a node, where the path begins with the time that it took."""
    tries = [p for p in report.problems if p.kind == EARLIER_TRY]
    first = report.critical_path[0] if report.critical_path else None
    worth_s = report.start.duration_s * NEGLIGIBLE_SHARE
    if not tries or first is None or first.phase is not None or first.duration_s < worth_s:
        return []
    marks = (f" on {first.node}, last in ", f" on {first.node} was left out")
    at_node = [p for p in tries if any(mark in p.detail for mark in marks)]
    return [f"{p.detail}." for p in (at_node or tries)[:1]]


def _describe_unknown(report: Report) -> list[str]:
    """That what most of the path went into is not known, where that is so and nothing was slow."""
    pieces = [p for p in path_pieces(report) if p.gap or (p.phase == JOB and not p.wait)]
    unknown_s, whole_s = sum(p.duration_s for p in pieces), report.start.duration_s
    if report.stragglers or unknown_s <= 0.5 * whole_s:
        return []
    return [
        f"what {long_seconds(unknown_s)} of it went into is not known. Name the job's phases: "
        "`bootseer run --log-rules`, `bootseer.phase` in Python, `bootseer sh` in a shell."
    ]


def _find_best(report: Report, change: str, kind: str) -> WhatIf | None:
    fitting = [w for w in report.what_if if w.change == change and w.kind == kind]
    return max(fitting, key=lambda w: w.saved_s, default=None)


def _advice_line(item: WhatIf, report: Report) -> str:
    how = "At its median on every node" if item.kind == "phase" else "At the median's pace"
    if item.change == "removed":
        how = "Without it"
    why = ""
    slow = [s for s in report.stragglers if item.kind == "node" and s.node == item.name]
    if slow:
        worst = max(slow, key=lambda s: s.excess_s)
        rank = f" on rank {worst.ranks[0]}" if len(worst.ranks) == 1 else ""
        why = (
            f" Its {worst.phase} took {long_seconds(worst.own_s)}{rank}, "
            f"{long_seconds(worst.median_s)} at the median."
        )
    return (
        f"{item.name}.{why} {how} the start would take {long_seconds(item.start_s)}, "
        f"{long_seconds(item.saved_s)} less."
    )


def what_if_words(item: WhatIf) -> str:
    """`without deps.install`, `node-17 at the median`."""
    if item.change == "removed":
        return f"without {item.name}"
    if item.kind == "node":
        return f"{item.name} at the median"
    return f"{item.name} at its median everywhere"
