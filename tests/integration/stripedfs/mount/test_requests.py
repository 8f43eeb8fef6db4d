"""How much a mounted folder asks of its store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.fuse.operations import ROOT
from bootseer.storage.store import BlockLocation, Stat
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.mount import read_tree as trees
from tests.support.faulty_store import WrappedStore
from tests.support.mounts.checkpoints import content, put_bytes, store_of, tree_at
from tests.support.mounts.fuse import mounted

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    with Fetcher() as fetcher:
        yield fetcher


class Counted(WrappedStore):
    """Counts what a store is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(store_of(root))
        self.asked: Counter[str] = Counter()

    def locations(self, name: str) -> list[BlockLocation]:
        self.asked["places"] += 1
        return self.inner.locations(name)

    def list(self, folder: str) -> Iterator[Stat]:
        self.asked["list"] += 1
        return self.inner.list(folder)

    def temporaries(self, folder: str) -> Iterator[Stat]:
        self.asked["list"] += 1
        return self.inner.temporaries(folder)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        self.asked["CURRENT" if name.endswith("/CURRENT") else "read"] += 1
        return self.inner.read(name, limit_bytes=limit_bytes)

    def stat(self, name: str) -> Stat:
        self.asked["stat"] += 1
        return self.inner.stat(name)


def test_a_long_listing_opens_no_file(tmp_path: Path, fetcher: Fetcher) -> None:
    """`ls -l` asks for attributes and ACLs of each file, `listxattr` for the names of ours."""
    counted = Counted(tmp_path / "store")
    for number in range(100):
        put_bytes(counted.inner, f"s{number:03}", content(20), tmp_path)
    tree = tree_at(trees.StripedTree, counted, "", fetcher)
    with mounted(tree, tmp_path / "mnt") as (directory, _):

        def look(*words: str) -> Counter[str]:
            counted.asked.clear()
            listed = subprocess.run(words, capture_output=True, check=True, timeout=60)
            assert listed.stdout.count(b"s0") >= 100
            return Counter(counted.asked)

        once = Counter({"list": 2, "CURRENT": 100})
        assert look("ls", "-l", str(directory)) == once
        names = (
            "import os, sys; print([(p, os.listxattr(p)) for p in map(os.fsencode, sys.argv[1:])])"
        )
        assert not look(sys.executable, "-c", names, *map(str, sorted(directory.iterdir())))
        assert not look("ls", "-l", str(directory))


def test_a_checkpoint_that_was_not_published_anew_is_not_asked_for_again(
    tmp_path: Path, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(tmp_path / "store")
    for number in range(10):
        put_bytes(counted.inner, f"s{number}", content(20), tmp_path)
    tree = tree_at(trees.StripedTree, counted, "", fetcher)
    monkeypatch.setattr(trees, "REFRESH_S", -1.0)
    monkeypatch.setattr(pointer, "TICK_S", 0.0)

    def pointers() -> int:
        """How many were read for a listing, while each is due at once."""
        counted.asked.clear()
        assert len(tree.readdir(ROOT)) == 10
        return counted.asked["CURRENT"]

    assert [pointers() for _ in range(4)] == [10, 10, 0, 0]
    for _ in range(2):
        put_bytes(counted.inner, "s3", content(30), tmp_path)
        assert [pointers() for _ in range(3)] == [1, 1, 0]
        assert tree.lookup(ROOT, b"s3").size_bytes == 30
    monkeypatch.setattr(pointer, "TRUST_S", -1.0)
    assert pointers() == 10


def test_two_publications_in_one_tick_of_a_stores_clock_are_told_apart(
    tmp_path: Path, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FAKE clock of the store: it stands still, so only the wait for a tick can help."""
    counted = Counted(tmp_path / "store")
    put_bytes(counted.inner, "x", content(20), tmp_path)
    tree = tree_at(trees.StripedTree, counted, "", fetcher)
    monkeypatch.setattr(trees, "REFRESH_S", -1.0)
    for size in (20, 30):
        put_bytes(counted.inner, "x", content(size), tmp_path)
        os.utime(tmp_path / "store/x.stripes", (5, 5))
        assert tree.lookup(ROOT, b"x").size_bytes == size
        assert tree.lookup(ROOT, b"x").size_bytes == size
