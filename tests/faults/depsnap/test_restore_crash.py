"""kill -9 at every step of a restore: the old state, or one that recovery brings to an end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.depsnap.restore import commit
from bootseer.depsnap.restore.archive_restore import restore
from bootseer.depsnap.restore.commit import recover
from tests.support.paths import TESTS

pytestmark = pytest.mark.slow

CRASHING = TESTS / "support/programs/restore_killer.py"


def _run(tmp_path: Path, name: str, *, nested: int = 0, count: int = 0, seed: int = 0) -> dict:
    words = [sys.executable, CRASHING, name, str(nested), str(count), str(seed), tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["absent", "merge", "group"])
def test_killed_at_every_step_it_is_old_or_new(tmp_path: Path, name: str) -> None:
    found = _run(tmp_path, name)
    assert found["old"] >= 3  # before the commit
    assert found["new"] >= 3  # after it


def test_a_recovery_killed_again_and_again_ends(tmp_path: Path) -> None:
    found = _run(tmp_path, "group", nested=4)
    assert found["new"] >= 3
    assert found["recoveries killed"] >= 5


@pytest.mark.soak
@pytest.mark.parametrize("name", ["absent", "merge", "group"])
def test_every_recovery_killed_at_every_step(tmp_path: Path, name: str) -> None:
    found = _run(tmp_path, name, nested=1)
    assert found["old"] >= 3
    assert found["new"] >= 3
    # A tree that was not there comes by one rename, so its recovery is a step or none.
    assert found["recoveries killed"] >= (3 if name == "absent" else 20)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["absent", "merge", "group"])
def test_killed_at_random_moments(tmp_path: Path, name: str, seed: int) -> None:
    assert _run(tmp_path, name, count=200, seed=seed)["kills"] == 200


def test_killed_at_a_random_moment_in_short(tmp_path: Path) -> None:
    assert _run(tmp_path, "group", count=25, seed=1)["kills"] == 25


def test_after_a_reboot_a_commit_is_undone_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was synced: staged files of another boot may be empty, old ones surely are not."""
    from tests.support.trees.snapshots import describe, pack, write

    write(tmp_path / "r/a", "new")
    write(tmp_path / "r/b/c", "new")
    info = pack(tmp_path / "r", tmp_path / "x")
    write(tmp_path / "t/a", "old")
    before = describe(tmp_path / "t")
    code = (
        "import os, signal, sys; from bootseer.depsnap.restore.archive_restore import restore\n"
        "def step(name):\n    if name == 'switched': os.kill(os.getpid(), signal.SIGKILL)\n"
        "restore(sys.argv[1], sys.argv[2], {sys.argv[3]: sys.argv[4]}, on_step=step)"
    )
    arguments = [tmp_path / "x", info.index_digest, tmp_path / "r", tmp_path / "t"]
    assert subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode == -9
    assert (tmp_path / "t/a").read_text() == "new"
    monkeypatch.setattr(commit, "boot_id", lambda: "another boot")
    assert recover(str(tmp_path / "t")).outcome == "undone"
    assert describe(tmp_path / "t") == before
    restore(str(tmp_path / "x"), info.index_digest, {str(tmp_path / "r"): str(tmp_path / "t")})
    assert (tmp_path / "t/b/c").read_text() == "new"
