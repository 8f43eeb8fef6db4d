"""A plain file that is replaced while several read it: old bytes or an error, never a mixture."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer import stripedfs
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import CorruptDataError

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store" / "plain"
    path.parent.mkdir()
    path.write_bytes(b"1" * (4 * MIB))
    return path


def change(path: Path) -> None:
    """Other bytes of the same length, in the same file."""
    with open(path, "r+b") as file:
        file.write(b"2" * (4 * MIB))
    os.utime(path, (1, 1))


def read(file: stripedfs.StripedFile, offset: int) -> bytes:
    buffer = bytearray(100)
    assert file.read_at(offset, buffer) == 100
    return bytes(buffer)


def test_who_shares_memory_shares_the_doubt(path: Path):
    with Fetcher() as fetcher:
        files = [stripedfs.open(str(path), fetcher=fetcher) for _ in range(2)]
        assert [read(file, 0) for file in files] == [b"1" * 100] * 2
        change(path)
        for file in files:
            with pytest.raises(CorruptDataError, match="changed"):
                read(file, 3 * MIB)
        for file in files:
            file.close()


def test_who_shares_a_cache_shares_the_doubt(path: Path, tmp_path: Path):
    caches = [NodeCache.at(str(tmp_path / "cache"), 1 << 30) for _ in range(2)]
    fetchers = [Fetcher(cache=cache) for cache in caches]
    files = [stripedfs.open(str(path), fetcher=fetcher) for fetcher in fetchers]
    try:
        assert [read(file, 0) for file in files] == [b"1" * 100] * 2
        change(path)
        for file in files:
            with pytest.raises(CorruptDataError, match="changed"):
                read(file, 3 * MIB)
    finally:
        for each in (*files, *fetchers, *caches):
            each.close()


def test_the_cache_serves_a_plain_file_that_stayed_the_same(path: Path, tmp_path: Path):
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        for hits in (0, 4):
            with (
                Fetcher(cache=cache) as fetcher,
                stripedfs.open(str(path), fetcher=fetcher) as file,
            ):
                assert file.read() == b"1" * (4 * MIB)
                assert fetcher.stats.total().cache_hits == hits
