"""Listings in the middle of what changes a mounted folder: each is one that somebody else asks for.

The store is real; what is done at an unlucky moment is put there by wrapping our own functions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import StoreUnavailableError
from bootseer.fuse.operations import ROOT, FileSystemError, Handle, Inode
from bootseer.stripedfs.mount import write_tree
from bootseer.stripedfs.mount.open_for_writing import SaveState
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import content, store_of, tree_at


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / "in").write_bytes(b"in")
    (folder / "old").write_bytes(b"old")
    return folder


@pytest.fixture
def tree(store: Path) -> Iterator[write_tree.WritableTree]:
    with Fetcher() as fetcher:
        yield tree_at(write_tree.WritableTree, store_of(store), "", fetcher)


def shown(tree: write_tree.WritableTree, folder: Inode = ROOT) -> set[bytes]:
    return {entry.name for entry in tree.readdir(folder)}


def listed_anew(tree: write_tree.WritableTree) -> None:
    tree.nodes.root.listed_s = 0.0
    shown(tree)


def begin(
    tree: write_tree.WritableTree, name: bytes, data: bytes, folder: Inode
) -> tuple[Inode, Handle]:
    attr, opened = tree.create(folder, name, 0o644, os.O_WRONLY)
    tree.write(attr.inode, opened.handle, 0, memoryview(data))
    return attr.inode, opened.handle


def end(tree: write_tree.WritableTree, inode: Inode, handle: Handle) -> None:
    tree.flush(inode, handle)
    tree.release(inode, handle)


def save(tree: write_tree.WritableTree, name: bytes, data: bytes, folder: Inode = ROOT) -> None:
    end(tree, *begin(tree, name, data, folder))


def opened_empty(
    tree: write_tree.WritableTree, store: Path, flags: int = os.O_WRONLY
) -> tuple[Inode, Handle]:
    """A file without bytes, `empty` in the root, open for writing."""
    (store / "empty").write_bytes(b"")
    listed_anew(tree)
    inode = tree.lookup(ROOT, b"empty").inode
    return inode, tree.open(inode, flags).handle


def move_while_written(
    tree: write_tree.WritableTree, folder: Inode, name: bytes
) -> tuple[Inode, Handle]:
    """Begin to write a file anew, and rename it to `new` in the root."""
    inode = tree.lookup(folder, name).inode
    handle = tree.open(inode, os.O_WRONLY | os.O_TRUNC).handle
    tree.write(inode, handle, 0, memoryview(b"fresh"))
    tree.rename(folder, name, ROOT, b"new", 0)
    return inode, handle


def before(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object]
) -> None:
    """Do something in front of each call."""
    real = getattr(owner, name)

    def acting(*words: object, **options: object) -> object:
        act()
        return real(*words, **options)

    monkeypatch.setattr(owner, name, acting)


def after(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object]
) -> None:
    """Do something behind the first call."""
    real, todo = getattr(owner, name), [act]

    def acting(*words: object, **options: object) -> object:
        result = real(*words, **options)
        if todo:
            todo.pop()()
        return result

    monkeypatch.setattr(owner, name, acting)


def test_a_name_goes_with_whatever_node_it_has(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing gives a new file another inode, also while it is removed or renamed."""
    before(monkeypatch, rename_remove, "remove", lambda: listed_anew(tree))
    before(monkeypatch, rename_remove, "move", lambda: listed_anew(tree))
    save(tree, b"f", b"data")
    tree.unlink(ROOT, b"f")
    assert shown(tree) == {b"kept", b"old"}
    save(tree, b"g", b"data")
    tree.rename(ROOT, b"g", ROOT, b"h", 0)
    assert shown(tree) == {b"kept", b"old", b"h"}
    assert set(os.listdir(store)) == {"kept", "old", "h"}


def test_a_file_that_nobody_looked_at_is_replaced(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store / "target").write_bytes(b"target")
    listed_anew(tree)
    after(monkeypatch, rename_remove, "move", lambda: listed_anew(tree))
    tree.rename(ROOT, b"old", ROOT, b"target", 0)
    assert shown(tree) == {b"kept", b"target"}
    assert tree.lookup(ROOT, b"target").size_bytes == 3


