"""The log of mounts for which nobody named one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fuse_mounts import refusal
from stripe_faces import CHUNK, content, put_bytes, store_of, stripe

from bootseer.fuse.mounts import unmount
from bootseer.stripedfs import faultlog


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/bootseer"


def test_it_is_made_for_its_user_alone_and_kept(folder: Path) -> None:
    path = Path(faultlog.own_log())
    assert path == folder / "checkpoint.log"
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    path.write_text("line\n")
    assert Path(faultlog.own_log()).read_text() == "line\n"


def test_one_that_has_grown_is_put_aside_over_the_one_before(folder: Path) -> None:
    path = Path(faultlog.own_log())
    for text in ("a", "b"):
        path.write_text(text * (faultlog.MOST_BYTES + 1))
        assert Path(faultlog.own_log()).read_text() == ""
        aside = folder / "checkpoint.log.1"
        assert aside.read_text()[:2] == text * 2
        assert sorted(os.listdir(folder)) == [path.name, aside.name]


def test_what_is_no_file_of_ours_is_not_written_to(folder: Path, tmp_path: Path) -> None:
    path = Path(faultlog.own_log())
    path.unlink()
    os.mkfifo(path)  # opening it to write would wait for a reader
    assert faultlog.own_log() == ""
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert faultlog.own_log() == ""
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    path.mkdir()
    assert faultlog.own_log() == ""


@pytest.mark.root
@pytest.mark.slow
def test_a_mount_in_the_background_says_there_why_a_read_failed(
    folder: Path, tmp_path: Path
) -> None:
    """A stripe of the store is gone."""
    put_bytes(store_of(tmp_path / "store"), "ckpt", content(6 * CHUNK), tmp_path)
    next((tmp_path / "store/ckpt.stripes").glob("v-*/stripe-00001")).unlink()
    directory = tmp_path / "mnt"
    directory.mkdir()
    assert stripe("mount", tmp_path / "store", directory).returncode == 0
    try:
        assert refusal((directory / "ckpt").read_bytes) == errno.EIO
        (line,) = (folder / "checkpoint.log").read_text().splitlines()
        assert "stripe-00001" in line
    finally:
        unmount(str(directory), lazily=True)
