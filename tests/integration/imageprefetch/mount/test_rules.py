"""Rules of mounted images that only root can put to the test."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from bootseer.agent import client
from bootseer.blockimage.serve import page_cache_warmer


@pytest.mark.root
def test_warming_opens_no_device(tmp_path: Path) -> None:
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (tmp_path / "file").write_bytes(b"x")
    root = page_cache_warmer.clone_mount(str(tmp_path))
    try:
        os.close(page_cache_warmer.open_below(root, b"file"))
        with pytest.raises(PermissionError):
            page_cache_warmer.open_below(root, b"null")
    finally:
        os.close(root)


@pytest.mark.root
def test_somebody_elses_agent_is_told_nothing(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    path = tmp_path / "images/agent.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.setblocking(False)
        os.chown(path, 65534, 65534)
        assert client.run_command(["image", "mount", "--runtime", str(tmp_path)]) is None
        with pytest.raises(BlockingIOError):
            listening.accept()
