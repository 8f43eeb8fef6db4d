"""Reading through a real mount: every way of reading gives the bytes that were put in."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
from pathlib import Path

import pytest

from bootseer.errors import CorruptDataError
from bootseer.fuse.operations import Data, FileSystemError, Handle, Inode
from tests.support import page_cache
from tests.support.mounts.fuse import in_time, mounted, output, refusal
from tests.support.trees.memory import MTIME_NS, FailingTree, Later, MemoryTree, pattern

pytestmark = pytest.mark.root

MIB = 1 << 20
CONTENT = pattern(3 * MIB + 4097)
SIZES = [0, 1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1]
FILES: dict[str, bytes | None] = {
    "big": CONTENT,
    "d": None,
    "d/e": None,
    "d/e/deep": b"deep",
    "odd \n name": b"odd",
    **{f"s{size}": pattern(size, seed=size) for size in SIZES},
}


@pytest.fixture(scope="module", params=[False, True], ids=["buffered", "direct_io"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    tree = MemoryTree(
        FILES,
        links={"d/link": b"../big"},
        xattrs={b"user.one": b"1" * 300, b"user.two": b""},
        direct=request.param,
    )
    directory = tmp_path_factory.mktemp("mount")
    with mounted(tree, directory, allow_other=True) as (where, faults):
        yield where
    assert faults == []
    assert tree.destroyed.is_set()


@pytest.mark.parametrize("size", SIZES)
def test_a_whole_file_of_any_size(place: Path, size: int) -> None:
    assert in_time((place / f"s{size}").read_bytes) == FILES[f"s{size}"]


def test_any_range(place: Path) -> None:
    numbers = random.Random(5)
    fd = os.open(place / "big", os.O_RDONLY)
    try:
        for _ in range(300):
            offset = numbers.randrange(len(CONTENT) + 5000)
            size = numbers.choice([1, 100, 4096, 70_000, 2 * MIB])
            assert os.pread(fd, size, offset) == CONTENT[offset : offset + size]
    finally:
        os.close(fd)


def test_o_direct(place: Path) -> None:
    fd = os.open(place / "big", os.O_RDONLY | os.O_DIRECT)
    room = mmap.mmap(-1, 4 * MIB)
    try:
        assert os.preadv(fd, [room], 0) == len(CONTENT)
        assert room[: len(CONTENT)] == CONTENT
        assert os.preadv(fd, [memoryview(room)[:8192]], 3 * MIB) == 4097
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["MAP_SHARED", "MAP_PRIVATE"])
def test_mmap(place: Path, tmp_path: Path, kind: str) -> None:
    """In another process: a page fault keeps the interpreter's lock, which the server needs."""
    code = """
import mmap
fd = os.open(sys.argv[1], os.O_RDONLY)
view = mmap.mmap(fd, 0, flags=getattr(mmap, sys.argv[2]), prot=mmap.PROT_READ)
open(sys.argv[3], "wb").write(view[:])
"""
    output(code, place / "big", kind, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT


def test_names_and_attributes(place: Path) -> None:
    assert sorted(os.listdir(place)) == sorted(n for n in FILES if "/" not in n)
    assert sorted(os.listdir(place / "d")) == ["e", "link"]
    status = in_time((place / "big").stat)
    assert (status.st_size, status.st_mtime_ns) == (len(CONTENT), MTIME_NS)
    assert status.st_blocks == -(-len(CONTENT) // 512)
    assert (place / "d").is_dir()
    assert (place / "odd \n name").read_bytes() == b"odd"
    assert os.readlink(place / "d/link") == "../big"
    assert (place / "d/link").read_bytes() == CONTENT
    command = ["find", place, "-type", "f", "-name", "s*"]
    found = subprocess.run(command, capture_output=True, check=True).stdout
    assert found.count(b"\n") == len(SIZES)


def test_a_missing_name_is_remembered(place: Path) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            os.stat(place / "nothing")


def test_statvfs(place: Path) -> None:
    said = in_time(lambda: os.statvfs(place))
    assert said.f_blocks * said.f_frsize == 1 << 40
    assert said.f_bavail * said.f_frsize == 1 << 30
    assert (said.f_ffree, said.f_namemax) == (7, 255)


def test_extended_attributes(place: Path) -> None:
    assert os.listxattr(place / "big") == ["user.one", "user.two"]
    assert os.getxattr(place / "big", "user.one") == b"1" * 300
    assert os.getxattr(place / "big", "user.two") == b""
    assert refusal(lambda: os.getxattr(place / "big", "user.none")) == errno.ENODATA


WRITES = {
    "create": lambda p: os.open(p / "new", os.O_CREAT | os.O_WRONLY),
    "write": lambda p: os.open(p / "big", os.O_WRONLY),
    "truncate": lambda p: os.truncate(p / "big", 1),
    "mkdir": lambda p: os.mkdir(p / "new"),
    "unlink": lambda p: os.unlink(p / "big"),
    "rmdir": lambda p: os.rmdir(p / "d/e"),
    "rename": lambda p: os.rename(p / "big", p / "new"),
    "symlink": lambda p: os.symlink("a", p / "new"),
    "link": lambda p: os.link(p / "big", p / "new"),
    "chmod": lambda p: os.chmod(p / "big", 0o600),
    "setxattr": lambda p: os.setxattr(p / "big", "user.x", b"y"),
    "mknod": lambda p: os.mknod(p / "new"),
}


@pytest.mark.parametrize("name", WRITES)
def test_nothing_can_be_changed(place: Path, name: str) -> None:
    assert refusal(lambda: WRITES[name](place)) == errno.EROFS


def test_many_readers_at_once(place: Path) -> None:
    command = f"for i in 1 2 3 4 5 6 7 8; do cmp '{place}/big' - < '{place}/big' & done; wait"
    assert subprocess.run(["sh", "-c", command], timeout=100, check=False).returncode == 0


def test_another_user_reads_too(place: Path) -> None:
    code = "os.setgid(65534); os.setuid(65534); sys.stdout.write(os.listdir(sys.argv[1] + '/d')[0])"
    held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)  # the way there is ours alone
    try:
        os.set_inheritable(held, True)
        said = output(code, f"/proc/self/fd/{held}", pass_fds=[held])
    finally:
        os.close(held)
    assert said in ("e", "link")


def test_a_large_directory(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"file-{n:05}": b"x" * (n % 7) for n in range(3000)}
    with mounted(MemoryTree(files), tmp_path / "m") as (where, _):
        assert sorted(os.listdir(where)) == sorted(files)
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(where)}
    assert sizes == {name: len(content or b"") for name, content in files.items()}


