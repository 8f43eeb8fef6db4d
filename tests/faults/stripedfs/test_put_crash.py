"""kill -9 of a put at every step: readers see the old checkpoint whole, or the new one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import TESTS

pytestmark = pytest.mark.slow

CRASHING = TESTS / "support/programs/put_killer.py"


def _run(tmp_path: Path, kind: str, *, count: int = 0, seed: int = 0) -> dict:
    words = [sys.executable, CRASHING, kind, str(count), str(seed), tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["file", "tree"])
def test_killed_at_every_step_it_is_old_or_new(tmp_path: Path, kind: str) -> None:
    found = _run(tmp_path, kind)
    assert found["kills"] >= 20
    assert found["old"] >= 15
    assert found["new"] >= 1  # killed after the pointer
    assert found["kept"] >= 5  # the same put went on where it was killed


def test_killed_at_a_random_moment_in_short(tmp_path: Path) -> None:
    found = _run(tmp_path, "file", count=6, seed=1)
    assert found["kills"] == found.get("old", 0) + found.get("new", 0) == 6
    assert found["old"] >= 1  # before the pointer


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["file", "tree"])
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(tmp_path: Path, kind: str, seed: int) -> None:
    found = _run(tmp_path, kind, count=100, seed=seed)
    assert found["kills"] == found.get("old", 0) + found.get("new", 0) == 100
    assert found["old"] >= 10  # before the pointer
