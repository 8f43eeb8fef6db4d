"""Saving through a mount in ways that it refuses, or that programs have besides `write`."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.fuse.operations import ROOT, FileSystemError
from bootseer.stripedfs.mount.write_tree import WritableTree
from tests.support.mounts.checkpoints import (
    CHUNK,
    SMALL,
    WIDTH,
    Served,
    content,
    served,
    store_of,
    tree_at,
)
from tests.support.mounts.fuse import in_time, refusal

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55
OLD = content(SIZE, 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def mount(root: Path, tmp_path: Path) -> Iterator[Served]:
    writing = {"width": WIDTH, "chunk_bytes": CHUNK}
    with served(root, tmp_path / "mnt", writable=True, writing=writing) as mount:
        yield mount


def read_url(root: Path, name: str) -> bytes:
    with stripedfs.open(f"{root}/{name}") as file:
        return file.read()


# --- refused writes -------------------------------------------------------------------------------


def test_what_numpy_cannot_save_leaves_the_old_one(mount: Served, root: Path) -> None:
    """A zip archive is written with its headers filled in later."""
    path = mount.directory / "n.npz"
    in_time(lambda: path.write_bytes(OLD))
    arrays = {"a": numpy.arange(SIZE), "b": numpy.arange(SIZE)}
    assert refusal(lambda: numpy.savez(path, **arrays)) == errno.ESPIPE
    assert in_time(path.read_bytes) == read_url(root, "n.npz") == OLD
    in_time(lambda: numpy.save(mount.directory / "n.npy", arrays["a"]))
    assert numpy.array_equal(in_time(lambda: numpy.load(mount.directory / "n.npy")), arrays["a"])


@pytest.mark.parametrize("hole", ["inside", "at the end"])
def test_a_sparse_copy_is_refused_whole(
    mount: Served, root: Path, tmp_path: Path, hole: str
) -> None:
    path = mount.directory / "x"
    in_time(lambda: path.write_bytes(OLD))
    rest = b"" if hole == "at the end" else b"end"
    (tmp_path / "source").write_bytes(content(65536) + bytes(1 << 20) + rest)
    words = ["cp", "--sparse=always", tmp_path / "source", path]
    assert subprocess.run(words, capture_output=True, timeout=60).returncode == 1
    assert in_time(path.read_bytes) == read_url(root, "x") == OLD
    assert [p.name for p in root.iterdir()] == ["x.stripes"]


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        (b"", lambda fd: os.pwrite(fd, b"y", 9)),
        (b"some", lambda fd: os.pwrite(fd, b"y", 9)),
        (content(SIZE), lambda fd: os.pwrite(fd, b"y", 9)),
        (content(SIZE), lambda fd: os.ftruncate(fd, SIZE - 1)),
        (content(SIZE), lambda fd: os.ftruncate(fd, SIZE + 1)),
    ],
)
def test_after_a_refusal_close_fails_and_nothing_is_published(
    mount: Served, root: Path, taken: bytes, refused: Callable[[int], object]
) -> None:
    def save(path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.write(fd, taken)
        assert refusal(lambda: refused(fd)) == errno.ESPIPE
        assert refusal(lambda: os.write(fd, b"more")) == errno.ESPIPE
        assert refusal(lambda: os.close(fd)) == errno.ESPIPE

    in_time(lambda: (mount.directory / "x").write_bytes(OLD))
    for name in ("x", "new"):
        save(mount.directory / name)
    assert in_time(lambda: os.listdir(mount.directory)) == ["x"]
    assert in_time((mount.directory / "x").read_bytes) == read_url(root, "x") == OLD


def test_a_name_that_no_striped_file_can_have_is_refused_at_open(mount: Served, root: Path) -> None:
    """`close` would tell of it too late, and of a large file alone."""
    longest = mount.directory / ("n" * (255 - len(".stripes")))
    in_time(lambda: longest.write_bytes(OLD))
    assert read_url(root, longest.name) == OLD
    for length in (longest.name + "n", "n" * 250, "n" * 255, "n" * 256):
        path = mount.directory / length
        assert refusal(lambda path=path: path.open("wb")) == errno.ENAMETOOLONG
        assert refusal(lambda path=path: longest.rename(path)) == errno.ENAMETOOLONG
    in_time((mount.directory / ("d" * 250)).mkdir)
    assert sorted(p.name[:1] for p in root.iterdir()) == ["d", "n"]


# --- as safetensors saves -------------------------------------------------------------------------


def save_as_safetensors(path: Path, data: bytes, *, fails: bool = False) -> None:
    """The system calls of safetensors' `save_file` (0.8), which renames before it closes."""
    temporary = path.parent / ".tmpAb3dEf"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, len(data))
        assert os.fstat(fd).st_size == len(data)
        os.write(fd, data[:144])
        os.write(fd, data[144:-28])
        if fails:
            temporary.unlink()
            return
        os.write(fd, data[-28:])
        temporary.rename(path)
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [1000, SIZE])
def test_what_is_renamed_before_its_close_is_published_there(
    mount: Served, root: Path, size: int
) -> None:
    path = mount.directory / "model.safetensors"
    for seed in (2, 3):  # the second over the first
        in_time(lambda seed=seed: save_as_safetensors(path, content(size, seed)))
        assert read_url(root, path.name) == content(size, seed)
        assert in_time(path.read_bytes) == content(size, seed)
        assert in_time(lambda: os.listdir(mount.directory)) == [path.name]
    assert in_time(path.stat).st_mode & 0o777 == 0o600
    assert {p.name.removesuffix(".stripes") for p in root.iterdir()} == {path.name}


