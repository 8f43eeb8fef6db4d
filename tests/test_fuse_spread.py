"""Receiving threads that answer small reads have processors of their own; others share all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from fuse_mounts import in_time, mounted

from bootseer.fuse.localtree import LocalTree
from bootseer.fuse.spread import SAMPLE_READS, SMALL_BYTES, Spread
from bootseer.fuse.wire import Opcode

READ, LOOKUP = int(Opcode.READ), int(Opcode.LOOKUP)
SIZE_BYTES = 1 << 20


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Where the thread was sent, on a machine of six processors."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8, 9})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mask: found.append(set(mask)))
    return found


def feed(one: Spread, size: int, times: int, opcode: int = READ) -> None:
    for _ in range(times):
        one.sample(opcode, size)


def test_each_thread_has_a_share_and_together_they_have_all(moved: list[set[int]]) -> None:
    for number in range(2):
        feed(Spread(number, 2), 4096, 10)
    assert moved == [{0, 2, 8}, {1, 3, 9}]


def test_one_large_read_gives_all_back(moved: list[set[int]]) -> None:
    one = Spread(1, 3)
    feed(one, SMALL_BYTES, 10)
    feed(one, SMALL_BYTES + 1, 3)
    feed(one, SMALL_BYTES, 10)
    assert moved == [{1, 8}, {0, 1, 2, 3, 8, 9}, {1, 8}]


def test_small_reads_must_come_in_turn(moved: list[set[int]]) -> None:
    one = Spread(0, 2)
    for _ in range(10):
        feed(one, 4096, 3)
        feed(one, 1 << 20, 1)
    assert moved == []


def test_what_is_no_read_counts_for_nothing(moved: list[set[int]]) -> None:
    one = Spread(0, 2)
    feed(one, 0, 10, LOOKUP)
    assert moved == []
    feed(one, 4096, 10)
    feed(one, 1 << 30, 10, LOOKUP)
    assert moved == [{0, 2, 8}]


@pytest.mark.parametrize("threads", [1, 7])
def test_without_a_processor_for_each_nothing_is_done(moved: list[set[int]], threads: int) -> None:
    feed(Spread(0, threads), 4096, 10)
    assert moved == []


def test_processors_that_are_no_longer_ours_are_left_alone(
    moved: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(_: int, mask: Collection[int]) -> None:
        asked.append(len(mask))
        raise OSError(22, "not one of these")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    one = Spread(0, 2)
    for _ in range(3):
        feed(one, 4096, 10)
        feed(one, 1 << 20, 1)
    assert asked == [3]


@pytest.mark.root
def test_a_mounts_threads_part_for_small_reads_and_meet_again(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(os.urandom(SIZE_BYTES))
    with (
        LocalTree(tmp_path / "source", direct=True) as tree,
        mounted(tree, tmp_path / "mount") as (place, faults),
    ):
        (all_of_them,) = {frozenset(each) for each in receiving_on()}
        one = len(all_of_them) == 1  # which has no shares
        read_until(place / "file", 4096, lambda: one or not set.intersection(*receiving_on()))
        assert set.union(*receiving_on()) == all_of_them
        read_until(place / "file", 65536, lambda: receiving_on() == [all_of_them] * 2)
        assert faults == []


def receiving_on() -> list[set[int]]:
    """The processors of each receiving thread of this process."""
    threads = (t for t in threading.enumerate() if t.name in ("fuse-0", "fuse-1"))
    return [os.sched_getaffinity(t.native_id or 0) for t in threads]


def read_until(path: Path, size: int, done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60

    def some() -> None:
        with path.open("rb", buffering=0) as file:
            for number in range(2 * SAMPLE_READS):
                offset = number * size % SIZE_BYTES
                assert len(os.pread(file.fileno(), size, offset)) == size

    while not done():
        assert time.monotonic() < end_s
        in_time(some)


@pytest.mark.root
def test_a_tree_whose_reads_may_start_threads_keeps_them_together(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(bytes(SIZE_BYTES))
    rounds = iter(range(20))
    with (
        LocalTree(tmp_path / "source", direct=True, mapped=False) as tree,
        mounted(tree, tmp_path / "mount") as (place, faults),
    ):
        before = receiving_on()
        read_until(place / "file", 4096, lambda: next(rounds) == 19)
        assert receiving_on() == before
        assert faults == []
