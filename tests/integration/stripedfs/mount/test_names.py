"""Names of a mounted folder whose store is slow, in part unreadable, or gone."""

from __future__ import annotations

import errno
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import AccessDeniedError, DeadlineError, StoreUnavailableError
from bootseer.fuse.operations import ROOT, FileSystemError, Inode
from bootseer.storage.retry import limited, retry_call
from bootseer.storage.store import Stat
from bootseer.stripedfs.mount import read_tree as trees
from bootseer.stripedfs.read import namespace
from tests.support.faulty_store import WrappedStore
from tests.support.mounts.checkpoints import content, put_bytes, store_of, tree_at
from tests.support.mounts.fuse import in_time, mounted, python
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

UNKNOWN = Inode(12345)


class Listings(WrappedStore):
    """A FAKE store, for fault injection: counts listings, hides folders, waits, or is away."""

    def __init__(self, root: Path) -> None:
        super().__init__(store_of(root))
        self.listed: list[str] = []
        self.hidden: set[str] = set()
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def list(self, folder: str) -> Iterator[Stat]:
        self.listed.append(folder)
        assert self.gate.wait(60)
        if folder in self.hidden:
            raise AccessDeniedError(f"{folder} is not for you; ask its owner")
        if self.away:
            raise StoreUnavailableError("the store is away; wait")
        return self.inner.list(folder)


@pytest.fixture
def store(tmp_path: Path) -> Listings:
    for number in range(6):
        folder = tmp_path / "store" / f"d{number}"
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "x").write_bytes(content(number + 1))
    return Listings(tmp_path / "store")


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    with Fetcher() as fetcher:
        yield fetcher


def inode_at(tree: trees.StripedTree, *parts: str) -> Inode:
    inode = ROOT
    for part in parts:
        inode = tree.lookup(inode, part.encode()).inode
    return inode


def refused(tree: trees.StripedTree, inode: Inode) -> int | None:
    with pytest.raises(FileSystemError) as caught:
        tree.getattr(inode)
    return caught.value.errno


# --- inodes of a process before this one --------------------------------------------------------


def test_a_folder_that_cannot_be_read_hides_no_inode_but_its_own(
    store: Listings, fetcher: Fetcher
) -> None:
    inode = inode_at(tree_at(trees.StripedTree, store, "", fetcher), "d3", "deep", "x")
    for hidden in ("d0", "d5"):
        store.hidden = {hidden, f"{hidden}/deep"}
        tree = tree_at(trees.StripedTree, store, "", fetcher)
        assert tree.getattr(inode).size_bytes == 4
        assert refused(tree, UNKNOWN) == errno.EIO  # it may be in the one that cannot be read


