"""Fetching a checkpoint before a job reads it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.link_turns import HOT, LinkTurns
from bootseer.blocks.settings import FetchSettings
from bootseer.fuse.operations import ROOT
from bootseer.stripedfs.mount import expected_load, prefetch
from bootseer.stripedfs.mount.checkpoint_fill import fill_checkpoint
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.mount.settings import MountSettings
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import content, store_of, tree_at
from tests.support.page_cache import held_in_memory, page_cache_stays, share_in_memory
from tests.support.waiting import until

__all__ = ["page_cache_stays"]

LARGE = expected_load.SMALL_BYTES + 1


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    with Fetcher(FetchSettings(memory_bytes=64 << 20)) as made:
        yield made


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path / "events"))
    return tmp_path / "events"


def written(events: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line for file in events.glob("*.jsonl") for line in file.read_text().splitlines()]
    read = [json.loads(line) for line in lines]
    return [e for e in read if (e["event"], e["name"]) == (kind, prefetch.PHASE)]


def ends(events: Path) -> list[dict[str, Any]]:
    return written(events, "end")


def points(events: Path) -> list[dict[str, Any]]:
    return written(events, "point")


def put(root: Path, name: str, *sizes: int) -> None:
    source = root.parent / f"source-{name}"
    source.mkdir()
    for number, size in enumerate(sizes):
        (source / f"part-{number}").write_bytes(content(size, number))
    put_into(store_of(root), name, str(source))


def begun(tree: StripedTree, wanted: str = "", most_bytes: int | None = None) -> prefetch.Prefetch:
    work = prefetch.Prefetch(tree, wanted, most_bytes=most_bytes)
    tree.set_companion(work)
    work.start()
    return work


def wait(work: prefetch.Prefetch) -> None:
    until(lambda: not work._thread.is_alive(), "the prefetch has ended")


def test_all_bytes_are_there_before_anybody_reads(
    tmp_path: Path, fetcher: Fetcher, events: Path
) -> None:
    put(tmp_path / "s", "run", 3 * LARGE, 100, LARGE)
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "run", fetcher)
    work = begun(tree)
    wait(work)
    assert work.fetched_bytes == 4 * LARGE + 100
    # A request is counted once its bytes are there.
    until(lambda: fetcher.stats.total().bytes >= 4 * LARGE + 100, "all requests are counted")
    before = fetcher.stats.total().requests
    for node in expected_load.find_expected(tree, ""):
        buffer = bytearray(node.info.size_bytes)
        fetcher.read_into(tree.source(node), 0, buffer)
        assert bytes(buffer) == content(len(buffer), int(node.path[-1]))
    assert fetcher.stats.total().requests == before
    (end,) = ends(events)
    assert (end["status"], end["attributes"]["bootseer.bytes"]) == ("ok", 4 * LARGE + 100)
    tree.destroy()


def test_no_more_is_fetched_than_memory_keeps(
    tmp_path: Path, fetcher: Fetcher, events: Path
) -> None:
    put(tmp_path / "s", "run", LARGE, LARGE, LARGE)
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "run", fetcher)
    work = begun(tree, most_bytes=LARGE + 1000)
    wait(work)
    assert work.fetched_bytes == LARGE + 1000
    assert [end["status"] for end in ends(events)] == ["ok"]


def test_a_wrong_guess_is_dropped_and_reported(
    tmp_path: Path, fetcher: Fetcher, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching is held up until the other one is opened, or all could be there by then."""
    is_opened, fetch = threading.Event(), fetcher.prefetch

    def fetch_later(*arguments: Any) -> Any:
        assert is_opened.wait(10)
        return fetch(*arguments)

    monkeypatch.setattr(fetcher, "prefetch", fetch_later)
    monkeypatch.setattr(prefetch, "STEP_BYTES", LARGE // 8)
    for name in ("step-1", "step-2"):
        put(tmp_path / "s", name, 2 * LARGE)
    for name, at_s in (("step-1", 100), ("step-2", 200)):
        for path in (tmp_path / "s").glob(f"{name}*"):
            os.utime(path, (at_s, at_s))
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "", fetcher)
    (other,) = expected_load.find_expected(tree, "step-1")
    work = begun(tree, "step-*")
    until(lambda: work._expected is not None, "it knows what is expected")
    tree.open(other.inode, os.O_RDONLY)
    is_opened.set()
    wait(work)
    assert work.fetched_bytes <= LARGE // 8  # what had begun
    (end,) = ends(events)
    assert end["status"] == "fallback"
    reason = end["attributes"]["bootseer.reason"]
    assert reason == "the job loads step-1/part-0, not what was expected (step-*)"


def test_a_wrong_guess_is_reported_after_all_of_it_was_fetched(
    tmp_path: Path, fetcher: Fetcher, events: Path
) -> None:
    """Once; and not of a job that has opened what was expected, whatever else it opens."""
    for name in ("step-1", "step-2", "data"):
        put(tmp_path / "s", name, 2 * LARGE)
    for opened, reported in ((("step-1", "data"), 1), (("step-2", "data"), 0)):
        tree = tree_at(StripedTree, store_of(tmp_path / "s"), "", fetcher)
        work = begun(tree, "step-2")
        wait(work)
        before = len(points(events))
        for name in opened:
            (node,) = expected_load.find_expected(tree, name)
            tree.open(node.inode, os.O_RDONLY)
        tree.destroy()
        assert len(points(events)) == before + reported
    (point,) = points(events)
    reason = point["attributes"]["bootseer.reason"]
    assert reason == "the job loads step-1/part-0, not what was expected (step-2)"
    assert [end["status"] for end in ends(events)] == ["ok", "ok"]


