"""The fetcher over the node cache: alone, with a full or a spoiled cache, with other processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.cache import eviction, present_index
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch import planner
from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
from tests.support.mounts.tmpfs import tmpfs
from tests.support.paths import TESTS
from tests.support.programs.cache_fetch_worker import CountingStore, requests
from tests.support.samples.block_sources import FileSource, some_bytes

pytestmark = pytest.mark.slow

WORKER = TESTS / "support/programs/cache_fetch_worker.py"
BLOCK = 64 << 10
SIZE = 96 * BLOCK - 77


class Place:
    """An object, a cache and a log of requests in one folder."""

    def __init__(self, folder: Path, size: int = SIZE) -> None:
        self.folder = folder
        self.object = folder / "object"
        self.object.write_bytes(some_bytes(size))
        self.log = folder / "log"
        self.cache = folder / "cache"
        self.digest = hashlib.sha256(self.object.read_bytes()).hexdigest()

    def source(self, **options: Any) -> FileSource:
        source = FileSource(self.object, block_bytes=BLOCK, **options)
        source.store = CountingStore(source.store, str(self.log), 0.0, 0.0)  # type: ignore[assignment]
        return source

    def start(self, **changed: object) -> subprocess.Popen[str]:
        words = {
            "path": str(self.object),
            "cache": str(self.cache),
            "log": str(self.log),
            "latency_s": 0.002,
            "bytes_per_s": 64 << 20,
            "block_bytes": BLOCK,
            "memory_bytes": 32 << 20,
            "chunk_bytes": 1 << 20,
            **changed,
        }
        script = [sys.executable, str(WORKER), json.dumps(words)]
        return subprocess.Popen(script, stdout=subprocess.PIPE, text=True)

    def fetched_bytes(self) -> int:
        return sum(length for _, length in requests(self.log))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_object_that_could_not_be_opened_is_asked_for_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has it alone, as who evicts its end does."""
    monkeypatch.setattr(planner, "REOPEN_S", 0.2)
    source, buffer = place.source(), bytearray(SIZE)
    identity = present_index.identity_of(source)
    assert identity is not None
    with NodeCache.at(str(place.cache), 1 << 30) as cache:
        cache.open(source).close()
        with Fetcher(cache=cache) as fetcher:
            with open(place.cache / identity.folder / "present", "rb") as present:
                fcntl.flock(present, fcntl.LOCK_EX)
                fetcher.read_into(source, 0, memoryview(buffer)[:BLOCK])
            time.sleep(0.3)
            fetcher.read_into(source, 0, buffer)
        with cache.open(source) as kept:
            assert kept.missing(1, 95) == []
    assert buffer == place.object.read_bytes()


