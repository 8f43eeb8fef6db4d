"""The log of mounts for which nobody named one: a home that hangs, a store that is damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bootseer.errors import DeadlineError
from bootseer.fuse.mount.mount import open_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import unmount
from bootseer.fuse.serve import daemon
from bootseer.stripedfs.mount import background_log
from tests.support.mounts.checkpoints import CHUNK, content, put_bytes, store_of, stripe
from tests.support.mounts.fuse import refusal


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/bootseer"


@pytest.mark.root
def test_a_home_that_hangs_costs_its_second(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault injection: it lies on a FUSE mount that nobody serves. Mounts waited without end."""
    home = tmp_path / "state"
    home.mkdir()
    device = open_mount(str(home), MountOptions())
    try:
        assert background_log.own_log() == ""
        with pytest.raises(DeadlineError, match="cannot write the log"):
            daemon.Log.open(str(home / "named.log"))
    finally:
        unmount(str(home), lazily=True)
        os.close(device)
    (said,) = caplog.records
    assert "did not answer within 1 s" in said.getMessage()


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
        assert f" {directory}: " in line
    finally:
        unmount(str(directory), lazily=True)
