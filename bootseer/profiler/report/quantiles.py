"""Order statistics and the two distributions that the analysis needs (pure, standard library)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

_NORMAL = NormalDist()


def quantile(ordered: Sequence[float], share: float) -> float:
    """The `share` quantile (0..1) of sorted, non-empty values, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def student_quantile(probability: float, freedom: float) -> float:
    """Upper `probability` quantile of Student's t, by the Cornish-Fisher expansion in 1/freedom.

    Source: Abramowitz and Stegun 26.7.5. Good to a few per cent for freedom >= 8 even in the far
    tail, which is what thresholds need.
    """
    z = _NORMAL.inv_cdf(1.0 - probability)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3


@functools.lru_cache(maxsize=64)  # a comparison asks for the same sizes twice a phase
def rank_sum_counts(first: int, second: int) -> Sequence[int]:
    """In how many of all orders of two samples the Mann-Whitney U takes each value 0..n*m.

    By the usual recurrence over the largest element; exact, all values distinct.
    """
    size = first * second
    counts = [1] + [0] * size
    # The generating function is the Gaussian binomial coefficient.
    for i in range(1, first + 1):
        step = second + i
        for value in range(size, step - 1, -1):
            counts[value] -= counts[value - step]
        for value in range(i, size + 1):
            counts[value] += counts[value - i]
    return counts


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided p of the Mann-Whitney test that both samples come from one distribution.

    Ties count half, rounded towards no difference.
    """
    u = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in first for b in second)
    counts = rank_sum_counts(len(first), len(second))
    lower = math.ceil(min(u, len(first) * len(second) - u))
    return min(1.0, 2 * sum(counts[: lower + 1]) / sum(counts))


def ratio_interval(
    first: Sequence[float], second: Sequence[float], confidence: float
) -> tuple[float, float, float]:
    """Interval for the ratio first / second, from the ordered pairwise ratios.

    The distribution-free interval that belongs to the Mann-Whitney test (Hodges and Lehmann, on
    logarithms). Returns (low, high, confidence reached): with few values even the whole range of
    the ratios does not reach the confidence asked for.
    """
    ratios = sorted(a / b for a in first for b in second)
    counts = rank_sum_counts(len(first), len(second))
    total = sum(counts)
    cut, below = 0, counts[0]
    while cut + 1 < len(ratios) / 2 and 1 - 2 * (below + counts[cut + 1]) / total >= confidence:
        cut += 1
        below += counts[cut]
    return ratios[cut], ratios[-1 - cut], 1 - 2 * below / total
