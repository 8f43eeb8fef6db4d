"""Reads of blocks that this node has: the right bytes, or none."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from block_sources import FileSource, block_of, make_source

from bootseer.blockimage.present import KEPT_BLOCKS, Present
from bootseer.blocks import presence
from bootseer.blocks.cache import NodeCache
from bootseer.blocks.cached import CachedObject

BLOCK, BLOCKS = 4096, 40
SIZE = BLOCKS * BLOCK - 17


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return make_source(tmp_path / "source", SIZE)


@pytest.fixture
def cached(tmp_path: Path, source: FileSource) -> Iterator[CachedObject]:
    with NodeCache(str(tmp_path / "cache"), 1 << 30) as cache, cache.open(source) as kept:
        for index in range(BLOCKS):
            if index != 20:
                kept.store(index, memoryview(block_of(source, index)))
        yield kept


def given(present: Present, offset: int, length: int) -> bytes | None:
    views = present.views(offset, length)
    return None if views is None else b"".join(views)


def whole(source: FileSource) -> bytes:
    return b"".join(block_of(source, index) for index in range(BLOCKS))


def test_any_range_has_its_bytes_or_none(cached: CachedObject, source: FileSource) -> None:
    present, raw, rng = Present(cached, source), whole(source), random.Random(3)
    missing = range(20 * BLOCK, 21 * BLOCK)
    for _ in range(500):
        offset = rng.randrange(SIZE)
        length = min(rng.randrange(1, KEPT_BLOCKS * BLOCK), SIZE - offset)
        found = given(present, offset, length)
        if found is None:
            spanned = (offset + length - 1) // BLOCK - offset // BLOCK
            touches = offset < missing.stop and offset + length > missing.start
            assert touches or spanned >= KEPT_BLOCKS
        else:
            assert found == raw[offset : offset + length]


def test_a_kept_block_is_not_overwritten_within_one_read(
    cached: CachedObject, source: FileSource
) -> None:
    present, raw = Present(cached, source), whole(source)
    for first in range(KEPT_BLOCKS):  # the first of these is now the oldest
        assert given(present, first * BLOCK, BLOCK) == raw[first * BLOCK : (first + 1) * BLOCK]
    length = KEPT_BLOCKS * BLOCK
    assert given(present, 0, length) == raw[:length]
    assert given(present, 3 * BLOCK, length) == raw[3 * BLOCK : 3 * BLOCK + length]


def test_blocks_kept_in_the_middle_of_a_read(cached: CachedObject, source: FileSource) -> None:
    """All of what is kept is wanted, and what is missing stands on both sides of it."""
    raw, length = whole(source), KEPT_BLOCKS * BLOCK
    for kept in range(1, KEPT_BLOCKS - 1):
        present = Present(cached, source)
        assert given(present, kept * BLOCK, BLOCK) == raw[kept * BLOCK : (kept + 1) * BLOCK]
        for other in range(25, 25 + KEPT_BLOCKS - 1):
            given(present, other * BLOCK, 1)
        assert given(present, 0, length) == raw[:length]


def test_more_than_is_kept_is_refused(cached: CachedObject, source: FileSource) -> None:
    present = Present(cached, source)
    assert present.views(0, KEPT_BLOCKS * BLOCK + 1) is None


def test_a_damaged_block_is_not_given(
    cached: CachedObject, source: FileSource, tmp_path: Path
) -> None:
    identity = presence.identity_of(source)
    assert identity is not None
    path = tmp_path / "cache" / identity.folder / "data"
    with path.open("r+b") as file:
        file.seek(5 * BLOCK + 9)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    present = Present(cached, source)
    assert given(present, 4 * BLOCK, BLOCK) == block_of(source, 4)
    assert given(present, 5 * BLOCK, 1) is None
    assert given(present, 4 * BLOCK, 2 * BLOCK) is None


def test_threads_do_not_share_buffers(cached: CachedObject, source: FileSource) -> None:
    present, raw, wrong = Present(cached, source), whole(source), []

    def reader(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            offset = rng.randrange(19 * BLOCK)
            if given(present, offset, BLOCK) != raw[offset : offset + BLOCK]:
                wrong.append(offset)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nothing_is_read_after_closing(cached: CachedObject, source: FileSource) -> None:
    present = Present(cached, source)
    assert present.views(0, 10) is not None
    cached.close()
    assert present.views(10 * BLOCK, 10) is None
