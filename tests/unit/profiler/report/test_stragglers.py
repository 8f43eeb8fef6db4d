"""Who is named a straggler, and who is not."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from bootseer.profiler.report import analysis, quantiles, stragglers
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import Straggler
from tests.support.samples.event_files import EventFile


def named(folder: Path) -> tuple[Straggler, ...]:
    return analysis.analyse(load([str(folder)])).stragglers


def nodes(folder: Path, seconds: list[float], *, wait_s: float = 0.0, ranks: int = 1) -> None:
    """One phase of imports a rank, then up to `wait_s` of waiting in it."""
    for node, own_s in enumerate(seconds):
        for rank in range(ranks):
            file = EventFile(f"n{node}", node * ranks + rank)
            file.span("imports", 0, own_s)
            file.span("imports.wait", own_s, own_s + wait_s, wait=True).write(folder)


def test_slow_node_is_named_with_its_phase(tmp_path: Path) -> None:
    nodes(tmp_path, [10.0, 10.1, 9.9, 10.0, 10.2, 30.0])
    (found,) = named(tmp_path)
    assert (found.node, found.ranks, found.phase) == ("n5", (), "imports")
    assert found.own_s == pytest.approx(30)
    assert found.median_s == pytest.approx(10.05)
    assert found.ratio == pytest.approx(30 / 10.05)
    assert found.excess_s == pytest.approx(19.95)


@pytest.mark.parametrize(
    ("slow_s", "expected"),
    [
        (14.9, 0),  # under 1.5 x 10
        (15.1, 1),
    ],
)
def test_one_and_a_half_times_the_median(tmp_path: Path, slow_s: float, expected: int) -> None:
    nodes(tmp_path, [10.0] * 40 + [slow_s])
    assert len(named(tmp_path)) == expected


@pytest.mark.parametrize(("slow_s", "expected"), [(2.9, 0), (3.1, 1)])
def test_two_seconds_above_the_median(tmp_path: Path, slow_s: float, expected: int) -> None:
    nodes(tmp_path, [1.0] * 40 + [slow_s])
    assert len(named(tmp_path)) == expected


def test_waiting_makes_no_straggler(tmp_path: Path) -> None:
    nodes(tmp_path, [10.0] * 5)
    EventFile("w", 9).span("imports", 0, 10).span("imports", 10, 90, wait=True).write(tmp_path)
    assert named(tmp_path) == ()


def test_one_slow_rank_is_named_alone(tmp_path: Path) -> None:
    for node in range(6):
        for local in range(8):
            slow = node == 3 and local == 5
            file = EventFile(f"n{node}", node * 8 + local)
            file.span("imports", 0, 60 if slow else 10 + local / 10).write(tmp_path)
    (found,) = named(tmp_path)
    assert (found.node, found.ranks, found.phase) == ("n3", (29,), "imports")


def test_killed_ranks_do_not_make_the_rest_a_node(tmp_path: Path) -> None:
    """The one rank that finished before its node died is no measure of the node."""
    rng = random.Random(4)
    for node in range(12):
        for local in range(8):
            file = EventFile(f"n{node}", node * 8 + local)
            dead = node == 0 and local > 0
            own_s = 17.0 if node == 0 else 10 * math.exp(rng.gauss(0, 0.2))
            file.span("imports", 0, None if dead else own_s).write(tmp_path)
    assert named(tmp_path) == ()


@pytest.mark.parametrize("shared", [0.0, 0.2])
def test_limit_stays_above_log_normal_noise(shared: float) -> None:
    """Also when all ranks of a node share the noise, so that averaging does not help."""
    rng = random.Random(7)
    for _ in range(20):
        values = []
        for _ in range(1024):
            common = rng.gauss(0, shared)
            own = [30 * math.exp(common + rng.gauss(0, 0.2 - shared)) for _ in range(8)]
            values.append(stragglers.node_own(own))
        limit = stragglers.compute_limit(values, 20 * 1024)
        assert limit is not None
        assert max(values) < limit.threshold_s


def test_stragglers_do_not_hide_each_other() -> None:
    rng = random.Random(8)
    values = [30 * math.exp(rng.gauss(0, 0.07)) for _ in range(200)] + [90.0] * 40
    limit = stragglers.compute_limit(values, 20 * 240)
    assert limit is not None
    assert limit.threshold_s < 60


def test_too_few_values_name_nobody() -> None:
    assert stragglers.compute_limit([1.0, 100.0], 2) is None


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [  # from tables of Student's t
        (0.001, 10, 4.144),
        (0.0005, 30, 3.646),
        (0.025, 20, 2.086),
        (0.001, 1000, 3.098),
    ],
)
def test_student_quantile(probability: float, freedom: float, expected: float) -> None:
    assert quantiles.student_quantile(probability, freedom) == pytest.approx(expected, rel=0.01)


def test_quantile_is_linear_between_values() -> None:
    assert quantiles.quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantiles.quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantiles.quantile([5.0], 0.99) == 5.0