@pytest.mark.parametrize("step", ["listing", "child"])
def test_a_file_that_is_replaced_while_it_is_looked_up_is_found(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Another host replaces it, and somebody else's listing drops what the first one found."""
    listed_anew(tree)

    def replaced() -> None:
        (store / "old").write_bytes(b"another one")
        listed_anew(tree)

    after(monkeypatch, tree, step, replaced)
    found = tree.lookup(ROOT, b"old")
    assert found.size_bytes == 11
    assert tree.getattr(found.inode).size_bytes == 11


def test_a_folder_that_is_renamed_while_it_is_listed_holds_its_own_files(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tree.lookup(ROOT, b"kept").inode
    after(
        monkeypatch, namespace, "list_folder", lambda: tree.rename(ROOT, b"kept", ROOT, b"moved", 0)
    )
    assert shown(tree, kept) == {b"in"}
    again = tree.mkdir(ROOT, b"kept", 0o755).inode
    save(tree, b"in", b"precious", again)
    moved = tree.lookup(ROOT, b"moved").inode
    assert moved == kept
    tree.unlink(moved, b"in")
    assert (store / "kept" / "in").read_bytes() == b"precious"
    assert not (store / "moved" / "in").exists()


def test_a_checkpoint_that_is_renamed_while_it_is_listed_is_the_new_one(
    tree: write_tree.WritableTree, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "w").write_bytes(content(100))
    put_into(store_of(store), "ckpt", str(tmp_path / "source"))
    inode = tree.lookup(ROOT, b"ckpt").inode
    after(
        monkeypatch, namespace, "load_tree", lambda: tree.rename(ROOT, b"ckpt", ROOT, b"final", 0)
    )
    assert shown(tree, inode) == {b"w"}
    final = tree.lookup(ROOT, b"final").inode
    node = tree.nodes.get(final)
    assert node is not None
    assert node.info.name == "final"
    assert shown(tree, final) == {b"w"}


@pytest.mark.parametrize("published", [False, True])
def test_a_name_that_a_file_was_moved_away_from_does_not_come_back(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    inode, handle = move_while_written(tree, ROOT, b"old")
    listed_anew(tree)
    assert shown(tree) == {b"kept", b"new"}
    if published:
        before(monkeypatch, rename_remove, "remove", lambda: listed_anew(tree))
        end(tree, inode, handle)
        assert shown(tree) == {b"kept", b"new"}
        assert set(os.listdir(store)) == {"kept", "new"}
    else:  # then what it replaced is what it was
        with pytest.raises(FileSystemError):
            tree.write(inode, handle, 99, memoryview(b"elsewhere"))
        with pytest.raises(FileSystemError):
            tree.flush(inode, handle)
        assert shown(tree) == {b"kept", b"old"}
        assert (store / "old").read_bytes() == b"old"


def test_another_file_under_a_name_that_was_moved_away_from_is_shown(
    tree: write_tree.WritableTree, store: Path
) -> None:
    inode, handle = move_while_written(tree, ROOT, b"old")
    save(tree, b"old", b"another")
    listed_anew(tree)
    assert shown(tree) == {b"kept", b"new", b"old"}
    end(tree, inode, handle)
    listed_anew(tree)
    assert shown(tree) == {b"kept", b"new", b"old"}
    assert (store / "old").read_bytes() == b"another"


def test_what_is_removed_before_its_first_byte_stays_removed(
    tree: write_tree.WritableTree, store: Path
) -> None:
    inode, handle = opened_empty(tree, store)
    tree.unlink(ROOT, b"empty")
    with pytest.raises(FileSystemError, match="ESTALE"):
        tree.write(inode, handle, 0, memoryview(b"late"))
    for close in (tree.flush, tree.release):
        with pytest.raises(FileSystemError):
            close(inode, handle)
    assert b"empty" not in shown(tree)
    assert not (store / "empty").exists()


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_APPEND])
def test_what_is_renamed_to_a_name_is_not_written_by_who_had_it_open(
    tree: write_tree.WritableTree, store: Path, flags: int
) -> None:
    inode, handle = opened_empty(tree, store, flags)
    tree.rename(ROOT, b"old", ROOT, b"empty", 0)
    with pytest.raises(FileSystemError, match="ESTALE"):
        tree.write(inode, handle, 0, memoryview(b"late"))
    with pytest.raises(FileSystemError):
        tree.release(inode, handle)
    assert (store / "empty").read_bytes() == b"old"


def test_what_is_written_in_the_middle_of_its_removal_is_removed(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode, handle = opened_empty(tree, store)
    late = lambda: tree.write(inode, handle, 0, memoryview(b"late"))  # noqa: E731
    after(monkeypatch, tree._writable, "finish_closed", late)
    tree.unlink(ROOT, b"empty")
    for close in (tree.flush, tree.release):
        with pytest.raises(FileSystemError):
            close(inode, handle)
    assert shown(tree) == {b"kept", b"old"}
    assert not (store / "empty").exists()


def test_a_file_whose_removal_fails_is_written_on(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode, handle = opened_empty(tree, store)

    def away() -> None:
        raise StoreUnavailableError("it is away; wait")

    with monkeypatch.context() as patched:
        before(patched, rename_remove, "remove", away)
        with pytest.raises(BaseException, match="EIO"):
            tree.unlink(ROOT, b"empty")
    tree.write(inode, handle, 0, memoryview(b"written"))
    end(tree, inode, handle)
    assert (store / "empty").read_bytes() == b"written"


def test_a_write_that_fails_during_a_removal_that_fails_stays_failed(
    tree: write_tree.WritableTree, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode, handle = opened_empty(tree, store)
    file, writing = tree._writable.by_handle[handle], threading.Event()

    def away() -> None:
        file.lock.acquire()  # as a write does that came just now
        writing.set()
        raise StoreUnavailableError("it is away; wait")

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        before(patched, rename_remove, "remove", away)
        removal = pool.submit(tree.unlink, ROOT, b"empty")
        assert writing.wait(60)
        try:
            assert not wait([removal], timeout=0.3).done  # it comes after the write
            with pytest.raises(FileSystemError, match="ESTALE"):
                file.write(0, memoryview(b"late"))
            tree._writable.give_up(file)
        finally:
            file.lock.release()
        with pytest.raises(FileSystemError, match="EIO"):
            removal.result(60)
    with pytest.raises(FileSystemError, match="ESTALE"):
        tree.write(inode, handle, 0, memoryview(b"later"))
    with pytest.raises(FileSystemError, match="ESTALE"):
        tree.release(inode, handle)
    assert file.state is SaveState.FAILED
    assert shown(tree) == {b"kept", b"old", b"empty"}
    save(tree, b"empty", b"again")
    assert (store / "empty").read_bytes() == b"again"


def test_a_folder_from_which_a_file_is_moved_while_it_is_written_stays_until_it_is_closed(
    tree: write_tree.WritableTree, store: Path
) -> None:
    kept = tree.lookup(ROOT, b"kept").inode
    inode, handle = move_while_written(tree, kept, b"in")
    with pytest.raises(FileSystemError, match="EBUSY"):
        tree.rename(ROOT, b"kept", ROOT, b"moved", 0)
    end(tree, inode, handle)
    tree.rename(ROOT, b"kept", ROOT, b"moved", 0)
    assert shown(tree, kept) == set()
    assert (store / "new").read_bytes() == b"fresh"
    assert not os.listdir(store / "moved")


def test_a_name_that_was_moved_away_from_goes_with_what_is_removed(
    tree: write_tree.WritableTree, store: Path
) -> None:
    move_while_written(tree, ROOT, b"old")
    tree.unlink(ROOT, b"new")
    assert shown(tree) == {b"kept"}
    assert os.listdir(store) == ["kept"]
