"""Starts before a change against starts after it, as data; `compare` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of one figure over starts, in seconds.

    `starts` is how many starts had it.
    """

    starts: int
    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    `starts` counts its complete starts. `median`, `min` and `max` are of the duration of the whole
    start, in seconds; they are None when there is no complete start. `phases` has a `Spread` for
    each top-level phase: of a start, the longest own work that one process did in that phase.
    """

    starts: int
    median: float | None
    min: float | None
    max: float | None
    phases: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class PhaseSpeedup:
    """One phase's baseline median over its candidate median (above 1 = faster now).

    `speedup` is None when no difference is shown at 95 % over all phases together (Holm).
    """

    phase: str
    speedup: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Before (`baseline`) against after (`candidate`), complete starts only.

    `claim` is False when a side has fewer than three complete starts: then `speedup`, the interval
    and `p_value` are None and `statement` says what is missing. `claim` is also False with so few
    starts that the interval cannot reach 95 %: then the figures are a hint. `speedup` is the
    baseline median over the candidate median (above 1 = faster now). `low`..`high` is the interval
    of `speedup` at `confidence`. `p_value` is that of the exact two-sided rank test that both sides
    are alike.
    """

    baseline: Side
    candidate: Side
    claim: bool
    speedup: float | None
    low: float | None
    high: float | None
    confidence: float
    p_value: float | None
    phase_speedups: tuple[PhaseSpeedup, ...]
    statement: str