@pytest.mark.parametrize("size", [1000, SIZE])
def test_a_folder_in_which_a_file_is_written_is_not_renamed(
    mount: Served, root: Path, size: int
) -> None:
    folder = mount.directory / "step-1"
    in_time(folder.mkdir)
    with in_time(lambda: open(folder / "model.pt", "wb", buffering=0)) as file:
        in_time(lambda: file.write(content(size)))
        assert refusal(lambda: folder.rename(mount.directory / "step-2")) == errno.EBUSY
    in_time(lambda: folder.rename(mount.directory / "step-2"))
    assert in_time((mount.directory / "step-2" / "model.pt").read_bytes) == content(size)
    assert read_url(root, "step-2/model.pt") == content(size)


@pytest.mark.parametrize("size", [1000, SIZE])
def test_removing_what_is_being_written_ends_it(mount: Served, root: Path, size: int) -> None:
    path = mount.directory / "model.safetensors"
    in_time(lambda: path.write_bytes(OLD))
    failing = lambda: save_as_safetensors(path, content(size), fails=True)  # noqa: E731
    assert refusal(failing) == errno.ESTALE
    assert read_url(root, path.name) == OLD
    assert in_time(lambda: os.listdir(mount.directory)) == [path.name]
    assert [p.name for p in root.iterdir()] == [f"{path.name}.stripes"]
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"new")
    in_time(path.unlink)
    assert refusal(lambda: os.write(fd, b"more")) == errno.ESTALE
    assert refusal(lambda: os.close(fd)) == errno.ESTALE
    assert list(root.iterdir()) == []  # what had the name before was removed as well
    in_time(lambda: save_as_safetensors(path, content(size)))
    assert read_url(root, path.name) == content(size)


# --- without a mount ------------------------------------------------------------------------------


@pytest.fixture
def tree(root: Path) -> Iterator[WritableTree]:
    with Fetcher() as fetcher:
        tree = tree_at(WritableTree, store_of(root), "", fetcher, writing=SMALL)
        yield tree
        tree.destroy()


class Writing:
    """A file opened for writing, by its system calls."""

    def __init__(self, tree: WritableTree, name: bytes) -> None:
        self.tree = tree
        self.attr, opened = tree.create(ROOT, name, 0o644, os.O_WRONLY)
        self.handle, self.size = opened.handle, 0

    def write(self, data: bytes) -> None:
        self.tree.write(self.attr.inode, self.handle, self.size, memoryview(data))
        self.size += len(data)

    def close(self) -> None:
        try:
            self.tree.flush(self.attr.inode, self.handle)
        finally:
            with contextlib.suppress(FileSystemError):
                self.tree.release(self.attr.inode, self.handle)


