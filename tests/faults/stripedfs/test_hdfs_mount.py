"""What programs see through a mount when HDFS under it rots, or goes away."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import stripedfs
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.mounts.fuse import end_mount

pytestmark = [pytest.mark.root, pytest.mark.slow]

CHUNK = 1 << 20
SIZE = 12 * CHUNK
SETTINGS = WriteSettings(width=2, chunk_bytes=CHUNK, replication=1)
STRIPE = [sys.executable, "-m", "bootseer", "stripe"]


@pytest.fixture(scope="module")
def cluster(own_hdfs: Any) -> Any:
    return own_hdfs(datanodes=1)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    end_mount(path)


def read_at(path: Path, at: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        return file.read(CHUNK)


def failed(path: Path, at: int) -> int:
    """The errno of a read that must not succeed."""
    try:
        read_at(path, at)
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize("scheme", ["webhdfs", "hdfs"])
def test_rot_and_absence_are_input_output_errors(
    cluster: Any, scheme: str, directory: Path, tmp_path: Path
) -> None:
    data = os.urandom(SIZE)
    (tmp_path / "data").write_bytes(data)
    root = f"{cluster.webhdfs_url if scheme == 'webhdfs' else cluster.hdfs_url}/{scheme}"
    before = set(cluster.block_files(0))
    stripedfs.put(str(tmp_path / "data"), f"{root}/ckpt", settings=SETTINGS)
    large = [p for p in cluster.block_files(0) if p.stat().st_size > CHUNK and p not in before]
    for path in large:  # the third chunk of each stripe
        with path.open("r+b") as file:
            file.seek(2 * CHUNK + 100_000)
            file.write(b"rotten")
    small = ("--memory", "4MiB", "--deadline", "5")
    subprocess.run([*STRIPE, "mount", *small, root, directory], check=True, timeout=60)
    file = directory / "ckpt"
    assert read_at(file, 0) == data[:CHUNK]
    assert failed(file, 4 * CHUNK) == failed(file, 5 * CHUNK) == errno.EIO
    assert read_at(file, 6 * CHUNK) == data[6 * CHUNK : 7 * CHUNK]
    cluster.kill_datanode(0)
    cluster.namenodes[0].kill()
    try:
        assert failed(file, 10 * CHUNK) == errno.EIO
        subprocess.run([*STRIPE, "umount", directory], check=True, timeout=60)
    finally:
        cluster.restore()
    assert not os.path.ismount(directory)
