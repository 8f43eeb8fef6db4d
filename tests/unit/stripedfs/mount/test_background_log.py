"""The log of mounts for which nobody named one."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from bootseer.errors import StoreUnavailableError
from bootseer.fuse.serve import daemon
from bootseer.stripedfs.mount import background_log
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/bootseer"


def test_it_is_made_for_its_user_alone_and_kept(folder: Path) -> None:
    path = Path(background_log.own_log())
    assert path == folder / "checkpoint.log"
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    path.write_text("line\n")
    assert Path(background_log.own_log()).read_text() == "line\n"


def test_one_that_has_grown_is_put_aside_over_the_one_before(folder: Path) -> None:
    path = Path(background_log.own_log())
    for text in ("a", "b"):
        path.write_text(text * (background_log.MOST_BYTES + 1))
        assert Path(background_log.own_log()).read_text() == ""
        aside = folder / "checkpoint.log.1"
        assert aside.read_text()[:2] == text * 2
        assert sorted(os.listdir(folder)) == [path.name, aside.name]


def test_what_is_no_file_of_ours_is_not_written_to(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(background_log.own_log())
    path.unlink()
    os.mkfifo(path)  # opening it to write would wait for a reader
    assert background_log.own_log() == ""
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert background_log.own_log() == ""
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    path.mkdir()
    assert background_log.own_log() == ""
    assert [str(path) in each.getMessage() for each in caplog.records] == [True] * 3


def test_one_that_others_could_read_is_closed_to_them(folder: Path) -> None:
    path = Path(background_log.own_log())
    for mode in (0o644, 0o666):
        path.chmod(mode)
        assert Path(background_log.own_log()).stat().st_mode & 0o777 == 0o600


def test_a_log_that_hangs_keeps_nobody(tmp_path: Path) -> None:
    """Fault injection: a pipe that is full."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = daemon.Log.open(str(fifo))
    log.say("x" * (1 << 17))
    log.say("and no more")
    said = b""

    def drained() -> bool:
        nonlocal said
        with contextlib.suppress(BlockingIOError):
            said += os.read(reader, 1 << 20)
        log.say("it goes on")
        return b" it goes on\n" in said

    until(drained)
    os.close(reader)
    assert said.count(b"x") == 1 << 17
    assert b"and no more" not in said


def test_a_mount_that_takes_too_long_says_so_in_its_log(folder: Path) -> None:
    path = Path(background_log.own_log())
    with pytest.raises(StoreUnavailableError, match=r"took too long; see .*checkpoint\.log"):
        daemon.start(
            lambda _: time.sleep(60),
            mountpoint="/m",
            limit_s=0.2,
            waits_for="x:1",
            log_file=str(path),
        )
    (line,) = path.read_text().splitlines()
    assert " /m: not mounted, waited for x:1: " in line
