"""What transfers say of themselves where standard error is no terminal."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner

from bootseer.cli.root import group
from bootseer.cli.shared import progress
from tests.support.waiting import until


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
    advance = progress._LogLines.advance

    def advance_and_wait(lines: progress._LogLines, size_bytes: int) -> None:
        advance(lines, size_bytes)
        written = cast("io.BytesIO", sys.stderr.buffer)
        until(lambda: b" MiB, for " in written.getvalue())

    for every_s in (progress.REPORT_INTERVAL_S, 0.001):
        monkeypatch.setattr(progress, "REPORT_INTERVAL_S", every_s)
        if every_s == 0.001:  # the transfer must last until it has said something
            monkeypatch.setattr(progress._LogLines, "advance", advance_and_wait)
        for words in commands:
            done = CliRunner().invoke(group, words, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            assert done.stdout.startswith(("{", "["))
            lines = done.stderr.splitlines()
            assert bool(lines) is (every_s == 0.001), lines
            assert all(line.startswith("bootseer: ") for line in lines)
            assert all("model.pt: " in line for line in lines)
            far = [line for line in lines if "nothing yet" not in line]
            assert all(" MiB, for " in line for line in far)
            assert bool(far) is bool(lines)
        (tmp_path / "copy").unlink()


def test_a_transfer_that_hangs_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines came with the next batch alone, of up to 128 MiB."""
    monkeypatch.setattr(progress, "REPORT_INTERVAL_S", 0.01)
    said = ""
    with progress.show_progress("put x") as told:
        told.expect(4 << 20)
        told.advance(1 << 20)
        end_s = time.monotonic() + 60
        while "put x: 1.0 MiB of 4.0 MiB, for 0 s\n" not in said and time.monotonic() < end_s:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert "put x: 1.0 MiB of 4.0 MiB, for 0 s\n" in said
    tellers = [each for each in threading.enumerate() if each.name == "progress"]
    for each in tellers:
        each.join(timeout=60)
        assert not each.is_alive()


def test_nobody_reads_it_and_the_transfer_ends_well(tmp_path: Path) -> None:
    """Its thread hung in that write; a command that ended in that moment hung as well."""
    code = (
        "import time\n"
        "from bootseer.cli.shared import progress\n"
        "progress.REPORT_INTERVAL_S = 0.001\n"
        "with progress.show_progress('x' * 2000):\n"
        "    open('begun', 'w').close()\n"
        "    while not __import__('os').path.exists('full'): time.sleep(0.01)\n"
    )
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stderr=writing, cwd=tmp_path) as process:
        try:
            until(lambda: (tmp_path / "begun").exists())
            until(lambda: _is_full(writing))
            for _ in range(50):
                assert not _writes_to_a_pipe(process.pid)
                time.sleep(0.01)
            (tmp_path / "full").touch()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
            os.close(reading)
            os.close(writing)


def _is_full(pipe: int) -> bool:
    return not select.select([], [pipe], [], 0)[1]


def _writes_to_a_pipe(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").glob("*/wchan")
    return any("pipe_write" in task.read_text() for task in tasks)
