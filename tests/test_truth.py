"""The report against the generator's truth: it must find what was put in, and nothing else.

Twenty seeds of a small start in every run; twenty of the full one (1,024 nodes x 8 ranks x 20
phases, 330k events) in `make soak`. The report reads the event files only.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import generate
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import load
from bootseer.profiler.report.model import Report

pytestmark = pytest.mark.slow

SEEDS = range(20)
SMALL = {"nodes": 64, "ranks": 8}
FULL = {"nodes": 1024, "ranks": 8, "factor_min": 1.6}  # down to barely stragglers


def made(folder: Path, **options: Any) -> tuple[Report, dict[str, Any]]:
    truth = generate.generate(folder, generate.Options(**options))
    (folder / "truth.json").unlink()
    report = analysis.analyse(load([str(folder / "events")]))
    shutil.rmtree(folder / "events")
    return report, truth


def check(report: Report, truth: dict[str, Any]) -> None:
    ranks = truth["ranks"]
    found = {(s.node, s.ranks, s.phase) for s in report.stragglers}
    put_in = {(s["node"], tuple(s["ranks"]), s["phase"]) for s in truth["stragglers"]}
    assert found == put_in  # recall 1 and precision 1
    killed = {(k.node, (k.rank or 0) % ranks, k.phase) for k in report.killed}
    assert killed == {
        (node, local, phase)
        for node, mine in truth["killed"].items()
        for local, phase in mine.items()
    }
    check_skew(report, truth)
    assert report.start.duration_s == pytest.approx(truth["duration_s"], abs=0.005)
    opened = {barrier.name: barrier.exit_s for barrier in report.barriers}
    first = truth["first_event_s"]
    assert opened == {
        name: pytest.approx(at_s - first, abs=0.005) for name, at_s in truth["barriers"].items()
    }
    kinds = {problem.kind for problem in report.problems}
    assert kinds <= {"torn-line", "clock-jump"}
    torn = {Path(p.file).name for p in report.problems if p.kind == "torn-line"}
    assert torn == set(truth["torn"])
    jumped = {
        Path(p.file).name.rsplit("-", 2)[0] for p in report.problems if p.kind == "clock-jump"
    }
    assert jumped == set(truth["clock_jumps"])


def check_skew(report: Report, truth: dict[str, Any]) -> None:
    """Within 5 ms; a node whose wall was set back may be told by either of its two clocks."""
    true = truth["skew_s"]
    zero = true[report.skew.reference]
    assert report.skew.reference not in truth["clock_jumps"]
    compared = 0
    for node in report.nodes:
        if node.skew_s is None:
            assert node.name in truth["killed"]
            continue
        compared += 1
        expected = true[node.name] - zero
        errors = [abs(node.skew_s - expected)]
        if node.name in truth["clock_jumps"]:
            errors.append(abs(node.skew_s - expected + truth["clock_jumps"][node.name]))
        assert min(errors) < 0.005
        assert node.skew_uncertainty_s is not None
        assert node.skew_uncertainty_s < 0.02
    assert compared >= truth["nodes"] - len(truth["killed"])
    assert report.skew.barriers == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_small(tmp_path: Path, seed: int) -> None:
    report, truth = made(tmp_path, seed=seed, **SMALL)
    assert truth["stragglers"]
    assert truth["killed"]
    check(report, truth)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("node_sigma", [0.0, 0.2])
def test_noise_alone_names_nobody(tmp_path: Path, seed: int, node_sigma: float) -> None:
    """Also where a node's ranks share their noise, which averaging does not take away."""
    sigma = 0.02 if node_sigma else 0.2
    report, _ = made(
        tmp_path, seed=seed, stragglers=False, sigma=sigma, node_sigma=node_sigma, **SMALL
    )
    assert report.stragglers == ()


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_full(tmp_path: Path, seed: int) -> None:
    report, truth = made(tmp_path, seed=seed, **FULL)
    check(report, truth)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_full_noise_alone(tmp_path: Path, seed: int) -> None:
    node_sigma = 0.2 if seed % 2 else 0.0
    sigma = 0.02 if node_sigma else 0.2
    report, _ = made(
        tmp_path, seed=seed, stragglers=False, sigma=sigma, node_sigma=node_sigma, **FULL
    )
    assert report.stragglers == ()
