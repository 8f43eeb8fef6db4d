"""A local directory as operations: nothing outside it, and files that change under a reader."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.operations import ROOT, Data, FileSystemError, Handle, Inode, Reply
from tests.support.mounts.fuse import in_time, mounted, refusal
from tests.support.trees import local_tree
from tests.support.trees.local_tree import LocalTree
from tests.support.trees.memory import pattern
from tests.support.waiting import until

CONTENT = pattern(3 * mmap.PAGESIZE + 5)
MAPPED = pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "copied"])


def never() -> Reply:
    raise AssertionError("a local file is never late")


def taken(answer: Data | memoryview | None) -> bytes:
    """Bytes of an answer, whose memory is given back as a server does."""
    assert answer is not None
    if isinstance(answer, memoryview):
        return bytes(answer)
    content = b"".join(answer.views)
    if answer.release is not None:
        answer.release()
    return content


def number(work: Callable[[], object]) -> int | None:
    """The errno that operations answer with."""
    with pytest.raises(FileSystemError) as raised:
        work()
    return raised.value.errno


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_bytes(CONTENT)
    (folder / "file").write_bytes(CONTENT[:100])
    return folder


@pytest.fixture
def tree(folder: Path) -> Iterator[LocalTree]:
    with LocalTree(folder) as tree:
        yield tree


def walk(tree: LocalTree, *names: bytes) -> Inode:
    inode = ROOT
    for name in names:
        inode = tree.lookup(inode, name).inode
    return inode


@MAPPED
def test_any_range_through_any_of_its_answers(folder: Path, mapped: bool) -> None:
    with LocalTree(folder, mapped=mapped) as tree:
        inode = walk(tree, b"a", b"b", b"file")
        handle = tree.open(inode, os.O_RDONLY).handle
        for offset in (0, 1, 4096, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 1, 1 << 40):
            for size in (1, 4096, 1 << 20):
                found = taken(tree.read(inode, handle, offset, size, never))
                assert found == CONTENT[offset : offset + size], (offset, size)
        tree.release(inode, handle)


def test_an_empty_file(folder: Path, tree: LocalTree) -> None:
    (folder / "empty").touch()
    inode = walk(tree, b"empty")
    assert taken(tree.read(inode, tree.open(inode, 0).handle, 0, 4096, never)) == b""


def test_another_process_understands_inodes_and_handles(folder: Path, tree: LocalTree) -> None:
    """After a crash the kernel asks by numbers that the new server never gave."""
    inode = walk(tree, b"a", b"b", b"file")
    handle = tree.open(inode, os.O_RDONLY).handle
    with LocalTree(folder) as later:
        assert later.getattr(inode) == tree.getattr(inode)
        assert taken(later.read(inode, handle, 4000, 200, never)) == CONTENT[4000:4200]
        later.release(inode, handle)
        later.release(inode, handle)
        (entry,) = later.readdir(walk(tree, b"a", b"b"))
        assert entry == (b"file", tree.getattr(inode))


def test_inodes_that_are_nowhere_are_stale(folder: Path, tree: LocalTree) -> None:
    assert number(lambda: tree.getattr(Inode(1 << 60))) == errno.ESTALE
    inode = walk(tree, b"file")
    (folder / "new").touch()
    (folder / "new").rename(folder / "file")
    assert number(lambda: tree.getattr(inode)) == errno.ESTALE
    assert number(lambda: tree.open(inode, os.O_RDONLY)) == errno.ESTALE
    (folder / "file").unlink()
    assert number(lambda: tree.getattr(inode)) == errno.ENOENT


def test_a_link_is_never_followed(folder: Path, tree: LocalTree, tmp_path: Path) -> None:
    """Whoever may write the directory must not show what only the server may read."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_bytes(b"secret")
    inode, directory = walk(tree, b"a", b"b", b"file"), walk(tree, b"a", b"b")
    (folder / "a" / "b" / "file").rename(folder / "a" / "kept")
    (folder / "a" / "b").rmdir()
    (folder / "a" / "b").symlink_to(tmp_path / "secret")
    assert number(lambda: tree.open(inode, os.O_RDONLY)) in (errno.ENOTDIR, errno.ELOOP)
    assert number(lambda: tree.lookup(directory, b"file")) in (errno.ENOTDIR, errno.ELOOP)
    assert number(lambda: tree.readdir(directory)) in (errno.ENOTDIR, errno.ELOOP)
    assert tree.readlink(walk(tree, b"a", b"b")) == os.fsencode(tmp_path / "secret")


