"""Mounts whose node cache fails while they are read: full, read-only, broken. Bytes stay right."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mounts.checkpoints import CHUNK, content, put_bytes, served, store_of
from tests.support.mounts.fuse import in_time

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 500 * CHUNK + 55
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 16 MiB on a loop device, which turns read-only at an error."""
    image, mounted = tmp_path / "image", tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mounted.mkdir()
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, mounted], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)


def fill(disk: Path) -> None:
    """Leave no byte."""
    zeros = itertools.repeat(bytes(64 << 10))
    path = disk / "of-another"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(zeros)


def make_read_only(disk: Path) -> None:
    """As the kernel does when the device has an error."""
    device = os.stat(disk).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    Path(f"/sys/fs/ext4/{block.name}/trigger_fs_error").write_text("bootseer's test")
    with pytest.raises(OSError, match="Read-only"):
        (disk / "new").touch()


def cut_off(disk: Path) -> None:
    """As if the device were pulled out."""
    fd = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, sys.byteorder))
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Input/output"):
        (disk / "new").touch()


@pytest.mark.parametrize("spoil", [fill, make_read_only, cut_off])
@pytest.mark.parametrize("direct_bytes", [0, 1 << 62])
def test_a_cache_that_fails_while_it_is_read_costs_speed_only(
    disk: Path, tmp_path: Path, spoil: Callable[[Path], None], direct_bytes: int
) -> None:
    put_bytes(store_of(tmp_path / "store"), "ckpt", content(SIZE), tmp_path)
    (tmp_path / "store/plain").write_bytes(content(SIZE, 1))
    settings = {"cache": str(disk / "cache"), "direct_bytes": direct_bytes}
    with served(tmp_path / "store", tmp_path / "mnt", **settings) as mount:

        def part(name: str, offset: int, size: int) -> bytes:
            with open(mount.directory / name, "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)

        for name, seed in (("ckpt", 0), ("plain", 1)):
            # Not from the first byte on: the whole file would be read ahead, and be there.
            begin = in_time(lambda n=name: part(n, 40 * CHUNK, 60 * CHUNK))
            assert begin == content(SIZE, seed)[40 * CHUNK : 100 * CHUNK]
        kept = sum(path.stat().st_blocks for path in (disk / "cache").glob("*/data"))
        assert kept > 0
        spoil(disk)
        for name, seed in (("ckpt", 0), ("plain", 1)):
            wanted = content(SIZE, seed)
            assert (
                in_time(lambda n=name: part(n, 90 * CHUNK, 99 * CHUNK))
                == (wanted[90 * CHUNK : 189 * CHUNK])
            )
            assert in_time((mount.directory / name).read_bytes) == wanted
        [said] = mount.said.splitlines()  # once, and not once for each block
        assert "cache" in said