def test_the_search_for_an_inode_is_bounded_and_not_repeated(
    store: Listings, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MOST_SURVEYED", 4)
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    assert refused(tree, UNKNOWN) == errno.ESTALE
    assert len(store.listed) == 4
    assert refused(tree, UNKNOWN) == errno.ESTALE
    assert len(store.listed) == 4


def test_the_search_for_an_inode_keeps_the_deadline(
    store: Listings, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_at(trees.StripedTree, store, "", fetcher, deadline_s=0.2)
    slow = store.inner.temporaries
    monkeypatch.setattr(store, "temporaries", lambda f: (time.sleep(0.15), slow(f))[1])
    assert refused(tree, UNKNOWN) == errno.ESTALE
    assert len(store.listed) < 5


def test_what_this_process_dropped_is_not_searched_for(
    store: Listings, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    inode = inode_at(tree, "d3", "deep", "x")
    monkeypatch.setattr(trees, "REFRESH_S", -1.0)
    shutil.rmtree(Path(store.url.removeprefix("file://")) / "d3")
    tree.forget(inode, 1)
    tree.readdir(ROOT)
    asked = len(store.listed)
    assert refused(tree, inode) == errno.ESTALE
    assert len(store.listed) == asked


# --- listings -----------------------------------------------------------------------------------


def test_one_asks_and_the_others_have_what_was_known(
    store: Listings, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    tree.readdir(ROOT)
    monkeypatch.setattr(trees, "REFRESH_S", -1.0)
    store.gate.clear()
    store.away = True
    asked = len(store.listed)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tree.lookup, ROOT, b"d0")
        until(lambda: len(store.listed) > asked)
        for number in range(6):
            in_time(lambda name=b"d%d" % number: tree.lookup(ROOT, name), 20)
        assert not first.done()
        store.gate.set()
        assert first.result(60).inode == inode_at(tree, "d0")
    assert len(store.listed) == asked + 1  # and nobody asks again at once


def test_a_store_that_is_away_costs_one_folder_its_time(
    store: Listings, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    folders = [inode_at(tree, f"d{number}") for number in range(6)]
    for folder in folders:
        tree.readdir(folder)
    monkeypatch.setattr(trees, "REFRESH_S", -1.0)
    store.away = True
    asked = len(store.listed)
    for folder in folders:
        assert [e.name for e in tree.readdir(folder)] == [b"deep"]
    assert len(store.listed) == asked + 1


def test_who_waits_for_the_first_listing_shares_its_failure(
    store: Listings, fetcher: Fetcher
) -> None:
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    store.gate.clear()
    store.away = True

    def look() -> int | None:
        try:
            tree.lookup(ROOT, b"d0")
        except FileSystemError as error:
            return error.errno
        return None

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(look) for _ in range(4)]
        until(lambda: store.listed and pool._work_queue.qsize() == 0)
        time.sleep(0.3)
        store.gate.set()
        assert [each.result(60) for each in waiting] == [errno.EIO] * 4
    assert len(store.listed) == 1
    store.away = False
    assert tree.lookup(ROOT, b"d0").inode


def test_a_node_that_vanishes_while_it_is_listed_is_left_out(
    store: Listings, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    listing = tree.listing

    def raced(node: trees.Node) -> object:
        listed = listing(node)
        if not node.path:
            tree.nodes.drop(listed[b"d2"])  # as another thread's refresh would
        return listed

    monkeypatch.setattr(tree, "listing", raced)
    assert [e.name for e in tree.readdir(ROOT)] == [b"d0", b"d1", b"d3", b"d4", b"d5"]
    with pytest.raises(FileSystemError) as caught:
        tree.lookup(ROOT, b"d2")
    assert caught.value.errno == errno.ENOENT


def test_many_entries_are_taken_in_quickly(tmp_path: Path, fetcher: Fetcher) -> None:
    """By counting: what is compared for each entry must not grow with their number."""
    tree = tree_at(trees.StripedTree, store_of(tmp_path), "", fetcher)
    compared = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    found = [namespace.PathInfo(f"f{n:05d}", n, 1.0, False) for n in range(3000)]
    listed = tree.nodes.fill(tree.nodes.root, found, {})
    tree.nodes.root.children = {name: Counted(inode) for name, inode in listed.items()}  # type: ignore[misc]
    tree.nodes.fill(tree.nodes.root, found[1:], {})
    assert compared < 100_000
    assert len(tree.nodes.all()) == 3000  # the root, and one is gone


# --- who asks is killed -------------------------------------------------------------------------

LOOKS = {
    "lookup": "os.stat(sys.argv[1] + '/d0/deep')",
    "open": "os.open(sys.argv[1] + '/d0/deep/x', os.O_RDONLY)",
    "opendir": "os.listdir(sys.argv[1] + '/d0')",
}


@pytest.mark.parametrize("look", LOOKS)
def test_who_waits_for_names_can_be_killed(
    store: Listings, fetcher: Fetcher, tmp_path: Path, look: str
) -> None:
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    tree.readdir(ROOT)
    if look == "open":
        tree.readdir(inode_at(tree, "d0", "deep"))
    hangs = store.inner.stat if look == "open" else None

    def stat(name: str) -> Stat:
        store.listed.append(name)
        assert store.gate.wait(60)
        assert hangs is not None
        return hangs(name)

    if look == "open":
        store.stat = stat  # type: ignore[method-assign]
    with mounted(tree, tmp_path / "mnt", timeout_s=0.0) as (directory, faults):
        asked = len(store.listed)
        store.gate.clear()
        with python(LOOKS[look], directory) as asker:
            try:
                until(lambda: len(store.listed) > asked)
                time.sleep(0.2)
                asker.kill()
                assert in_time(lambda: asker.wait(30), 40) == -signal.SIGKILL
                assert not store.gate.is_set()
            finally:
                store.gate.set()
        until(lambda: not tree.files.by_handle)  # what came too late was taken back
        assert in_time((directory / "d0" / "deep" / "x").read_bytes) == content(1)
        assert faults == []


# --- the time that one request may take ---------------------------------------------------------


def test_a_limit_holds_for_all_calls_of_a_request() -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise StoreUnavailableError("away; wait")

    began_s = time.monotonic()
    with limited(0.2), limited(100.0):
        with pytest.raises(StoreUnavailableError):
            retry_call(fail, retry_s=100.0)
        time.sleep(max(0.0, 0.25 - (time.monotonic() - began_s)))
        before = calls
        with pytest.raises(DeadlineError):
            retry_call(fail, retry_s=100.0)
        assert calls == before
    assert retry_call(lambda: 5, retry_s=0.0) == 5


def test_a_limit_holds_for_calls_made_in_parallel() -> None:
    from bootseer.stripedfs.workers import call_in_parallel

    with limited(-1.0), pytest.raises(DeadlineError):
        call_in_parallel(lambda n: retry_call(lambda: n, retry_s=5.0), [1, 2, 3])


def test_a_checkpoint_that_is_replaced_brings_its_own_names(
    tmp_path: Path, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory checkpoint below a folder: its names are of one version, also deep in it."""
    from bootseer.stripedfs.write.put import put_into
    from tests.support.mounts.checkpoints import SMALL

    monkeypatch.setattr(trees, "REFRESH_S", -1.0)
    store = store_of(tmp_path / "store")
    tree = tree_at(trees.StripedTree, store, "", fetcher)
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / name).write_bytes(content(9))
        put_into(store, "run", str(folder), settings=SMALL)
        deep = inode_at(tree, "run", "deep")
        assert [e.name.decode() for e in tree.readdir(deep)] == [name]
    put_bytes(store, "run", content(5), tmp_path)
    assert [e.attr.size_bytes for e in tree.readdir(ROOT)] == [5]