@pytest.mark.root
def test_other_file_systems_are_not_there(folder: Path, tree: LocalTree) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", folder / "a"], check=True)
    try:
        (folder / "a" / "inside").touch()
        assert number(lambda: tree.lookup(ROOT, b"a")) == errno.ENOENT
        assert [entry.name for entry in tree.readdir(ROOT)] == [b"file"]
        assert number(lambda: tree.getattr(Inode(1 << 60))) == errno.ESTALE
    finally:
        subprocess.run(["umount", "-l", folder / "a"], check=True)


def test_a_file_that_changed_is_opened_anew(folder: Path, tree: LocalTree) -> None:
    inode = walk(tree, b"file")
    for content in (b"first" * 10, b"second" * 2000):
        (folder / "file").write_bytes(content)
        handle = tree.open(inode, os.O_RDONLY).handle
        assert taken(tree.read(inode, handle, 0, 1 << 20, never)) == content
        tree.release(inode, handle)


def test_descriptors_of_closed_files_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_tree, "IDLE_FILES", 3)
    for index in range(20):
        (tmp_path / str(index)).write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    with LocalTree(tmp_path) as tree:
        for index in range(20):
            inode = walk(tree, b"%d" % index)
            tree.release(inode, tree.open(inode, os.O_RDONLY).handle)
        assert len(os.listdir("/proc/self/fd")) <= before + 1 + 2 * 3  # mmap keeps one of its own
    tree.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_copies_is_used_again(folder: Path) -> None:
    with LocalTree(folder, mapped=False) as tree:
        inode = walk(tree, b"a", b"b", b"file")
        first = tree.read(inode, Handle(inode), 0, 4096, never)
        assert isinstance(first, Data)
        first.release() if first.release else None
        second = tree.read(inode, Handle(inode), 4096, 4096, never)
        assert isinstance(second, Data)
        assert bytes(first.views[0]) == bytes(second.views[0]) == CONTENT[4096:8192]


def test_writing_is_refused(folder: Path, tree: LocalTree) -> None:
    assert number(lambda: tree.open(walk(tree, b"file"), os.O_RDWR)) == errno.EROFS


def test_what_is_no_file_is_not_opened(folder: Path, tree: LocalTree) -> None:
    os.mkfifo(folder / "fifo")
    assert number(lambda: tree.open(walk(tree, b"fifo"), os.O_RDONLY)) == errno.EINVAL
    assert number(lambda: tree.open(ROOT, os.O_RDONLY)) == errno.EINVAL


@pytest.mark.parametrize(("name", "says"), [("none", "check the path"), ("file", "name one")])
def test_a_root_that_is_none(folder: Path, name: str, says: str) -> None:
    with pytest.raises(NotFoundError, match=says):
        LocalTree(folder / name)


def test_a_loop_of_links_is_ours_to_tell(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BootseerError, match="cannot open the directory"):
        LocalTree(tmp_path / "loop")


@pytest.mark.root
def test_a_file_that_shrank_under_its_map_costs_one_read(folder: Path, tmp_path: Path) -> None:
    path = folder / "shrinks"
    path.write_bytes(pattern(1 << 20))
    with (
        LocalTree(folder, direct=True) as tree,
        mounted(tree, tmp_path / "m") as (where, faults),
    ):
        fd = os.open(where / "shrinks", os.O_RDONLY)
        try:
            assert in_time(lambda: os.pread(fd, 100, 500_000)) == pattern(1 << 20)[500_000:500_100]
            os.truncate(path, 8192)
            assert refusal(lambda: os.pread(fd, 65536, 500_000)) == errno.EIO
            assert in_time(lambda: os.pread(fd, 8192, 0)) == pattern(8192)
        finally:
            os.close(fd)
        assert in_time((where / "file").read_bytes) == CONTENT[:100]
        # The server says so once the reader has its error.
        until(lambda: any("sending an answer" in fault for fault in faults))


@pytest.mark.root
def test_reads_are_answered_from_a_map_and_past_its_end(folder: Path, tmp_path: Path) -> None:
    path = folder / "a" / "b" / "file"
    end = len(CONTENT) - 5
    ranges = [(0, 100), (4096, 4096), (4095, 2), (end, 5), (end, 4096), (4096, 1 << 20)]
    with (
        LocalTree(folder, direct=True) as tree,
        mounted(tree, tmp_path / "m") as (where, faults),
    ):
        fd = os.open(where / "a" / "b" / "file", os.O_RDONLY)
        try:
            for offset, size in ranges:
                found = in_time(lambda at=offset, n=size: os.pread(fd, n, at))  # type: ignore[misc]
                assert found == CONTENT[offset : offset + size], (offset, size)
            grown = CONTENT + b"more"
            path.write_bytes(grown)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert in_time(lambda: os.pread(fd, 4096, 0)) == grown[:4096]
        finally:
            os.close(fd)
        assert not faults
