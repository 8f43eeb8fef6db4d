"""The node cache in one process: what is kept, verified, evicted, and what faults do."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.blocks.cache import cached_object as cached_module
from bootseer.blocks.cache import eviction, present_index
from bootseer.blocks.cache import node_cache as cache_module
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.errors import AccessDeniedError, NotFoundError, UsageError
from tests.support.samples.block_sources import FileSource, block_of, fill, make_source, read
from tests.support.waiting import until

BLOCK = 4096
MANY = 1 << 30


def folder_of(cache: NodeCache, source: FileSource) -> Path:
    identity = present_index.identity_of(source)
    assert identity is not None
    return Path(cache.directory, identity.folder)


def no_descriptor(directory: str) -> list[eviction.Usage]:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def counted(cache: NodeCache) -> int:
    return int.from_bytes(Path(cache.directory, "usage").read_bytes(), "little")


def test_stored_blocks_come_back_and_others_are_missing(tmp_path: Path):
    source = make_source(tmp_path, 5 * BLOCK + 17)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        assert read(kept, source, 0) is None
        fill(kept, source, range(1, 6, 2))
        assert kept.missing(0, 6) == [0, 2, 4]
        assert kept.count_missing(6) == 3
        assert [kept.present(index) for index in range(6)] == [False, True] * 3
        for index in (1, 3, 5):
            assert read(kept, source, index) == block_of(source, index)
        assert read(kept, source, 2) is None


def test_the_next_start_finds_them(tmp_path: Path):
    source = make_source(tmp_path, 3 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        fill(kept, source, range(2))
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        assert kept.missing(0, 3) == [2]
        assert read(kept, source, 1) == block_of(source, 1)


@pytest.mark.parametrize("change", ["key", "size", "block"])
def test_another_object_is_never_found_under_an_old_one(tmp_path: Path, change: str):
    source = make_source(tmp_path, 4 * BLOCK, key="same")
    other = make_source(tmp_path / "other", 4 * BLOCK, seed=1, key="same")
    if change == "key":
        other.key = "different"
    elif change == "size":
        other.size_bytes -= BLOCK
    else:
        other.block_bytes = 2 * BLOCK
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache:
        with cache.open(source) as kept:
            fill(kept, source, range(4))
        with cache.open(other) as kept:
            assert len(kept.missing(0, 2)) == 2


def test_what_has_no_key_is_never_kept(tmp_path: Path):
    source = make_source(tmp_path, 2 * BLOCK, key="")
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        assert not kept.usable
        assert kept.claim(0)
        fill(kept, source, range(2))
        assert kept.missing(0, 2) == [0, 1]
        assert cache.used_bytes() == 0


@pytest.mark.parametrize("checked", [True, False])
def test_a_flipped_byte_is_noticed_and_the_block_dropped(tmp_path: Path, checked: bool):
    source = make_source(tmp_path, 3 * BLOCK, checked=checked)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        fill(kept, source, range(3))
        with open(folder_of(cache, source) / "data", "r+b") as data:
            data.seek(BLOCK + 7)
            byte = data.read(1)
            data.seek(BLOCK + 7)
            data.write(bytes([byte[0] ^ 1]))
        assert read(kept, source, 1) is None
        assert cache.corrupt_blocks == 1
        assert kept.missing(0, 3) == [1]
        fill(kept, source, range(3))
        assert read(kept, source, 1) == block_of(source, 1)


def test_swapped_blocks_are_noticed(tmp_path: Path):
    """Entries and data exchanged together would fit, were it not for the block's number."""
    source = make_source(tmp_path, 2 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        fill(kept, source, range(2))
        folder = folder_of(cache, source)
        data = (folder / "data").read_bytes()
        (folder / "data").write_bytes(data[BLOCK:] + data[:BLOCK])
        table = (folder / "present").read_bytes()
        head, first, second = table[:64], table[64:80], table[80:96]
        (folder / "present").write_bytes(head + second + first)
        assert read(kept, source, 0) is None
        assert read(kept, source, 1) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "present").write_bytes(b""),
        lambda folder: (folder / "present").write_bytes(os.urandom(200)),
        lambda folder: (folder / "present").unlink(),
        lambda folder: (folder / "data").unlink(),
        lambda folder: (folder / "data").write_bytes(b""),
    ],
    ids=["empty", "noise", "no present", "no data", "data cut"],
)
def test_a_spoiled_object_is_made_anew(tmp_path: Path, spoil: object):
    source = make_source(tmp_path, 2 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache:
        with cache.open(source) as kept:
            fill(kept, source, range(2))
        spoil(folder_of(cache, source))  # type: ignore[operator]
        with cache.open(source) as kept:
            assert read(kept, source, 0) is None
            fill(kept, source, range(2))
            assert read(kept, source, 0) == block_of(source, 0)


def test_the_oldest_start_is_evicted_first_and_pinned_objects_never(tmp_path: Path):
    sources = [make_source(tmp_path, 64 * BLOCK, seed=n) for n in range(4)]
    # Three objects of 64 blocks and their tables fit, four do not.
    with NodeCache.at(str(tmp_path / "cache"), 3 * 66 * BLOCK + BLOCK) as cache:
        for number, source in enumerate(sources[:3]):
            with cache.open(source) as kept:
                fill(kept, source, range(64))
            os.utime(folder_of(cache, source), (100.0 + number, 100.0 + number))
        with cache.open(sources[0]), cache.open(sources[3]) as kept:
            fill(kept, sources[3], range(64))
            assert kept.missing(0, 64) == []
        assert cache.used_bytes() <= cache.limit_bytes
        with cache.open(sources[0]) as kept:
            assert kept.missing(0, 64) == []
        with cache.open(sources[1]) as kept:
            assert kept.missing(0, 64)


def test_the_end_of_a_large_object_goes_before_the_whole_of_it(tmp_path: Path):
    large = make_source(tmp_path, 256 * BLOCK, seed=1)
    small = make_source(tmp_path, 16 * BLOCK, seed=2)
    with NodeCache.at(str(tmp_path / "cache"), 264 * BLOCK) as cache:
        with cache.open(large) as kept:
            fill(kept, large, range(256))
        with cache.open(small) as kept:
            fill(kept, small, range(16))
            assert kept.missing(0, 16) == []
        assert cache.used_bytes() <= cache.limit_bytes
        with cache.open(large) as kept:
            gone = kept.missing(0, 256)
            assert 0 < len(gone) < 128
            assert gone == list(range(256 - len(gone), 256))
            assert read(kept, large, 0) == block_of(large, 0)


def test_a_cache_full_of_open_objects_says_so_once_and_serves_on(tmp_path: Path):
    told: list[str] = []
    source = make_source(tmp_path, 64 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), 20 * BLOCK, on_stop=told.append) as cache:
        with cache.open(source) as kept:
            fill(kept, source, range(64))
            stored = 64 - len(kept.missing(0, 64))
            assert 10 < stored < 20
            assert read(kept, source, 0) == block_of(source, 0)
        assert cache.used_bytes() <= cache.limit_bytes
    assert len(told) == 1
    assert "limit" in told[0]