class Piecewise(MemoryTree):
    """Answers in many small buffers, and counts what it gets back."""

    returned = 0

    def read(self, inode: Inode, handle: Handle, offset: int, size: int, later: Later) -> Data:
        self.reads.append((inode, offset, size))
        content = memoryview(self.content(inode))[offset : offset + size]
        views = [content[start : start + 100] for start in range(0, len(content), 100)]
        return Data(views, self._returned)

    def _returned(self) -> None:
        self.returned += 1


def test_bytes_in_thousands_of_pieces_are_one_answer(tmp_path: Path) -> None:
    tree = Piecewise({"f": CONTENT}, direct=True)
    with mounted(tree, tmp_path / "m") as (where, faults):
        with open(where / "f", "rb", buffering=0) as file:
            assert file.read(MIB) == CONTENT[:MIB]
            assert file.read(150) == CONTENT[MIB : MIB + 150]
        assert faults == []
    assert tree.returned == len(tree.reads) >= 2


def failure(error: Exception, tmp_path: Path, tries: int = 3) -> tuple[int | None, list[str]]:
    with mounted(FailingTree({"f": CONTENT}, error), tmp_path / "m") as (where, faults):
        numbers = {refusal((where / "f").read_bytes) for _ in range(tries)}
        assert in_time(lambda: os.listdir(where)) == ["f"]
    assert len(numbers) == 1
    return numbers.pop(), faults


def test_a_refusal_is_its_errno(tmp_path: Path) -> None:
    assert failure(FileSystemError(errno.EACCES), tmp_path) == (errno.EACCES, [])


def test_a_fault_of_the_operations_is_eio_and_said_once(tmp_path: Path) -> None:
    number, faults = failure(RuntimeError("oh"), tmp_path)
    assert number == errno.EIO
    assert faults == ["read failed: RuntimeError: oh"]


def test_corrupt_data_is_eio(tmp_path: Path) -> None:
    number, faults = failure(CorruptDataError("block 3 of x is not what it was"), tmp_path)
    assert number == errno.EIO
    assert faults == ["read failed: block 3 of x is not what it was"]


class Forgetful(MemoryTree):
    """Neither answers nor takes the reply."""

    def read(self, inode: Inode, handle: Handle, offset: int, size: int, later: Later) -> None:
        return None


def test_a_read_that_nobody_will_answer_is_eio(tmp_path: Path) -> None:
    with mounted(Forgetful({"f": b"x"}), tmp_path / "m") as (where, faults):
        assert refusal((where / "f").read_bytes) == errno.EIO
    assert faults == ["read failed: TypeError: neither bytes nor a reply taken"]


class TooMuch(MemoryTree):
    def read(self, inode: Inode, handle: Handle, offset: int, size: int, later: Later) -> Data:
        return Data((bytes(size + 1),))


def test_more_than_was_asked_is_refused_by_the_kernel_and_said(tmp_path: Path) -> None:
    with mounted(TooMuch({"f": bytes(100)}), tmp_path / "m") as (where, faults):
        assert refusal((where / "f").read_bytes) == errno.EIO
        assert in_time(lambda: os.listdir(where)) == ["f"]
    assert len(faults) == 1
    assert "sending an answer" in faults[0]


def test_pages_are_kept_from_one_opening_to_the_next(tmp_path: Path) -> None:
    for keep, expected in ((True, 1), (False, 2)):
        tree = MemoryTree({"f": b"x" * 100}, keep_cache=keep)
        with mounted(tree, tmp_path / "m") as (where, _):
            for _ in range(2):
                assert (where / "f").read_bytes() == b"x" * 100
        assert len(tree.reads) == expected


def test_the_kernels_references_are_dropped(tmp_path: Path) -> None:
    tree = MemoryTree({"f": b"x", "g": b"y"})
    with mounted(tree, tmp_path / "m", timeout_s=0.0) as (where, _):
        for name in "fg":
            (where / name).read_bytes()
        inode = tree.inodes["f"]
        counted = dict(tree.looked_up)
        # Reclaim is the kernel's choice; dropping this mount's dentries is a remount's job.
        subprocess.run(["mount", "-i", "-o", "remount,ro", where], check=False)
        page_cache.drop(page_cache.INODES)
        in_time(lambda: os.stat(where / "f"))
    assert counted[inode] >= 1
    assert tree.forgotten.get(inode, 0) >= 1
