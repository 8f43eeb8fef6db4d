"""Reads of cached blocks past the fetcher: only of what was verified, and stays as it is."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import threading
from pathlib import Path

import pytest

from bootseer.blocks.cache import cached_object, direct_reads, eviction, present_index
from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.cache.node_cache import NodeCache
from tests.support.samples.block_sources import FileSource, block_of, make_source

BLOCK = 4096
MANY = 1 << 30


def put(kept: CachedObject, source: FileSource, index: int) -> bool:
    return kept.store(index, memoryview(block_of(source, index)))


def verified(kept: CachedObject, source: FileSource, index: int) -> bool:
    raw = bytearray(source.locate(index).length)
    return kept.read(index, memoryview(raw)) and bytes(raw) == block_of(source, index)


def data_of(cache: NodeCache, source: FileSource) -> Path:
    identity = present_index.identity_of(source)
    assert identity is not None
    return Path(cache.directory, identity.folder, "data")


def test_only_blocks_that_are_here_are_read(tmp_path: Path):
    source = make_source(tmp_path, 4 * BLOCK + 17)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        found = kept.direct_reads()
        assert found is not None
        assert found.read(0, 1) is None
        for index in (0, 1, 3, 4):
            assert put(kept, source, index)
        assert not found.marks.whole
        for offset, size in ((0, 1), (100, BLOCK), (0, 2 * BLOCK), (4 * BLOCK - 3, 20)):
            whole = b"".join(block_of(source, n) for n in range(5))
            assert bytes(found.read(offset, size) or b"") == whole[offset : offset + size]
        for offset, size in ((2 * BLOCK - 1, 2), (0, 4 * BLOCK), (2 * BLOCK, 1)):
            assert found.read(offset, size) is None
        assert put(kept, source, 2)
        assert found.marks.whole
        assert bytes(found.read(0, 4 * BLOCK + 17) or b"") == whole


def test_a_later_process_verifies_first_and_finds_what_is_wrong(tmp_path: Path):
    source = make_source(tmp_path, 3 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        for index in range(3):
            put(kept, source, index)
        data = data_of(cache, source)
    with data.open("r+b") as file:  # what power loss leaves behind
        file.seek(BLOCK + 9)
        file.write(b"\0\0\0\0")
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        found = kept.direct_reads()
        assert found is not None
        assert [found.read(n * BLOCK, 1) for n in range(3)] == [None] * 3
        assert [verified(kept, source, n) for n in range(3)] == [True, False, True]
        assert [found.read(n * BLOCK, 1) is None for n in range(3)] == [False, True, False]
        assert cache.corrupt_blocks == 1
        assert kept.missing(0, 3) == [1]


def test_old_marks_are_dropped_at_the_next_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = make_source(tmp_path, BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        found = kept.direct_reads()
        assert found is not None
        put(kept, source, 0)
        assert kept.direct_reads() is found
        assert found.read(0, BLOCK) is not None
        monkeypatch.setattr(direct_reads, "MARK_LIFE_S", -1.0)
        assert kept.direct_reads() is found
        assert found.read(0, BLOCK) is None


def test_a_block_dropped_while_another_is_marked_stays_dropped() -> None:
    """`whole` was told from the marks of before, and what had been found wrong was read."""
    marks = direct_reads.Marks(2)
    drops: list[threading.Thread] = []

    class Watched(bytearray):
        def __contains__(self, wanted: object) -> bool:
            found = wanted in bytes(self)
            if not found:
                drops.append(threading.Thread(target=marks.drop, args=(0,)))
                drops[-1].start()
                drops[-1].join(0.2)
            return found

    marks.of_blocks = Watched(2)
    marks.set(0)
    marks.set(1)
    (drop,) = drops
    drop.join()
    assert bytes(marks.of_blocks) == b"\0\1"
    assert not marks.whole


def test_where_descriptors_are_scarce_the_cache_leaves_them_to_others(tmp_path: Path) -> None:
    source = make_source(tmp_path, BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as held, cache.open(source) as kept:
            taken = [held.enter_context(open(os.devnull)) for _ in range(40)]
            most = taken[-1].fileno() + 8
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
            try:
                count = len(os.listdir("/proc/self/fd"))
                assert kept.direct_reads() is None
                with cache.open(make_source(tmp_path, BLOCK)) as other:
                    assert not other.usable
                assert len(os.listdir("/proc/self/fd")) == count
                assert not cache.stopped
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            held.close()
            assert kept.direct_reads() is not None


def test_what_is_read_so_is_not_evicted(tmp_path: Path):
    source = make_source(tmp_path, 4 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache:
        kept = cache.open(source)
        found = kept.direct_reads()
        assert found is not None
        for index in range(4):
            put(kept, source, index)
        kept.close()
        assert eviction.shrink(cache.directory, 0, 0) > 0
        assert bytes(found.read(3 * BLOCK, BLOCK) or b"") == block_of(source, 3)
        del found
        assert eviction.shrink(cache.directory, 0, 0) == 0


def test_a_cache_that_was_deleted_and_made_again_begins_without_marks(tmp_path: Path):
    source = make_source(tmp_path, 2 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        before = kept.direct_reads()
        put(kept, source, 0)
        data = data_of(cache, source)
        for path in (data, data.parent / "present"):
            path.unlink()
        data.parent.rmdir()
        with cache.open(source) as again:
            after = again.direct_reads()
            assert before is not None
            assert after is not None
            assert after.read(0, 10) is None
            assert bytes(before.read(0, BLOCK) or b"") == block_of(source, 0)


def test_nothing_counts_as_verified_while_another_may_take_it_back(tmp_path: Path):
    source = make_source(tmp_path, BLOCK)
    with (
        NodeCache.at(str(tmp_path / "cache"), MANY) as cache,
        cache.open(source) as kept,
        cache.open(source) as other,
    ):
        found = kept.direct_reads()
        assert found is not None
        assert other.claim(0)
        assert put(kept, source, 0)  # its patience was over
        assert verified(kept, source, 0)
        assert found.read(0, 1) is None
        other.unclaim(0)
        assert verified(kept, source, 0)
        assert found.read(0, 1) is not None


def test_a_store_that_fails_leaves_what_another_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Fault injected: a write of ours fails (no space) after another opening stored the block."""
    source = make_source(tmp_path, 2 * BLOCK)
    with (
        NodeCache.at(str(tmp_path / "cache"), MANY) as cache,
        cache.open(source) as slow,
        cache.open(source) as quick,
    ):
        write, failed = cached_object.write_fully, []

        def full(fd: int, raw: memoryview, offset: int) -> None:
            if not failed:
                failed.append(offset)
                assert put(quick, source, 1)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(fd, raw, offset)

        monkeypatch.setattr(cached_object, "write_fully", full)
        assert slow.claim(1)
        put(slow, source, 1)
        assert failed == [BLOCK]
        assert verified(quick, source, 1)


