"""Saving through a real mount: files written once, from start to end."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.entrypoint import process_groups
from bootseer.entrypoint.container_start import start_age_ns
from bootseer.fuse.operations import Handle, Inode
from bootseer.imageprefetch.filemode import pagemap
from bootseer.storage import lease
from bootseer.system.processes import read_proc
from tests.support.mounts.fuse import in_time, mounted, output, refusal
from tests.support.trees.memory import RENAME_NOREPLACE, WritableTree, pattern
from tests.support.waiting import until

pytestmark = pytest.mark.root

MIB = 1 << 20
CONTENT = pattern(5 * MIB + 77)


@pytest.fixture
def tree() -> WritableTree:
    return WritableTree()


@pytest.fixture
def where(tree: WritableTree, tmp_path: Path) -> Iterator[Path]:
    with mounted(tree, tmp_path / "m", read_only=False) as (directory, faults):
        yield directory
    assert faults == []


def test_what_is_written_is_read(tree: WritableTree, where: Path) -> None:
    in_time(lambda: (where / "f").write_bytes(CONTENT))
    assert tree.files["f"] == CONTENT
    assert in_time((where / "f").read_bytes) == CONTENT
    assert (where / "f").stat().st_size == len(CONTENT)


def test_writes_come_in_large_pieces(tree: WritableTree, where: Path) -> None:
    fd = os.open(where / "f", os.O_CREAT | os.O_WRONLY | os.O_EXCL)
    try:
        assert os.write(fd, CONTENT[: 4 * MIB]) == 4 * MIB
    finally:
        os.close(fd)
    assert sum(tree.write_sizes) == 4 * MIB
    assert max(tree.write_sizes) == MIB
    assert len(tree.write_sizes) <= 6


def test_programs_save(tree: WritableTree, where: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(CONTENT)
    subprocess.run(["cp", "-p", tmp_path / "source", where / "copied"], check=True)
    command = ["dd", f"if={tmp_path / 'source'}", f"of={where / 'dd'}", "bs=300k", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    assert tree.files["copied"] == tree.files["dd"] == CONTENT
    assert "fsync" in tree.events


def test_o_direct_writes(tree: WritableTree, where: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(CONTENT[: 4 * MIB])
    command = ["dd", f"if={tmp_path / 'source'}", f"of={where / 'f'}", "bs=1M", "oflag=direct"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    assert tree.files["f"] == CONTENT[: 4 * MIB]


def test_closing_says_what_flushing_found(tree: WritableTree, where: Path) -> None:
    tree.refuse_flush = True
    fd = os.open(where / "f", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x")
    assert refusal(lambda: os.close(fd)) == errno.EDQUOT


def test_a_random_write_is_refused(tree: WritableTree, where: Path) -> None:
    fd = os.open(where / "f", os.O_CREAT | os.O_WRONLY)
    try:
        os.write(fd, b"abc")
        assert refusal(lambda: os.pwrite(fd, b"x", 100)) == errno.ESPIPE
        assert refusal(lambda: os.pwrite(fd, b"x", 0)) == errno.ESPIPE
        assert refusal(lambda: os.ftruncate(fd, 100)) == errno.ESPIPE
        os.write(fd, b"def")
    finally:
        os.close(fd)
    assert tree.files["f"] == b"abcdef"


def test_a_full_store_is_said(tree: WritableTree, where: Path) -> None:
    tree.full_after_bytes = MIB
    assert refusal(lambda: (where / "f").write_bytes(CONTENT)) == errno.ENOSPC


def test_opening_again_starts_anew(tree: WritableTree, where: Path) -> None:
    for content in (b"long content", b"short"):
        (where / "f").write_bytes(content)
        assert (where / "f").read_bytes() == content
        assert (where / "f").stat().st_size == len(content)


def test_modes_and_times_reach_the_tree_and_owners_are_refused(
    tree: WritableTree, where: Path
) -> None:
    old = os.umask(0o027)
    try:
        (where / "f").write_bytes(b"x")
        (where / "d").mkdir()
    finally:
        os.umask(old)
    assert "create f 640" in tree.events
    assert "mkdir d 750" in tree.events
    in_time(lambda: os.chmod(where / "f", 0o600))
    for when_ns in (2 * 10**9 + 5, -(10**9) + 7):
        in_time(lambda when_ns=when_ns: os.utime(where / "f", ns=(1, when_ns)))
        assert tree.events[-1] == f"set f {when_ns}"
    assert "set f 600" in tree.events
    before = len(tree.events)
    in_time(lambda: os.utime(where / "f"))  # to now
    assert len(tree.events) == before + 1
    assert refusal(lambda: os.chown(where / "f", 1, 1)) == errno.EPERM
    assert len(tree.events) == before + 1


def test_names(tree: WritableTree, where: Path) -> None:
    (where / "d" / "e").mkdir(parents=True)
    (where / "d" / "f").write_bytes(b"1")
    (where / "g").write_bytes(b"2")
    (where / "d" / "f").rename(where / "d" / "e" / "h")
    assert sorted(os.listdir(where / "d")) == ["e"]
    assert (where / "d/e/h").read_bytes() == b"1"
    assert refusal((where / "d").rmdir) == errno.ENOTEMPTY
    os.replace(where / "g", where / "d/e/h")
    assert (where / "d/e/h").read_bytes() == b"2"
    (where / "d/e/h").unlink()
    shutil.rmtree(where / "d")
    assert os.listdir(where) == []


def test_rename_without_replacing(tree: WritableTree, where: Path) -> None:
    (where / "a").write_bytes(b"a")
    (where / "b").write_bytes(b"b")
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = (os.fsencode(where / name) for name in "ab")
    at_working_directory = -100

    def rename(flags: int) -> int:
        code = libc.renameat2(at_working_directory, here, at_working_directory, there, flags)
        return ctypes.get_errno() if code else 0

    assert in_time(lambda: rename(RENAME_NOREPLACE)) == errno.EEXIST
    assert in_time(lambda: rename(2)) == errno.EINVAL
    there = os.fsencode(where / "c")
    assert in_time(lambda: rename(RENAME_NOREPLACE)) == 0
    assert sorted(os.listdir(where)) == ["b", "c"]


@pytest.mark.parametrize("kind", ["link", "symlink", "mknod", "setxattr"])
def test_what_is_not_offered_is_refused_by_name(where: Path, kind: str) -> None:
    (where / "f").write_bytes(b"x")
    work = {
        "link": lambda: os.link(where / "f", where / "g"),
        "symlink": lambda: os.symlink("f", where / "g"),
        "mknod": lambda: os.mknod(where / "g", stat.S_IFIFO | 0o600),
        "setxattr": lambda: os.setxattr(where / "f", "user.x", b"y"),
    }
    assert refusal(work[kind]) in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


def test_waiting_writers_keep_no_reader_waiting(tree: WritableTree, where: Path) -> None:
    (where / "read").write_bytes(b"here")
    tree.hold = threading.Event()
    code = "fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); os.write(fd, bytes(5 << 20))"
    writers = [threading.Thread(target=output, args=(code, where / f"w{n}")) for n in range(6)]
    for writer in writers:
        writer.start()
    while len(tree.inodes) < 7:
        pass
    assert in_time((where / "read").read_bytes) == b"here"
    assert "w3" in in_time(lambda: os.listdir(where))
    tree.hold.set()
    for writer in writers:
        writer.join(60)
    assert [len(tree.files[f"w{n}"] or b"") for n in range(6)] == [5 << 20] * 6


def test_a_read_only_mount_of_a_writable_tree(tree: WritableTree, tmp_path: Path) -> None:
    with mounted(tree, tmp_path / "m") as (where, _):
        assert refusal(lambda: (where / "f").write_bytes(b"x")) == errno.EROFS


class _KeepsClosing(WritableTree):
    """Answers no FLUSH before it is told to: a fault that no server of ours has."""

    def __init__(self) -> None:
        super().__init__()
        self.closing, self.let_go = threading.Event(), threading.Event()

    def flush(self, inode: Inode, handle: Handle, *, owner: int = 0, thread: int = 0) -> None:
        self.closing.set()
        self.let_go.wait(60)


def test_nothing_of_ours_waits_for_a_process_that_hangs_in_exec(tmp_path: Path) -> None:
    """The kernel keeps parts of its /proc back until the exec goes on."""
    tree = _KeepsClosing()
    with mounted(tree, tmp_path / "m", read_only=False) as (directory, _):
        words = 'import os, sys; open(sys.argv[1], "w"); os.execv("/bin/sleep", ["sleep", "60"])'
        keep = words.replace("open(", "file = open(")
        marked = {**os.environ, process_groups.MARKER: "of-a-test"}
        process = subprocess.Popen([sys.executable, "-c", keep, directory / "f"], env=marked)
        try:
            assert tree.closing.wait(30)
            before = lease.this_owner()
            hanging = dataclasses.replace(before, pid=process.pid, started_ticks=1)
            with pytest.raises(TimeoutError):  # so it does hang
                read_proc(f"/proc/{process.pid}/stat")
            assert in_time(lambda: lease.surely_dead(hanging), 20) is False
            marked = in_time(lambda: list(process_groups._find_marked("of-a-test")), 20)
            assert process.pid not in marked
            look = pagemap.MappedPages()
            for _ in range(3):
                in_time(lambda: look.look([process.pid], 0.0), 20)
            assert look.pages() == {}
            assert in_time(lambda: pagemap.mapping_order([process.pid]), 20) == {}
            assert in_time(lambda: pagemap.read_bytes([process.pid]), 20) == 0
            assert process.pid in in_time(lambda: pagemap.process_tree(os.getpid()), 20)
            assert in_time(lambda: start_age_ns(process.pid), 20) is None
        finally:
            tree.let_go.set()
            process.kill()
            process.wait()


@pytest.mark.parametrize("command", ["run", "start"])
def test_no_job_waits_for_a_first_process_that_hangs_in_exec(tmp_path: Path, command: str) -> None:
    """Whose start is the container's, as its events tell."""
    tree = _KeepsClosing()
    first = """
import os, sys, time
if os.fork() == 0:
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    os.execv(sys.executable, [sys.executable, "-m", "bootseer", *sys.argv[3:]])
file = open(sys.argv[1], "w")
os.execv("/bin/sleep", ["sleep", "600"])
"""
    go, ran = tmp_path / "go", tmp_path / "ran"
    job = [command, "--", "touch", str(ran)]
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", first]
    with mounted(tree, tmp_path / "m", read_only=False) as (directory, _):
        process = subprocess.Popen(
            [*words, directory / "f", go, *job],
            env={**os.environ, "BOOTSEER_EVENTS": str(tmp_path / "events")},
            start_new_session=True,
        )
        try:
            assert tree.closing.wait(30)
            (inside,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            with pytest.raises(TimeoutError):  # so it does hang
                read_proc(f"/proc/{inside}/stat")
            go.touch()
            in_time(lambda: until(ran.exists, limit_s=40), 45)
        finally:
            tree.let_go.set()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    (events,) = (tmp_path / "events").iterdir()
    assert '"container.start"' not in events.read_text()
