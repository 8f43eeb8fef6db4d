"""Saving through a mount by programs that start others meanwhile, or meet faults of ours."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuse_mounts import output
from stripe_faces import CHUNK, SMALL, WIDTH, Served, content, served, store_of
from waiting import until

from bootseer import stripedfs
from bootseer.blocks.fetch import Fetcher
from bootseer.fuse.operations import ROOT, FileSystemError
from bootseer.stripedfs import saving
from bootseer.stripedfs.rwtree import WritableTree

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55
BUSY = """
import subprocess, threading
path, store, size, way = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def others():
    subprocess.run(["true"], check=True)
    child = os.fork()
    if child == 0:
        os.closerange(3, 100)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

with open(path, "wb", buffering=0) as file:
    if way == "from the start":
        others()
    file.write(b"A" * size)
    others()
    assert not os.path.exists(store + "/CURRENT"), "published half-written"
    if way == "by a thread":
        thread = threading.Thread(target=file.write, args=(b"B" * size,))
        thread.start()
        thread.join()
    else:
        file.write(b"B" * size)
    others()
    assert not os.path.exists(store + "/CURRENT"), "published half-written"
assert os.path.exists(store + "/CURRENT"), "not published by its close"
"""
HANDED = """
import subprocess
path, store, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
file = open(path, "wb", buffering=0)
file.write(b"A" * size)
subprocess.run(["head", "-c", str(size), "/dev/zero"], stdout=file, check=True)
assert os.path.exists(store + "/CURRENT"), "its writer closed it"
file.close()
other = open(path + "2", "wb", buffering=0)
child = subprocess.Popen(["sh", "-c", f"read go; head -c {size} /dev/zero"],
                         stdin=subprocess.PIPE, stdout=other)
other.write(b"A" * size)
other.close()
child.communicate(b"go\\n")
assert child.returncode == 0
"""

KILLED = """
import signal, threading
path, size, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
file = open(path, "wb", buffering=0)
file.write(b"B" * size)
if way == "among threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if way == "by its own fault":
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
os.kill(os.getpid(), signal.SIGTERM if way == "asked to end" else signal.SIGKILL)
"""

STARTING = """
path, size, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
file = open(path, "wb", buffering=2 * size)
file.write(b"A" * size)
def others():
    if way == "system":
        assert os.system("true") == 0
    elif way == "spawn":
        assert os.spawnl(os.P_WAIT, "/bin/true", "true") == 0
    elif way == "fork and exec":
        child = os.fork()
        if child == 0:
            os.execv("/bin/true", ["true"])
        assert os.waitpid(child, 0)[1] == 0
others()
file.flush()
others()
if way == "exec":
    os.execv("/bin/true", ["true"])
if way == "exec by a thread":
    import threading
    threading.Thread(target=os.execv, args=("/bin/true", ["true"])).start()
    threading.Event().wait()
file.close()
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Served]:
    writing = {"width": WIDTH, "chunk_bytes": CHUNK}
    with served(tmp_path / "store", tmp_path / "mnt", writable=True, writing=writing) as mount:
        yield mount