def test_one_that_is_being_closed_is_given_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An opening may come while the last reference to what it could share goes."""
    source = make_source(tmp_path, BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        found = kept.direct_reads()
        assert found is not None
        assert put(kept, source, 0)
        opened: list[direct_reads.DirectReads | None] = []
        close = os.close

        def close_slowly(descriptor: int) -> None:
            if not opened:
                opened.append(None)
                opened[0] = kept.direct_reads()
            close(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close_slowly)
            number = found._data_fd
            del found
        (after,) = opened
        assert after is not None
        assert after._data_fd != number
        assert bytes(after.read(0, BLOCK) or b"") == block_of(source, 0)


def _read_in_child(
    found: direct_reads.DirectReads, told: multiprocessing.SimpleQueue[bool]
) -> None:
    told.put(found.read(0, BLOCK) is not None)


def test_a_forked_child_does_not_write_into_its_parents_memory(tmp_path: Path):
    source = make_source(tmp_path, 2 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        for index in range(2):
            put(kept, source, index)
        found = kept.direct_reads()
        assert found is not None
        assert verified(kept, source, 0)
        assert verified(kept, source, 1)
        view = found.read(BLOCK, BLOCK)
        assert view is not None
        told: multiprocessing.SimpleQueue[bool] = multiprocessing.get_context("fork").SimpleQueue()
        child = multiprocessing.get_context("fork").Process(
            target=_read_in_child, args=(found, told)
        )
        child.start()
        assert told.get()
        child.join()
        assert bytes(view) == block_of(source, 1)