def test_what_cannot_be_counted_at_once_is_kept_within_reason_and_counted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cache_module, "LOCK_PAUSE_S", 0.0001)  # the lock is held meanwhile
    source = make_source(tmp_path, 64 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), 64 * 25 * BLOCK) as cache:
        other = os.open(f"{cache.directory}/usage", os.O_RDWR)  # as another process would
        fcntl.flock(other, fcntl.LOCK_EX)
        with cache.open(source) as kept:
            fill(kept, source, range(64))
            stored = 64 - len(kept.missing(0, 64))
            assert 20 <= stored <= 25
            fcntl.flock(other, fcntl.LOCK_UN)
            fill(kept, source, range(stored, 64))
            assert kept.missing(0, 64) == []
            assert counted(cache) >= cache.used_bytes() >= 64 * BLOCK
        os.close(other)


def test_what_was_not_counted_is_so_when_the_cache_is_closed(tmp_path: Path):
    source = make_source(tmp_path, 8 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, cache.open(source) as kept:
        fill(kept, source, range(1))
        before = counted(cache)
        with open(f"{cache.directory}/usage", "rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            fill(kept, source, range(1, 8))
            assert counted(cache) == before
    assert counted(cache) == before + 7 * BLOCK


def test_what_others_need_of_the_disk_is_not_given_to_what_cannot_be_counted(tmp_path: Path):
    for keep_free in (0.0, 0.999999):
        with (
            NodeCache.at(str(tmp_path / "cache"), MANY, keep_free=keep_free) as cache,
            open(f"{cache.directory}/usage", "rb") as other,
        ):
            fcntl.flock(other, fcntl.LOCK_EX)
            assert cache.reserve(BLOCK) is (keep_free == 0.0)


def test_a_cache_at_its_limit_stays_there_however_many_look_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Looking at the folders takes long, and everybody else waits for the count meanwhile."""
    shrink, looks = eviction.shrink, 0

    def slow(*limits: int) -> int:
        nonlocal looks
        looks += 1
        time.sleep(0.05)
        return shrink(*limits)

    source = make_source(tmp_path, 512 * BLOCK)
    limit = 128 * BLOCK
    with NodeCache.at(str(tmp_path / "cache"), limit) as cache, cache.open(source) as kept:
        monkeypatch.setattr(cache_module, "FULL_PAUSE_S", 0.02)
        fill(kept, source, range(128))
        monkeypatch.setattr(eviction, "shrink", slow)

        def store(first: int) -> None:
            for index in range(128 + first, 512, 8):
                fill(kept, source, range(index, index + 1))
                time.sleep(0.01)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(store, range(8)))
        assert looks > 3
        assert cache.used_bytes() <= limit + limit // 64


def test_who_waits_for_room_while_the_cache_is_closed_stores_nothing(tmp_path: Path):
    source = make_source(tmp_path, 2 * BLOCK)
    cache = NodeCache.at(str(tmp_path / "cache"), MANY)
    with cache.open(source) as kept, ThreadPoolExecutor(2) as pool:
        fill(kept, source, range(1))
        with cache._lock:
            waiting = pool.submit(kept.store, 1, memoryview(block_of(source, 1)))
            closing = pool.submit(cache.close)
            until(lambda: bool(cache.stopped), 20)
        closing.result(20)
        assert waiting.result(20) is False or counted(cache) >= 2 * BLOCK
        assert kept.store(1, memoryview(block_of(source, 1))) is False


def test_an_object_is_kept_though_room_is_being_made_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two threads open it at a start, and one of them has begun to count what is there."""
    source = make_source(tmp_path, 8 * BLOCK)
    looking, go_on = threading.Event(), threading.Event()
    shrink = eviction.shrink

    def slow(*limits: object) -> int:
        looking.set()
        assert go_on.wait(60)
        return shrink(*limits)

    monkeypatch.setattr(eviction, "shrink", slow)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache, ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.open, source)
        assert looking.wait(60)
        try:
            with cache.open(source) as kept:
                fill(kept, source, range(8))
                assert kept.missing(0, 8) == []
        finally:
            go_on.set()
        with first.result(60) as kept:
            assert kept.missing(0, 8) == []
        assert counted(cache) >= cache.used_bytes()


def test_a_lost_or_wrong_count_is_made_again(tmp_path: Path):
    source = make_source(tmp_path, 64 * BLOCK)
    with NodeCache.at(str(tmp_path / "cache"), 100 * BLOCK) as cache, cache.open(source) as kept:
        for count, blocks in ((b"", range(20)), (b"\xff" * 8, range(20, 64))):
            Path(cache.directory, "usage").write_bytes(count)
            fill(kept, source, blocks)
        assert kept.missing(0, 64) == []


def test_what_killed_processes_left_is_cleared_and_nothing_else(tmp_path: Path):
    young, old, dead = eviction.NEW + "1" * 32, eviction.NEW + "2" * 32, eviction.DEAD + "3" * 32
    half = "4" * 40
    foreign = ["lost+found", "Documents", eviction.NEW + "1", half.upper().replace("4", "G")]
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache:
        for name in (young, old, dead, half, *foreign):
            folder = Path(cache.directory, name)
            folder.mkdir()
            (folder / "data").write_bytes(b"left")
        os.utime(Path(cache.directory, old), (1, 1))
        cache.used_bytes()
        assert {e.name for e in Path(cache.directory).iterdir()} == {"usage", young, *foreign}


def test_closing_twice_and_use_after_closing_are_harmless(tmp_path: Path):
    source = make_source(tmp_path, 2 * BLOCK)
    cache = NodeCache.at(str(tmp_path / "cache"), MANY)
    kept = cache.open(source)
    fill(kept, source, range(1))
    cache.close()
    cache.close()
    assert read(kept, source, 0) == block_of(source, 0)
    fill(kept, source, range(2))
    assert kept.missing(0, 2) == [1]
    kept.close()
    kept.close()
    assert read(kept, source, 0) is None
    assert not kept.present(0)
    assert kept.claim(0)
    kept.unclaim(0)
    assert not cache.open(source).usable


def test_too_many_open_files_are_no_reason_to_give_the_cache_up(tmp_path: Path):
    source = make_source(tmp_path, 2 * BLOCK)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache:
        cache.open(source).close()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            with cache.open(source) as kept:
                assert not kept.usable
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert cache.stopped == ""
        with cache.open(source) as kept:
            assert kept.usable


def test_too_many_open_files_while_room_is_made_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = make_source(tmp_path, 64 * BLOCK)
    old = make_source(tmp_path, 64 * BLOCK, seed=1)
    with NodeCache.at(str(tmp_path / "cache"), 100 * BLOCK) as cache:
        with cache.open(old) as kept:
            fill(kept, old, range(64))
        with cache.open(source) as kept:
            with monkeypatch.context() as patch:
                patch.setattr(eviction, "survey", no_descriptor)
                fill(kept, source, range(64))
                assert kept.missing(0, 64)
            assert cache.stopped == ""
            fill(kept, source, range(64))
            assert kept.missing(0, 64) == []


def test_a_limit_or_a_directory_that_cannot_be_used_is_told(tmp_path: Path):
    with pytest.raises(UsageError):
        NodeCache.at(str(tmp_path), 0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotFoundError, match="cache"):
        NodeCache.at(str(tmp_path / "file" / "cache"), MANY)


def test_a_directory_where_others_could_plant_blocks_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(AccessDeniedError, match="plant"):
        NodeCache.at(str(tmp_path / "open"), MANY)
    (tmp_path / "open").chmod(0o775)
    NodeCache.at(str(tmp_path / "open"), MANY).close()


def test_all_who_meet_a_full_disk_try_again_once_one_has_made_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The full disk is a fake: each thread's first write fails, all at one moment."""
    old, source = make_source(tmp_path, 8 * BLOCK, seed=1), make_source(tmp_path, 8 * BLOCK)
    together, once, write = threading.Barrier(4), threading.local(), cached_module.write_fully

    def full_at_first(fd: int, raw: memoryview, offset: int) -> None:
        if not getattr(once, "met", False):
            once.met = True
            together.wait(20)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, raw, offset)

    with NodeCache.at(str(tmp_path / "cache"), MANY) as cache:
        with cache.open(old) as kept:
            fill(kept, old, range(8))
        with cache.open(source) as kept, ThreadPoolExecutor(4) as pool:
            monkeypatch.setattr(cached_module, "write_fully", full_at_first)
            list(pool.map(lambda index: fill(kept, source, range(index, index + 1)), range(4)))
            assert kept.missing(0, 4) == []
        assert cache.stopped == ""
