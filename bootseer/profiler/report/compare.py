"""Before against after, from the durations of several starts a side (pure).

Nothing is claimed with fewer than three complete starts a side, nor with so few that even sides
without any overlap differ by chance in more than one of twenty comparisons: that is a hint. The
interval and the p value are exact and distribution-free (Mann-Whitney, see `quantiles`). They hold
for the few starts that are usually repeated, where a bootstrap of so few values promises too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bootseer.profiler.report.before_after import Comparison, PhaseSpeedup, Side, Spread
from bootseer.profiler.report.quantiles import rank_test, ratio_interval

LEAST_STARTS = 3
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class StartFigures:
    """One complete start: its duration, and each phase's longest process's own work, seconds."""

    duration_s: float
    phases: Mapping[str, float]


def side_of(starts: Sequence[StartFigures]) -> Side:
    """Median, least and greatest of one side, whole and per phase."""
    phases: dict[str, list[float]] = defaultdict(list)
    for start in starts:
        for phase, seconds in start.phases.items():
            phases[phase].append(seconds)
    whole = [start.duration_s for start in starts]
    return Side(
        starts=len(starts),
        median=median(whole) if whole else None,
        min=min(whole, default=None),
        max=max(whole, default=None),
        phases={p: Spread(len(v), median(v), min(v), max(v)) for p, v in phases.items()},
    )


def compare(
    baseline: Sequence[StartFigures], candidate: Sequence[StartFigures], incomplete: int = 0
) -> Comparison:
    """Compare two sides; `incomplete` starts were left out, which the statement then says."""
    before, after = side_of(baseline), side_of(candidate)
    left_out = f"; {incomplete} without a first step left out" if incomplete else ""
    sizes = f"{len(baseline)} starts before, {len(candidate)} after{left_out}"
    if min(len(baseline), len(candidate)) < LEAST_STARTS:
        lacking = f"at least {LEAST_STARTS} complete starts a side are needed"
    elif any(start.duration_s <= 0 for start in (*baseline, *candidate)):
        lacking = "a start that took no time has no ratio to others"
    else:
        lacking = ""
    if lacking:
        text = f"no claim: {lacking} ({sizes})"
        return Comparison(before, after, False, None, None, None, CONFIDENCE, None, (), text)
    old = [start.duration_s for start in baseline]
    new = [start.duration_s for start in candidate]
    speedup = median(old) / median(new)
    low, high, reached = ratio_interval(old, new, CONFIDENCE)
    p_value = rank_test(old, new)
    return Comparison(
        baseline=before,
        candidate=after,
        claim=reached >= CONFIDENCE,
        speedup=speedup,
        low=low,
        high=high,
        confidence=reached,
        p_value=p_value,
        phase_speedups=_phase_speedups(before, after, baseline, candidate),
        statement=_statement(speedup, low, high, reached, p_value, sizes),
    )


def _phase_speedups(
    before: Side,
    after: Side,
    baseline: Sequence[StartFigures],
    candidate: Sequence[StartFigures],
) -> tuple[PhaseSpeedup, ...]:
    """Each phase's factor, where it shows a difference beyond what chance does to any of them.

    Of a dozen phases of equal sides, each tested at 95 %, one would show a difference in every
    third comparison. So they are tested together, by Holm's procedure: the phase that differs most
    at the confidence that all of them need, the next at that of those left, until one shows none.
    """
    names = (*before.phases, *(p for p in after.phases if p not in before.phases))
    values = {}
    for phase in names:
        old = [s.phases[phase] for s in baseline if phase in s.phases]
        new = [s.phases[phase] for s in candidate if phase in s.phases]
        if min(len(old), len(new)) >= LEAST_STARTS and min(*old, *new) > 0:
            values[phase] = (old, new)
    factors = {}
    tested = sorted(values, key=lambda phase: rank_test(*values[phase]))
    for done, phase in enumerate(tested):
        old, new = values[phase]
        wanted = 1 - (1 - CONFIDENCE) / (len(tested) - done)
        low, high, reached = ratio_interval(old, new, wanted)
        if reached < wanted or low <= 1.0 <= high:
            break
        factors[phase] = median(old) / median(new)
    return tuple(PhaseSpeedup(phase, factors.get(phase)) for phase in names)


def _statement(
    speedup: float, low: float, high: float, reached: float, p_value: float, sizes: str
) -> str:
    span = f"{reached:.0%} interval {low:.2f} to {high:.2f}, exact rank test p = {p_value:.2g}"
    if low <= 1.0 <= high:
        return f"no difference shown: ratio of medians {speedup:.2f} ({span}; {sizes})"
    word = "faster" if speedup > 1 else "slower"
    factor = speedup if speedup > 1 else 1 / speedup
    text = f"{factor:.2f} times {word} ({span}; {sizes})"
    if reached < CONFIDENCE:
        return f"a hint, no claim: {text}; 4 starts against 4, or 3 against 5, can reach 95%"
    return text
