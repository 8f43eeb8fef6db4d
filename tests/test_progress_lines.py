"""What transfers say of themselves where standard error is no terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from bootseer.cli import progress
from bootseer.cli.root import group


@pytest.mark.slow
def test_long_transfers_say_now_and_then_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a log or a pipeline they said nothing until their end."""
    data, url = os.urandom(5 << 20), str(tmp_path / "store/model.pt")
    (tmp_path / "model.pt").write_bytes(data)
    commands = (
        ["stripe", "put", "--chunk", "1MiB", "--json", str(tmp_path / "model.pt"), url],
        ["stripe", "verify", "--json", url],
        ["stripe", "get", "--json", url, str(tmp_path / "copy")],
    )
    for every_s in (progress.TELL_EVERY_S, 0.0):
        monkeypatch.setattr(progress, "TELL_EVERY_S", every_s)
        for words in commands:
            done = CliRunner().invoke(group, words, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            assert done.stdout.startswith(("{", "["))
            lines = done.stderr.splitlines()
            assert bool(lines) is (every_s == 0), lines
            assert all(line.startswith("bootseer: ") for line in lines)
            if lines:
                assert "model.pt: 5.0 MiB of 5.0 MiB, for " in lines[-1]
        (tmp_path / "copy").unlink()