def finish(workers: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    try:
        texts = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [worker.returncode for worker in workers] == [0] * len(workers)
    return [json.loads(text.splitlines()[-1]) for text in texts]


def read_all(place: Place, source: FileSource, cache: NodeCache) -> dict[str, int]:
    """Read the whole through a new fetcher, compare it, and give its counters."""
    buffer = bytearray(SIZE)
    with Fetcher(FetchSettings(memory_bytes=8 << 20), cache=cache) as fetcher:
        assert fetcher.read_into(source, 0, memoryview(buffer)) == SIZE  # type: ignore[arg-type]
    total = fetcher.stats.total()  # of requests that have ended
    assert hashlib.sha256(buffer).hexdigest() == place.digest
    return {"requests": total.requests, "bytes": total.bytes, "hits": total.cache_hits}


def test_the_second_start_asks_the_store_for_nothing(place: Place):
    with NodeCache.at(str(place.cache), 1 << 30) as cache:
        first = read_all(place, place.source(), cache)
        assert first["bytes"] == SIZE
        second = read_all(place, place.source(), cache)
    assert second == {"requests": 0, "bytes": 0, "hits": 96}


def test_without_a_key_nothing_is_reused(place: Place):
    with NodeCache.at(str(place.cache), 1 << 30) as cache:
        for _ in range(2):
            assert read_all(place, place.source(key=""), cache)["bytes"] == SIZE


def kept_whole(place: Place, checked: bool, cache: NodeCache) -> None:
    """Read until every block is kept: whoever does not get a lock at once does without."""
    for _ in range(5):
        if read_all(place, place.source(checked=checked), cache)["hits"] == 96:
            return
    raise AssertionError("some block is never kept")


@pytest.mark.parametrize("checked", [True, False])
def test_a_corrupt_cached_block_is_fetched_again(place: Place, checked: bool):
    with NodeCache.at(str(place.cache), 1 << 30) as cache:
        source = place.source(checked=checked)
        kept_whole(place, checked, cache)
        identity = present_index.identity_of(source)  # type: ignore[arg-type]
        assert identity is not None
        with open(place.cache / identity.folder / "data", "r+b") as data:
            data.seek(17 * BLOCK + 5)
            data.write(b"!")
        again = read_all(place, place.source(checked=checked), cache)
        assert again == {"requests": 1, "bytes": BLOCK, "hits": 95}
        kept_whole(place, checked, cache)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_fetch_each_block_once(place: Place, count: int):
    found = finish([place.start() for _ in range(count)])
    assert [one["digest"] for one in found] == [place.digest] * count
    assert place.fetched_bytes() == SIZE
    assert sum(one["bytes"] for one in found) == SIZE
    assert sum(one["cache_hits"] for one in found) == 96 * (count - 1)


def fetching(place: Place, worker: subprocess.Popen[str]) -> None:
    """Wait until a worker has claimed blocks and waits for its store."""
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    while not requests(place.log):
        assert worker.poll() is None
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_who_fetches_and_stops_holds_nobody_up(place: Place, number: int):
    stuck = place.start(latency_s=600)
    try:
        fetching(place, stuck)
        stuck.send_signal(number)
        (found,) = finish([place.start()])
        assert found["digest"] == place.digest
    finally:
        stuck.kill()
        stuck.communicate()


def kill_loop(place: Place, rounds: range) -> None:
    for seed in rounds:
        chance = random.Random(seed)
        workers = [place.start(bytes_per_s=16 << 20) for _ in range(2)]
        try:
            fetching(place, workers[0])
            time.sleep(chance.uniform(0.0, 0.1))
            workers[0].kill()
            assert workers[0].wait() == -signal.SIGKILL
            (found,) = finish(workers[1:])
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
        assert found["digest"] == place.digest
        with NodeCache.at(str(place.cache), 1 << 30) as cache:
            assert read_all(place, place.source(), cache)["bytes"] == 0
            assert cache.corrupt_blocks == 0
        subprocess.run(["rm", "-r", place.cache], check=True)
        os.unlink(place.log)


def test_kill_9_while_two_fetch(place: Place):
    kill_loop(place, range(3))


@pytest.mark.soak
def test_kill_9_while_two_fetch_many_times(place: Place):
    kill_loop(place, range(60))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that holds a third of the object."""
    with tmpfs(tmp_path / "disk", "2m") as folder:
        yield folder


@pytest.mark.root
def test_a_full_cache_disk_costs_speed_only(place: Place, small_disk: Path):
    told: list[str] = []
    place.cache = small_disk / "cache"
    with NodeCache.at(str(place.cache), 1 << 30, on_stop=told.append) as cache:
        assert read_all(place, place.source(), cache)["bytes"] == SIZE
        assert len(told) == 1
        again = read_all(place, place.source(), cache)
        assert 10 < again["hits"] < 40
        assert again["bytes"] == SIZE - again["hits"] * BLOCK
    assert len(told) == 1


def test_what_another_thread_takes_back_is_no_room_that_was_made(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """Injected: each survey finds less than the one before, although all of it is in use."""
    survey, surveys = eviction.survey, itertools.count()

    def shrinking(directory: str) -> list[eviction.Usage]:
        less = next(surveys) * 4096
        return [usage._replace(used_bytes=usage.used_bytes - less) for usage in survey(directory)]

    told: list[str] = []
    with (
        NodeCache.at(str(place.cache), 1 << 30, on_stop=told.append) as cache,
        cache.open(place.source()) as kept,
    ):
        assert kept.store(0, memoryview(bytearray(BLOCK)))
        monkeypatch.setattr(eviction, "survey", shrinking)
        assert not cache.handle_write_fault(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert next(surveys) > 0
    assert len(told) == 1


@pytest.mark.root
def test_a_cache_disk_that_vanishes_costs_speed_only(place: Place, tmp_path: Path):
    place.cache = tmp_path / "gone"
    with NodeCache.at(str(place.cache), 1 << 30) as cache:
        read_all(place, place.source(), cache)
        subprocess.run(["rm", "-r", place.cache], check=True)
        assert read_all(place, place.source(), cache)["bytes"] == SIZE
