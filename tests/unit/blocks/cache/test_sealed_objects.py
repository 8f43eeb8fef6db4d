"""Reading an object back from its medium, and sealing what is found right there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bootseer.blocks.cache import eviction, present_index, sealed_objects, uncached_read
from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.cache.direct_reads import DirectReads
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.cache.present_index import Identity
from bootseer.blocks.cache.uncached_read import Medium, direct_alignments
from tests.support.commands.filemode import evict, resident
from tests.support.samples.block_sources import FileSource, block_of, make_source, some_bytes

BLOCK = 4096
SIZE = 40 * BLOCK + 17
PIECES = [(0, 8 * BLOCK), (8 * BLOCK, 1), (32 * BLOCK, 8 * BLOCK + 17), (5, 3 * BLOCK), (7, 0)]


class Verifiable(FileSource):
    has_raw_digests = True

    def check_raw(self, index: int, raw: memoryview) -> None:
        self.open_block(index, raw, raw)


def kept_whole(cache: NodeCache, folder: Path) -> tuple[Verifiable, Path]:
    """An object of which the cache holds all, and its data's path; on the medium by now."""
    source = Verifiable(folder / make_source(folder, SIZE).name)
    with cache.open(source) as kept:
        for index in range(41):
            assert kept.store(index, memoryview(block_of(source, index)))
    path = Path(cache.directory, identity_of(source).folder, "data")
    evict(path)
    return source, path


def identity_of(source: Verifiable) -> Identity:
    identity = present_index.identity_of(source)
    assert identity is not None
    return identity


def believe_all(kept: CachedObject) -> DirectReads:
    """Direct reads of an object as if this process had verified all of it."""
    verified = kept.direct_reads()
    assert verified is not None
    for index in range(41):
        verified.marks.set(index)
    return verified


def seal(cache: NodeCache, source: Verifiable) -> bool:
    return sealed_objects.seal(cache.directory, source, go_on=lambda: True, whole_pages=False)


def has_direct(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return any(direct_alignments(fd))
    finally:
        os.close(fd)


@pytest.mark.parametrize("way", ["as it is", "through the page cache", "direct reads fail"])
def test_the_mediums_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path, wanted = tmp_path / "file", some_bytes(SIZE)
    path.write_bytes(wanted)
    if way == "through the page cache":
        monkeypatch.setattr(uncached_read, "direct_alignments", lambda fd: (0, 0))
    fd = os.open(path, os.O_RDONLY)
    failed: list[int] = []
    read = os.preadv

    def fail_direct(read_fd: int, views: list[memoryview], offset: int) -> int:
        if read_fd != fd:
            failed.append(offset)
            raise OSError(errno.EINVAL, "no direct I/O, says this fake")
        return read(read_fd, views, offset)

    if way == "direct reads fail":
        monkeypatch.setattr(os, "preadv", fail_direct)
    try:
        with Medium(fd, 9 * BLOCK) as found:
            for offset, length in PIECES:
                assert bytes(found.read(offset, length) or b"") == wanted[offset : offset + length]
            assert found.read(40 * BLOCK, 18) is None
        found.close()
        assert os.fstat(fd).st_size == SIZE  # the descriptor is the caller's
    finally:
        os.close(fd)
    assert bool(failed) == (way == "direct reads fail" and has_direct(path))


def test_sealing_leaves_the_page_cache_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that come back by sealing's own steps are small ones, slow to read for all others."""
    monkeypatch.setattr(sealed_objects, "SETTLED_NS", 0)
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        source, path = kept_whole(cache, tmp_path)
        before = resident(path)
        assert seal(cache, source)
        assert sealed_objects.is_sealed(cache.directory, source)
        assert not has_direct(path) or resident(path) == before


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_wrong_on_the_medium_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    monkeypatch.setattr(sealed_objects, "SETTLED_NS", 0)
    if not direct:
        monkeypatch.setattr(uncached_read, "direct_alignments", lambda fd: (0, 0))
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        source, path = kept_whole(cache, tmp_path)
        with path.open("r+b") as file:
            file.seek(40 * BLOCK + 3)
            byte = file.read(1)[0]
            file.seek(40 * BLOCK + 3)
            file.write(bytes([byte ^ 1]))
        with cache.open(source) as opened:
            verified = believe_all(opened)
            assert not seal(cache, source)
            assert verified.read(40 * BLOCK, 17) is None  # it is not believed any more
        with cache.open(source) as kept:
            assert kept.missing(0, 41) == [40]
            assert kept.store(40, memoryview(block_of(source, 40)))
        assert seal(cache, source)


def test_what_this_process_has_verified_needs_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_objects, "SETTLED_NS", 0)
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        source, path = kept_whole(cache, tmp_path)
        identity, room = identity_of(source), memoryview(bytearray(BLOCK))
        present = path.with_name("present")
        with cache.open(source) as kept, cache.open(source) as opened_before:
            verified = kept.direct_reads()
            assert verified is not None
            for index in range(41):  # the last is short
                assert sealed_objects.open_verified(cache.directory, identity, verified) is None
                assert present.read_bytes()[:8] == present_index.MAGIC
                assert kept.read(index, room[: SIZE - index * BLOCK])
            sealed = sealed_objects.open_verified(cache.directory, identity, verified)
            assert sealed is not None
            with sealed:
                assert os.pread(sealed.descriptor, SIZE, 0) == some_bytes(SIZE)
                assert present.read_bytes()[:8] == present_index.FROZEN
                assert eviction.evict_share(cache.directory, 1.0) == 0  # it is pinned
                # Nothing is written any more, not by those either who have it open for writing.
                with present.open("r+b") as file:
                    present_index.write_entry(file.fileno(), 7, present_index.ABSENT)
                    assert not opened_before.store(7, memoryview(block_of(source, 7)))
                    check = present_index.check_of(7, block_of(source, 7))
                    present_index.write_entry(file.fileno(), 7, check)
        del verified  # its pin ends
        assert sealed_objects.open_sealed(cache.directory, identity) is None
        assert eviction.evict_share(cache.directory, 0.2) > SIZE // 2  # not its end alone
        assert not path.exists()


def test_a_file_of_another_object_is_not_taken_for_a_verified_one(tmp_path: Path) -> None:
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        source, path = kept_whole(cache, tmp_path)
        identity = identity_of(source)
        with cache.open(source) as kept:
            verified = believe_all(kept)
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
            assert sealed_objects.open_verified(cache.directory, identity, verified) is None
            assert path.with_name("present").read_bytes()[:8] == present_index.MAGIC


def test_what_was_read_without_a_mark_is_sealed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_objects, "SETTLED_NS", 0)
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        source, _ = kept_whole(cache, tmp_path)
        identity = identity_of(source)
        with cache.open(source) as kept:
            verified = believe_all(kept)
            sealed = sealed_objects.open_verified(cache.directory, identity, verified)
            assert sealed is not None
            with sealed:
                assert seal(cache, source)
        sealed = sealed_objects.open_sealed(cache.directory, identity)
        assert sealed is not None
        with sealed:
            assert os.pread(sealed.descriptor, SIZE, 0) == some_bytes(SIZE)