@pytest.mark.parametrize("way", ["plainly", "from the start", "by a thread"])
def test_starting_other_programs_publishes_nothing(mount: Served, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "store" / "x.stripes"
    output(BUSY, mount.directory / "x", folder, SIZE, way)
    with stripedfs.open(f"{tmp_path}/store/x") as file:
        assert file.read() == b"A" * SIZE + b"B" * SIZE
    assert len(list(folder.glob("v-*"))) == 1


def test_what_is_handed_to_another_program_is_published_by_who_wrote_last(
    mount: Served, tmp_path: Path
) -> None:
    output(HANDED, mount.directory / "x", tmp_path / "store" / "x.stripes", SIZE)
    for name in ("x", "x2"):
        with stripedfs.open(f"{tmp_path}/store/{name}") as file:
            assert file.read() == b"A" * SIZE + bytes(SIZE)


@pytest.mark.parametrize(
    "way", ["system", "spawn", "fork and exec", "exec", "exec by a thread", "none"]
)
@pytest.mark.parametrize("size", [55, SIZE])
def test_a_program_may_start_another_while_its_file_is_open(
    mount: Served, tmp_path: Path, way: str, size: int
) -> None:
    """The kernel closes a file within exec, and keeps parts of /proc back until we answered."""
    path = mount.directory / "x"
    words = [sys.executable, "-c", f"import os, sys\n{STARTING}", str(path), str(size), way]
    program = subprocess.Popen(words)
    try:
        assert program.wait(30) == 0
    finally:
        if program.poll() is None:  # nothing but our end frees it, and whoever looks at it
            for pid in (mount.process.pid, *mount.workers()):
                os.kill(pid, signal.SIGKILL)
            program.kill()
            program.wait()
    store = tmp_path / "store"  # after an exec the last descriptor's end is told by and by
    until(lambda: (store / "x").exists() or (store / "x.stripes").exists())
    with stripedfs.open(f"{tmp_path}/store/x") as file:
        assert file.read() == b"A" * size


@pytest.mark.parametrize("way", ["alone", "among threads", "asked to end", "by its own fault"])
@pytest.mark.parametrize("size", [55, SIZE])
def test_what_a_killed_writer_left_is_not_published(
    mount: Served, tmp_path: Path, way: str, size: int
) -> None:
    """Nobody said that it was whole: readers keep what was there before."""
    path = mount.directory / "x"
    path.write_bytes(b"A" * SIZE)
    words = [sys.executable, "-c", f"import os, sys\n{KILLED}", str(path), str(size), way]
    assert subprocess.run(words, check=False).returncode < 0
    # the last descriptor's end is told by and by
    until(lambda: "its writer was killed" in mount.said)
    with stripedfs.open(f"{tmp_path}/store/x") as file:
        assert file.read() == b"A" * SIZE
    path.write_bytes(b"C" * size)
    with stripedfs.open(f"{tmp_path}/store/x") as file:
        assert file.read() == b"C" * size


# --- without a mount ------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[WritableTree]:
    with Fetcher() as fetcher:
        tree = WritableTree(store_of(tmp_path / "store"), "", fetcher, writing=SMALL)
        yield tree
        tree.destroy()


def test_what_the_writer_left_is_published_at_the_end(tree: WritableTree, tmp_path: Path) -> None:
    """A close by others tells nothing; the last descriptor's end publishes all the same."""
    attr, opened = tree.create(ROOT, b"x", 0o644, os.O_WRONLY)
    tree.write(attr.inode, opened.handle, 0, memoryview(content(SIZE)), owner=1)
    tree.flush(attr.inode, opened.handle, owner=2)
    assert not (tmp_path / "store" / "x.stripes" / "CURRENT").exists()
    tree.fsync(attr.inode, opened.handle)
    tree.release(attr.inode, opened.handle)
    with stripedfs.open(f"{tmp_path}/store/x") as file:
        assert file.read() == content(SIZE)


@pytest.mark.parametrize("known", [0, 1 << 30])
def test_a_process_that_cannot_be_told_publishes_by_its_close(
    tree: WritableTree, tmp_path: Path, known: int
) -> None:
    attr, opened = tree.create(ROOT, b"x", 0o644, os.O_WRONLY)
    tree.write(attr.inode, opened.handle, 0, memoryview(content(SIZE)))
    tree.flush(attr.inode, opened.handle, owner=7, thread=known)
    assert (tmp_path / "store" / "x.stripes" / "CURRENT").exists()
    tree.release(attr.inode, opened.handle)


def test_a_fault_of_any_kind_is_told_by_close_and_nothing_is_published(
    tree: WritableTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot be started, as where processes are limited: a fault of no store."""
    attr, opened = tree.create(ROOT, b"x", 0o644, os.O_WRONLY)
    tree.write(attr.inode, opened.handle, 0, memoryview(b"some"))
    spill = saving.SavedFile._spill

    def refuse(self: saving.SavedFile) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(saving.SavedFile, "_spill", refuse)
    with pytest.raises(RuntimeError):
        tree.write(attr.inode, opened.handle, 4, memoryview(content(SIZE)))
    monkeypatch.setattr(saving.SavedFile, "_spill", spill)
    with pytest.raises(RuntimeError):
        tree.write(attr.inode, opened.handle, 4, memoryview(content(SIZE)))
    with pytest.raises(RuntimeError):
        tree.flush(attr.inode, opened.handle)
    with pytest.raises(RuntimeError):
        tree.release(attr.inode, opened.handle)
    assert list((tmp_path / "store").iterdir()) == []
    monkeypatch.setattr("bootseer.stripedfs.tree.REFRESH_S", -1.0)
    with pytest.raises(FileSystemError) as caught:
        tree.lookup(ROOT, b"x")
    assert caught.value.errno == errno.ENOENT
