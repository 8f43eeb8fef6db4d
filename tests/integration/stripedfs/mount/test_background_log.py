"""The log of mounts for which nobody named one, when many begin at once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from bootseer.stripedfs.mount import background_log


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/bootseer"


def test_mounts_that_begin_together_lose_nothing_of_it(folder: Path) -> None:
    """Who came second put the new, empty file over what the first had put aside."""
    text = "old\n" * (background_log.MOST_BYTES // 4 + 1)
    together = multiprocessing.get_context("fork")
    for _ in range(20):
        path = Path(background_log.own_log())
        path.write_text(text)
        gate = together.Barrier(8)
        ends = [
            together.Process(target=lambda g=gate: (g.wait(), background_log.own_log()))
            for _ in range(8)
        ]
        for each in ends:
            each.start()
        for each in ends:
            each.join()
            assert each.exitcode == 0
        assert (folder / "checkpoint.log.1").read_text() == text
        assert path.read_text() == ""