def sealed(tmp_path: Path, size: int) -> tuple[Path, Path]:
    """A cache that holds a checkpoint which the kernel may read, and the file that it is in."""
    put(tmp_path / "s", "run", size)
    cache = tmp_path / "cache"
    url = f"file://{tmp_path}/s/run"
    settings = MountSettings(url=url, mountpoint="", cache=str(cache), prefetch="")
    with LinkTurns(str(tmp_path / "link")) as turns:
        fill_checkpoint(settings, turns)
    (data,) = cache.glob("*/data")
    return cache, data


@pytest.mark.usefixtures("page_cache_stays")
def test_all_of_what_the_kernel_reads_itself_is_read_ahead(
    tmp_path: Path, fetcher: Fetcher, events: Path
) -> None:
    size = 12 << 20  # of which the kernel reads 2 MiB at most at one request
    cache, data = sealed(tmp_path, size)
    with data.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert share_in_memory(data) < 0.1
    store = store_of(tmp_path / "s")
    tree = tree_at(StripedTree, store, "run", fetcher, passing_from=str(cache))
    work = begun(tree)
    wait(work)
    with held_in_memory([data]):
        pass
    assert work.fetched_bytes == size
    (end,) = ends(events)
    assert (end["status"], end["attributes"]["bootseer.bytes"]) == ("ok", size)
    assert fetcher.stats.total().requests == 0
    tree.destroy()


@pytest.mark.usefixtures("page_cache_stays")
def test_what_is_in_memory_is_not_read_ahead(
    tmp_path: Path, fetcher: Fetcher, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = sealed(tmp_path, 4 << 20)
    assert data.read_bytes()
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: asked.append(words[2]))
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "run", fetcher, passing_from=str(cache))
    work = begun(tree)
    wait(work)
    assert asked == []
    assert work.fetched_bytes == 4 << 20
    assert [end["status"] for end in ends(events)] == ["ok"]
    tree.destroy()


def test_a_wrong_guess_ends_what_is_read_ahead_on_this_node(
    tmp_path: Path, fetcher: Fetcher, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = sealed(tmp_path, 4 << 20)
    with data.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    put(tmp_path / "s", "other", 2 * LARGE)
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "", fetcher, passing_from=str(cache))
    (other,) = expected_load.find_expected(tree, "other")
    asked: list[int] = []

    def advise(_: int, offset: int, length: int, __: int) -> None:
        asked.append(length)
        if offset:
            tree.open(other.inode, os.O_RDONLY)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    work = begun(tree, "run")
    wait(work)
    assert asked == [prefetch.READ_AHEAD_BYTES] * 2
    assert work.fetched_bytes == sum(asked)
    assert [end["status"] for end in ends(events)] == ["fallback"]
    tree.destroy()


def test_small_files_beside_are_no_wrong_guess(
    tmp_path: Path, fetcher: Fetcher, events: Path
) -> None:
    put(tmp_path / "s", "step-1", 2 * LARGE)
    (tmp_path / "s" / "latest").write_text("step-1")
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "", fetcher)
    work = begun(tree, "@latest")
    pointer = tree.lookup(ROOT, b"latest")
    tree.open(pointer.inode, os.O_RDONLY)
    wait(work)
    assert [end["status"] for end in ends(events)] == ["ok"]
    assert work.fetched_bytes == 2 * LARGE


def test_a_store_that_fails_ends_it_with_the_reason(
    tmp_path: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "s", "run", 8 * LARGE)
    monkeypatch.setattr(prefetch, "STEP_BYTES", LARGE)
    settings = FetchSettings(memory_bytes=64 << 20, tries=1)
    with Fetcher(settings) as fetcher:
        tree = tree_at(StripedTree, store_of(tmp_path / "s"), "run", fetcher)
        (node,) = expected_load.find_expected(tree, "")
        tree.source(node)  # before its bytes go away
        for stripe in (tmp_path / "s").rglob("stripe-*"):
            os.truncate(stripe, 0)
        wait(begun(tree))
    (end,) = ends(events)
    assert (end["status"], end["attributes"]["bootseer.bytes"]) == ("fallback", 0)
    assert "requests in a row failed" in end["attributes"]["bootseer.reason"]


def test_nothing_that_is_there_is_no_fault(tmp_path: Path, fetcher: Fetcher, events: Path) -> None:
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "", fetcher)
    wait(begun(tree, "step-*"))
    assert [end["status"] for end in ends(events)] == ["ok"]


def test_a_name_that_is_not_there_is_reported(
    tmp_path: Path, fetcher: Fetcher, events: Path
) -> None:
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "", fetcher)
    wait(begun(tree, "@latest"))
    (end,) = ends(events)
    assert (end["status"], "there is no latest" in end["attributes"]["bootseer.reason"]) == (
        "fallback",
        True,
    )


def test_the_end_of_the_mount_ends_it(tmp_path: Path, fetcher: Fetcher, events: Path) -> None:
    put(tmp_path / "s", "run", 8 * LARGE)
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "run", fetcher)
    work = begun(tree)
    tree.destroy()
    assert not work._thread.is_alive()
    assert len(ends(events)) == 1


def test_it_waits_for_what_a_start_touches_sooner(
    tmp_path: Path, fetcher: Fetcher, events: Path
) -> None:
    put(tmp_path / "s", "run", 2 * LARGE)
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "run", fetcher)
    mine, others = LinkTurns.of(str(tmp_path)), LinkTurns.of(str(tmp_path))
    work = prefetch.Prefetch(tree, "", most_bytes=None, turns=mine)
    with others.holding(HOT):
        work.start()
        until(lambda: work._expected is not None, "it knows what is expected")
        time.sleep(0.2)
        assert work.fetched_bytes == 0
    wait(work)
    assert work.fetched_bytes == 2 * LARGE
