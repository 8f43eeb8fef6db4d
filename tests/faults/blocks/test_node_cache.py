"""The node cache on a disk that is full, and in a directory of another user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.errors import AccessDeniedError
from tests.support.mounts.tmpfs import tmpfs
from tests.support.samples.block_sources import block_of, fill, make_source, read

BLOCK = 4096

MANY = 1 << 30


@pytest.mark.root
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 4242, 4242)
    with pytest.raises(AccessDeniedError, match="plant"):
        NodeCache.at(str(tmp_path / "theirs"), MANY)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    with tmpfs(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.mark.root
def test_a_full_disk_ends_storing_once_and_never_reading(tmp_path: Path, small_disk: Path):
    told: list[str] = []
    source = make_source(tmp_path, 512 * BLOCK)
    cache = NodeCache.at(str(small_disk / "cache"), MANY, on_stop=told.append)
    with cache, cache.open(source) as kept:
        fill(kept, source, range(512))
        missing = kept.missing(0, 512)
        assert 0 < len(missing) < 300
        for index in set(range(512)) - set(missing):
            assert read(kept, source, index) == block_of(source, index)
        assert cache.stopped
        assert kept.claim(0)
    assert len(told) == 1
    assert "No space" in told[0]


@pytest.mark.root
def test_a_full_disk_gives_up_old_objects_first(tmp_path: Path, small_disk: Path):
    told: list[str] = []
    old = make_source(tmp_path, 200 * BLOCK, seed=1)
    new = make_source(tmp_path, 100 * BLOCK, seed=2)
    with NodeCache.at(str(small_disk / "cache"), MANY, on_stop=told.append) as cache:
        with cache.open(old) as kept:
            fill(kept, old, range(200))
        with cache.open(new) as kept:
            fill(kept, new, range(100))
            assert kept.missing(0, 100) == []
        with cache.open(old) as kept:
            assert kept.missing(0, 200)
    assert told == []


@pytest.mark.root
def test_a_part_of_the_disk_is_left_to_others(tmp_path: Path, small_disk: Path):
    source = make_source(tmp_path, 512 * BLOCK)
    with NodeCache.at(str(small_disk / "cache"), MANY, keep_free=0.5) as cache:
        with cache.open(source) as kept:
            fill(kept, source, range(512))
            held = 512 - len(kept.missing(0, 512))
            assert 40 < held < 128
        disk = os.statvfs(small_disk)
        assert disk.f_bavail >= disk.f_blocks // 2 - 4  # folders are not counted
        assert not cache.stopped
    (small_disk / "others").write_bytes(bytes(disk.f_bavail * disk.f_frsize // 2))
    other = make_source(tmp_path, 4 * BLOCK, seed=1)
    with NodeCache.at(str(small_disk / "cache"), MANY, keep_free=0.5) as cache:
        with cache.open(other) as kept:
            fill(kept, other, range(4))
        disk = os.statvfs(small_disk)
        assert disk.f_bavail >= disk.f_blocks // 2 - 4  # the cache has made room for the others


@pytest.mark.root
def test_a_disk_full_from_the_start_is_no_error(tmp_path: Path, small_disk: Path):
    told: list[str] = []
    source = make_source(tmp_path, 2 * BLOCK)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(2 << 20))
    cache = NodeCache.at(str(small_disk / "cache"), MANY, on_stop=told.append)
    with cache, cache.open(source) as kept:
        fill(kept, source, range(2))
        assert kept.missing(0, 2) == [0, 1]
    assert len(told) == 1
