"""The archive, unpacked by GNU tar."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.trees.snapshots import NS, describe, pack, rich


@pytest.mark.debian("zstd")
def test_gnu_tar_unpacks_it_exactly(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    (root / "old").unlink()  # GNU tar 1.34 refuses nothing here, but warns of times before 1970
    os.utime(root, ns=(NS, NS + 7))
    wanted = describe(root)
    pack(root, tmp_path / "a.tar.zst")
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        ["tar", "--zstd", "--xattrs", "--xattrs-include=*", "-xpf", tmp_path / "a.tar.zst"],
        cwd=tmp_path / "out",
        capture_output=True,
        check=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert done.stderr == b""
    got = describe(tmp_path / "out" / str(root).lstrip("/"))
    assert got == wanted
    sparse = os.stat(tmp_path / "out" / str(root).lstrip("/") / "sparse")
    assert sparse.st_blocks * 512 < 1 << 20
