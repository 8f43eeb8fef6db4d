"""Files that the kernel reads by itself: beside those read by us, and over a hand-over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fuse.mount.passthrough import OpenInodes
from bootseer.fuse.operations import Data, Handle, Inode, Opened
from tests.support.mounts.fuse import in_time, mounted, output, refusal
from tests.support.trees.memory import Later, MemoryTree, pattern

pytestmark = pytest.mark.root

CONTENT = pattern(600_000)


class Passed(MemoryTree):
    """Gives the kernel the file itself when `complete`; reads that still come are noted."""

    def __init__(self, backing: int) -> None:
        super().__init__({"f": CONTENT})
        self.backing = backing
        self.complete = True
        self.numbers = iter(range(1, 1000))

    def open(self, inode: Inode, flags: int) -> Opened:
        handle = Handle(next(self.numbers))
        return Opened(handle, backing_fd=self.backing if self.complete else -1)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Passed]:
    (tmp_path / "back").write_bytes(CONTENT)
    fd = os.open(tmp_path / "back", os.O_RDONLY)
    yield Passed(fd)
    os.close(fd)


@pytest.fixture
def where(tree: Passed, tmp_path: Path) -> Iterator[Path]:
    with mounted(tree, tmp_path / "m", passthrough=True) as (directory, faults):
        yield directory
    assert faults == []


def whole(fd: int) -> bytes:
    data: bytes = in_time(lambda: os.pread(fd, len(CONTENT) + 1, 0))
    return data


def test_the_kernel_reads_without_us(tree: Passed, where: Path) -> None:
    for _ in range(2):
        with open(where / "f", "rb") as first, open(where / "f", "rb") as second:
            assert first.read() == second.read() == CONTENT
    code = """
import mmap
print(len(mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)[:]))
"""
    assert output(code, where / "f") == f"{len(CONTENT)}\n"
    assert tree.reads == []


def test_a_file_that_became_complete_while_it_was_open(tree: Passed, where: Path) -> None:
    tree.complete = False
    first = os.open(where / "f", os.O_RDONLY)
    tree.complete = True
    second = os.open(where / "f", os.O_RDONLY)
    assert whole(first) == whole(second) == CONTENT
    assert tree.reads
    os.close(first)
    os.close(second)
    eventually_released(tree, 2)
    tree.reads.clear()
    assert in_time((where / "f").read_bytes) == CONTENT
    assert tree.reads == []


def test_a_file_no_longer_complete_keeps_its_way_while_it_is_open(
    tree: Passed, where: Path
) -> None:
    first = os.open(where / "f", os.O_RDONLY)
    tree.complete = False
    second = os.open(where / "f", os.O_RDONLY)
    assert whole(first) == whole(second) == CONTENT
    assert tree.reads == []
    os.close(first)
    os.close(second)
    eventually_released(tree, 2)
    assert in_time((where / "f").read_bytes) == CONTENT
    assert tree.reads


def eventually_released(tree: Passed, count: int) -> None:
    """RELEASE comes after close() returned."""
    while tree.released < count:
        pass


def test_without_the_option_we_read(tree: Passed, tmp_path: Path) -> None:
    with mounted(tree, tmp_path / "plain") as (where, _):
        assert in_time((where / "f").read_bytes) == CONTENT
    assert tree.reads


def test_a_descriptor_that_the_kernel_will_not_have_is_served_by_us(tmp_path: Path) -> None:
    pipe = os.pipe()
    tree = Passed(pipe[0])
    try:
        with mounted(tree, tmp_path / "m", passthrough=True) as (where, faults):
            for _ in range(2):
                assert in_time((where / "f").read_bytes) == CONTENT
        assert len(faults) == 1
        assert faults[0].startswith("passthrough failed: ")
        assert tree.reads
    finally:
        for fd in pipe:
            os.close(fd)


class Written(Passed):
    """Answers reads with other bytes than the backing file's."""

    def read(self, inode: Inode, handle: Handle, offset: int, size: int, later: Later) -> Data:
        return Data((bytes(min(size, len(CONTENT) - offset)),))


def test_bytes_come_from_the_backing_file(tree: Passed, tmp_path: Path) -> None:
    other = Written(tree.backing)
    with mounted(other, tmp_path / "m", passthrough=True) as (where, _):
        assert in_time((where / "f").read_bytes) == CONTENT
        assert refusal(lambda: os.open(where / "f", os.O_WRONLY)) is not None


def test_open_files_are_known_to_the_next_server() -> None:
    """Both processes see one table; the second one reads it anew."""
    inodes = OpenInodes()
    for number in range(2, 12):
        inodes.set(Inode(number), number * 10, 1)
    for number in range(2, 12, 3):
        inodes.set(Inode(number), 0, 0)
    pid = os.fork()
    if pid == 0:
        inodes.set(Inode(99), 7, 2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert inodes.get(Inode(99)) == (0, 0)
    inodes.take_over()
    assert inodes.get(Inode(99)) == (7, 2)
    expected = [(0, 0) if n % 3 == 2 else (n * 10, 1) for n in range(2, 12)]
    assert [inodes.get(Inode(n)) for n in range(2, 12)] == expected
    inodes.set(Inode(50), 1, 1)
    assert inodes.get(Inode(99)) == (7, 2)
