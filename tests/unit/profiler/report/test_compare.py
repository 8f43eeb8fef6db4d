"""Before against after: what is claimed, and when nothing is."""

from __future__ import annotations

import itertools
import random

import pytest

from bootseer.profiler.report import quantiles
from bootseer.profiler.report.compare import StartFigures, compare


def starts(*durations_s: float, **phases_s: float) -> list[StartFigures]:
    return [
        StartFigures(d, {k.replace("_", "."): v for k, v in phases_s.items()}) for d in durations_s
    ]


def test_three_starts_a_side() -> None:
    found = compare(starts(20, 30, 40, deps_install=12), starts(10, 11, 12, deps_install=4))
    assert (found.baseline.starts, found.candidate.starts) == (3, 3)
    assert (found.baseline.median, found.baseline.min, found.baseline.max) == (30, 20, 40)
    assert not found.claim  # noise alone does as much in one of ten
    assert found.speedup == pytest.approx(30 / 11)
    # Three against three: the interval is the whole range of the ratios, at 90 %.
    assert (found.low, found.high) == (pytest.approx(20 / 12), pytest.approx(40 / 10))
    assert found.confidence == pytest.approx(0.9)
    assert found.p_value == pytest.approx(0.1)
    assert found.phase_speedups[0].speedup is None
    hint = "a hint, no claim: 2.73 times faster (90% interval 1.67 to 4.00"
    assert found.statement.startswith(hint)


@pytest.mark.parametrize(("before", "after"), [(4, 4), (3, 5), (5, 3)])
def test_enough_starts_claim_at_95_percent(before: int, after: int) -> None:
    old = starts(*(20.0 + n for n in range(before)), deps_install=12)
    new = starts(*(10.0 + n for n in range(after)), deps_install=4)
    found = compare(old, new)
    assert found.claim
    assert found.confidence >= 0.95
    assert "times faster" in found.statement.split("(")[0]
    assert "hint" not in found.statement
    assert found.phase_speedups[0].speedup == pytest.approx(3.0)


def test_a_phase_that_overlaps_has_no_factor() -> None:
    def side(*phase_s: float) -> list[StartFigures]:
        return [StartFigures(10.0 + n, {"compile": s}) for n, s in enumerate(phase_s)]

    found = compare(side(1, 2, 3, 4), side(1.1, 2.1, 2.9, 3.9))
    assert found.phase_speedups[0].speedup is None


@pytest.mark.parametrize(
    ("before", "after"), [((20, 21), (1, 2, 3)), ((20, 21, 22), (1, 2)), ((), ())]
)
def test_fewer_than_three_claim_nothing(
    before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    found = compare(starts(*before), starts(*after), incomplete=1)
    assert not found.claim
    assert found.speedup is found.low is found.high is found.p_value is None
    assert "at least 3 complete starts" in found.statement
    assert "1 without a first step left out" in found.statement


def test_a_start_that_took_no_time_is_not_called_missing() -> None:
    found = compare(starts(20, 30, 0), starts(1, 2, 3))
    assert not found.claim
    assert found.statement.startswith("no claim: a start that took no time has no ratio to others")


def test_overlapping_sides_show_no_difference() -> None:
    found = compare(starts(10, 11, 12, 13, 14), starts(10.5, 11.5, 12.5, 13.5, 9.5))
    assert found.claim
    assert found.statement.startswith("no difference shown")


def test_slower_is_said() -> None:
    found = compare(starts(10, 11, 12, 11), starts(20, 22, 24, 22))
    assert found.statement.startswith("2.00 times slower")


def _noise(seed: int, sides: int, phases: int) -> list[list[StartFigures]]:
    rng = random.Random(seed)
    return [
        [
            StartFigures(30.0, {f"phase{n}": rng.lognormvariate(1.0, 0.3) for n in range(phases)})
            for _ in range(sides)
        ]
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("starts_a_side", "phases", "expected"), [(4, 1, 16), (6, 12, 14), (8, 12, 17), (10, 40, 21)]
)
def test_equal_sides_of_many_phases_show_one_in_few_comparisons(
    starts_a_side: int, phases: int, expected: int
) -> None:
    """Each phase by itself at 95 %: 213 of 500 comparisons of 6 against 6 named some phase."""
    named = 0
    for seed in range(1000, 1500):
        found = compare(*_noise(seed, starts_a_side, phases))
        named += any(each.speedup is not None for each in found.phase_speedups)
    assert named == expected
    assert named <= 500 * 0.05


def test_a_phase_among_many_that_became_faster_is_found() -> None:
    before, after = _noise(1, 6, 11)
    old = [StartFigures(30.0, {**s.phases, "deps.install": 9.0 + n}) for n, s in enumerate(before)]
    new = [
        StartFigures(30.0, {**s.phases, "deps.install": 3.0 + n / 9}) for n, s in enumerate(after)
    ]
    factors = {each.phase: each.speedup for each in compare(old, new).phase_speedups}
    assert factors.pop("deps.install") == pytest.approx(11.5 / (3 + 2.5 / 9))
    assert set(factors.values()) == {None}
    # Five against five cannot tell one of twelve: chance alone separates one of them as often.
    assert all(each.speedup is None for each in compare(old[:5], new[:5]).phase_speedups)


def test_each_phase_that_differs_makes_way_for_the_next() -> None:
    """Four phases at 95 % take 0.0125 each; two that are gone leave 0.025 to the others."""
    old, new = (
        [
            StartFigures(30.0, {"a": a + n, "b": a + n, "c": c, "d": 5.0 + n / 7})
            for n, c in enumerate(third)
        ]
        for a, third in ((20.0, (9, 8, 7, 6, 5)), (5.0, (5.5, 4, 3, 2, 1)))
    )
    factors = {each.phase: each.speedup for each in compare(old, new).phase_speedups}
    assert factors["a"] == factors["b"] == pytest.approx(22 / 7)
    assert factors["c"] == pytest.approx(7 / 3)  # p = 0.016
    assert factors["d"] is None


def test_phases_of_one_side_only() -> None:
    found = compare(starts(5, 6, 7, compile=3), starts(3, 4, 5, deps_install=1))
    speedups = {p.phase: p.speedup for p in found.phase_speedups}
    assert speedups == {"compile": None, "deps.install": None}


@pytest.mark.parametrize(("first", "second"), [(3, 3), (2, 5), (4, 3), (1, 1)])
def test_rank_sums_are_those_of_all_orders(first: int, second: int) -> None:
    size = first + second
    expected = [0] * (first * second + 1)
    for places in itertools.combinations(range(size), first):
        others = [place for place in range(size) if place not in places]
        expected[sum(a > b for a in places for b in others)] += 1
    assert quantiles.rank_sum_counts(first, second) == expected


def test_rank_test() -> None:
    assert quantiles.rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert quantiles.rank_test([1, 2, 3], [1, 2, 3]) == 1.0


def test_interval_of_five_against_five() -> None:
    first, second = [10.0, 11, 12, 13, 14], [5.0, 5.1, 5.2, 5.3, 5.4]
    low, high, confidence = quantiles.ratio_interval(first, second, 0.95)
    ratios = sorted(a / b for a in first for b in second)
    # Tables give 2 as the critical U of 5 against 5 at 5 % two-sided: the third value each way.
    assert (low, high) == (ratios[2], ratios[-3])
    assert confidence == pytest.approx(1 - 2 * 4 / 252)
