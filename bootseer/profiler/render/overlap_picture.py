"""What ran at once in a start of one node: a bar for each phase, on the start's clock (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from bootseer.profiler.report.model import JOB, PhaseStats, Report

LEAST_SHARE = 0.02
"""Of a start's duration: what overlaps for less, or lasts for less, is left out."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase from its first begin to its last end; `drawn` has one `█` a column in between."""

    phase: str
    begin_s: float
    end_s: float
    drawn: str


def draw_bars(report: Report, columns: int) -> tuple[Bar, ...]:
    """A bar for each phase of some length, by begin.

    Empty where no two phases ran at once, and in starts of several nodes, of which the heat map and
    the critical path tell more.
    """
    whole_s = report.start.duration_s
    least_s = whole_s * LEAST_SHARE
    phases = [
        phase
        for phase in report.phases
        if phase.name != JOB and _length_of(phase, whole_s) > least_s
    ]
    if report.start.nodes != 1 or not _have_overlap(phases, whole_s, least_s):
        return ()
    ordered = sorted(phases, key=lambda phase: (phase.first_begin_s, -phase.last_end_s))
    return tuple(_draw_bar(phase, whole_s, columns) for phase in ordered)


def _length_of(phase: PhaseStats, whole_s: float) -> float:
    return min(phase.last_end_s, whole_s) - phase.first_begin_s


def _have_overlap(phases: Sequence[PhaseStats], whole_s: float, least_s: float) -> bool:
    """Whether any two phases ran at once of which neither is a part of the other."""
    return any(
        not _is_part(one.name, other.name)
        and min(one.last_end_s, other.last_end_s, whole_s)
        - max(one.first_begin_s, other.first_begin_s)
        > least_s
        for one, other in combinations(phases, 2)
    )


def _is_part(one: str, other: str) -> bool:
    return one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _draw_bar(phase: PhaseStats, whole_s: float, columns: int) -> Bar:
    end_s = min(phase.last_end_s, whole_s)
    begin = min(int(phase.first_begin_s / whole_s * columns), columns - 1)
    end = max(begin + 1, min(columns, round(end_s / whole_s * columns)))
    drawn = " " * begin + "█" * (end - begin) + " " * (columns - end)
    return Bar(phase.name, phase.first_begin_s, end_s, drawn)
