"""Starts before a change against starts after it, as data; `compare` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of one figure over starts, in seconds; `starts` had it."""

    starts: int
    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: the whole start, and each phase as its longest process's own
    work in a start. None of the whole's figures is known for a side without complete starts."""

    starts: int
    median: float | None
    min: float | None
    max: float | None
    phases: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class PhaseSpeedup:
    """Baseline over candidate of one phase's medians; None where no difference is shown at 95 %
    over all phases together (Holm)."""

    phase: str
    speedup: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Before (`baseline`) against after (`candidate`), complete starts only.

    `claim` is False when a side has fewer than three complete starts: then `speedup`, the
    interval and `p_value` are None and `statement` says what is missing. It is False, too, with so
    few starts that the interval cannot reach 95 %: then the figures are a hint. `speedup` is
    baseline over candidate median (above 1 = faster now); `low`..`high` is its interval at
    `confidence`, `p_value` the exact two-sided rank test that both sides are alike.
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