def names(tree: WritableTree) -> list[bytes]:
    return [entry.name for entry in tree.readdir(ROOT)]


@pytest.mark.parametrize("written", [0, 1, CHUNK + 1, SIZE - 1])
def test_fewer_bytes_than_announced_are_not_published(
    tree: WritableTree, root: Path, written: int
) -> None:
    file = Writing(tree, b"x")
    tree.truncate(file.attr.inode, SIZE)
    assert tree.getattr(file.attr.inode).size_bytes == SIZE
    if written:
        file.write(content(SIZE)[:written])
    with pytest.raises(FileSystemError) as caught:
        file.close()
    assert caught.value.errno == errno.EIO
    assert names(tree) == []
    assert list(root.iterdir()) == []


def test_an_announcement_can_be_taken_back(tree: WritableTree, root: Path) -> None:
    for name, again in ((b"trimmed", 100), (b"longer", None)):
        file = Writing(tree, name)
        tree.truncate(file.attr.inode, SIZE if again else 50)
        file.write(content(100))
        if again:
            assert tree.truncate(file.attr.inode, again).size_bytes == again
        file.close()
        assert read_url(root, name.decode()) == content(100)


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_file_moved_while_it_is_written_anew_replaces_both_or_none(
    tree: WritableTree, root: Path, ends: str
) -> None:
    for name in (b"a", b"b"):
        file = Writing(tree, name)
        file.write(OLD)
        file.close()
    file = Writing(tree, b"a")
    file.write(content(SIZE)[:CHUNK])
    tree.rename(ROOT, b"a", ROOT, b"b", 0)
    assert read_url(root, "a") == read_url(root, "b") == OLD
    if ends == "well":
        file.write(content(SIZE)[CHUNK:])
        file.close()
        assert names(tree) == [b"b"]
        assert read_url(root, "b") == content(SIZE)
        assert [p.name for p in root.iterdir()] == ["b.stripes"]
        return
    with pytest.raises(FileSystemError):
        tree.write(file.attr.inode, file.handle, 1, memoryview(b"elsewhere"))
    with pytest.raises(FileSystemError):
        file.close()
    assert names(tree) == [b"a", b"b"]
    assert read_url(root, "a") == read_url(root, "b") == OLD


def test_the_name_of_before_is_free_as_soon_as_it_is_moved(tree: WritableTree, root: Path) -> None:
    """Two that save by way of the same temporary name, one after the other."""
    files = []
    for number in range(2):
        files.append(Writing(tree, b"tmp"))
        files[-1].write(content(SIZE, number))
        tree.rename(ROOT, b"tmp", ROOT, f"final{number}".encode(), 0)
    files.append(Writing(tree, b"tmp"))
    files[-1].write(content(SIZE, 2))
    for file in files:
        file.close()
    assert names(tree) == [b"final0", b"final1", b"tmp"]
    for number, name in enumerate(("final0", "final1", "tmp")):
        assert read_url(root, name) == content(SIZE, number)


def test_a_folder_with_what_is_not_shown_is_not_empty(tree: WritableTree, root: Path) -> None:
    attr = tree.mkdir(ROOT, b"folder", 0o755)
    (root / "folder" / "killed.stripes" / ".tmp-1").mkdir(parents=True)
    assert tree.readdir(attr.inode) == []
    with pytest.raises(FileSystemError) as caught:
        tree.rmdir(ROOT, b"folder")
    assert caught.value.errno == errno.ENOTEMPTY
    tree.mkdir(ROOT, b"other", 0o755)
    with pytest.raises(FileSystemError) as caught:
        tree.rename(ROOT, b"other", ROOT, b"folder", 0)
    assert caught.value.errno == errno.ENOTEMPTY
    (root / "folder" / "killed.stripes" / ".tmp-1").rmdir()
    (root / "folder" / "killed.stripes").rmdir()
    tree.rmdir(ROOT, b"folder")
