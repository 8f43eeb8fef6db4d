"""What is changed through a mount while its folder is just being read from the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.fuse.operations import ROOT, Handle, Inode
from bootseer.stripedfs.mount import write_tree
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo
from tests.support.mounts.checkpoints import content, store_of, tree_at

Change = Callable[[], object]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[write_tree.WritableTree]:
    (tmp_path / "store" / "kept").mkdir(parents=True)
    (tmp_path / "store" / "kept" / "in").write_bytes(b"in")
    (tmp_path / "store" / "old").write_bytes(b"old")
    (tmp_path / "store" / "full").mkdir()
    with Fetcher() as fetcher:
        yield tree_at(write_tree.WritableTree, store_of(tmp_path / "store"), "", fetcher)


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do something once the store has answered the next listing, before the mount knows it."""
    waiting: list[Change] = []
    real = namespace.list_folder

    def late(*words: object) -> list[PathInfo]:
        found = real(*words)  # type: ignore[arg-type]
        if waiting:
            waiting.pop(0)()
        return found

    monkeypatch.setattr(namespace, "list_folder", late)

    def later(*changes: Change) -> None:
        waiting.extend(changes)

    return later


def shown(tree: write_tree.WritableTree, folder: Inode = ROOT) -> set[bytes]:
    return {entry.name for entry in tree.readdir(folder)}


def save(tree: write_tree.WritableTree, name: bytes, data: bytes, folder: Inode = ROOT) -> None:
    attr, opened = tree.create(folder, name, 0o644, os.O_WRONLY)
    tree.write(attr.inode, opened.handle, 0, memoryview(data))
    tree.flush(attr.inode, opened.handle)
    tree.release(attr.inode, opened.handle)


def stale(tree: write_tree.WritableTree) -> None:
    """The next listing asks the store."""
    tree.nodes.root.listed_s = 0.0


def test_what_is_made_during_a_listing_is_there_at_once(
    tree: write_tree.WritableTree, during: Callable[..., None]
) -> None:
    assert shown(tree) == {b"kept", b"old", b"full"}
    changes: list[tuple[Change, set[bytes]]] = [
        (lambda: save(tree, b"new", content(1000)), {b"kept", b"old", b"full", b"new"}),
        (lambda: tree.mkdir(ROOT, b"dir", 0o755), {b"kept", b"old", b"full", b"new", b"dir"}),
        (lambda: save(tree, b"old", content(2000)), {b"kept", b"old", b"full", b"new", b"dir"}),
        (lambda: tree.unlink(ROOT, b"new"), {b"kept", b"old", b"full", b"dir"}),
        (
            lambda: tree.rename(ROOT, b"old", ROOT, b"moved", 0),
            {b"kept", b"moved", b"full", b"dir"},
        ),
        (lambda: tree.rmdir(ROOT, b"full"), {b"kept", b"moved", b"dir"}),
    ]
    for change, wanted in changes:
        stale(tree)
        during(change)
        assert shown(tree) == wanted
        assert shown(tree) == wanted
    assert tree.lookup(ROOT, b"moved").size_bytes == 2000


def test_a_file_being_saved_stays_through_a_listing(
    tree: write_tree.WritableTree, during: Callable[..., None]
) -> None:
    assert b"new" not in shown(tree)
    handle = Handle(0)
    inode = Inode(0)

    def begin() -> None:
        nonlocal handle, inode
        attr, opened = tree.create(ROOT, b"new", 0o644, os.O_WRONLY)
        handle, inode = opened.handle, attr.inode

    def go_on() -> None:
        tree.write(inode, handle, 0, memoryview(b"data"))

    for change in (begin, go_on, lambda: tree.flush(inode, handle)):
        stale(tree)
        during(change)
        assert b"new" in shown(tree)
    tree.release(inode, handle)
    assert tree.lookup(ROOT, b"new").size_bytes == 4


def test_all_that_is_changed_during_a_listing_holds(
    tree: write_tree.WritableTree, during: Callable[..., None]
) -> None:
    """One answer of the store is enough, however much is done meanwhile."""
    assert shown(tree) == {b"kept", b"old", b"full"}
    asked = 0

    def many() -> None:
        nonlocal asked
        asked += 1
        for number in range(20):
            save(tree, b"new%d" % number, b"new")
        for number in range(5):
            tree.unlink(ROOT, b"new%d" % number)
        tree.unlink(ROOT, b"old")

    stale(tree)
    during(many, many)
    wanted = {b"kept", b"full", *(b"new%d" % number for number in range(5, 20))}
    assert shown(tree) == wanted
    assert shown(tree) == wanted
    assert asked == 1


def test_a_name_that_was_found_before_it_was_made_is_one_file(
    tree: write_tree.WritableTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing sees a folder on the store in the moment between its making and its telling."""
    assert b"dir" not in shown(tree)
    real = write_tree.WritableTree._new

    def slow(self: write_tree.WritableTree, *words: object, **options: object) -> object:
        stale(self)
        assert b"dir" in shown(self)
        return real(self, *words, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(write_tree.WritableTree, "_new", slow)
    made = tree.mkdir(ROOT, b"dir", 0o755).inode
    assert tree.lookup(ROOT, b"dir").inode == made
    assert len([node for node in tree.nodes.all() if node.name == b"dir"]) == 1
    save(tree, b"in", b"in", made)
    assert shown(tree, made) == {b"in"}
