"""Saving through a mount by programs that start others meanwhile, or meet faults of ours."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import StoreUnavailableError
from bootseer.fuse.operations import ROOT, FileSystemError
from bootseer.storage.store import Store
from bootseer.stripedfs.mount.write_tree import WritableTree
from bootseer.stripedfs.write import saved_file
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
from tests.support.mounts.fuse import output
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55
PR_CAPBSET_DROP, CAP_SYS_PTRACE = 24, 19
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
if "among threads" in way:
    for _ in range(4):
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
if "fault" in way:
    import resource
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard if "core" in way else 0, hard))
    os.kill(os.getpid(), signal.SIGSEGV)
if "one of them" in way:
    signal.pthread_kill(thread.ident, signal.SIGKILL)
    threading.Event().wait()
os.kill(os.getpid(), signal.SIGTERM if "asked" in way else signal.SIGKILL)
"""

ENDING = """
import threading
way, size = sys.argv[1], int(sys.argv[2])
pipe = os.pipe()
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.Thread(target=os.read, args=(pipe[0], 1), daemon=True).start()
os.write(1, b"A" * size)
if way == "by sys.exit":
    sys.exit(3)
if way == "by os._exit":
    os._exit(0)
if way == "by a thread":
    threading.Thread(target=os._exit, args=(0,)).start()
    threading.Event().wait()
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


@pytest.mark.parametrize(
    "way",
    [
        "alone",
        "among threads",
        "among threads, one of them",
        "asked to end",
        "asked to end among threads",
        "by its own fault",
        "by its own fault with a core, among threads",
    ],
)
@pytest.mark.parametrize("size", [55, SIZE])
def test_what_a_killed_writer_left_is_not_published(
    mount: Served, tmp_path: Path, way: str, size: int
) -> None:
    """Nobody said that it was whole: readers keep what was there before."""
    path = mount.directory / "x"
    path.write_bytes(b"A" * SIZE)
    words = [sys.executable, "-c", f"import os, sys\n{KILLED}", str(path), str(size), way]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode < 0
    # the last descriptor's end is told by and by
    until(lambda: "its writer was killed" in mount.said)
    with stripedfs.open(f"{tmp_path}/store/x") as file:
        assert file.read() == b"A" * SIZE
    path.write_bytes(b"C" * size)
    with stripedfs.open(f"{tmp_path}/store/x") as file:
        assert file.read() == b"C" * size


def end_into(mount: Served, name: str, way: str, size: int) -> None:
    """A program with threads ends by itself, and its output goes into a file of the mount."""
    words = [sys.executable, "-SEc", f"import os, sys\n{ENDING}", way, str(size)]
    script = ["sh", "-c", 'exec "$@" > "$0"', str(mount.directory / name), *words]
    done = subprocess.run(script, check=False, timeout=60)
    assert done.returncode == (3 if way == "by sys.exit" else 0)


@pytest.mark.parametrize("way", ["by its last line", "by sys.exit", "by os._exit", "by a thread"])
@pytest.mark.parametrize("size", [55, SIZE])
def test_what_a_program_with_threads_never_closed_is_published_when_it_ends(
    mount: Served, tmp_path: Path, way: str, size: int
) -> None:
    """The kernel marks each thread as ended by a signal that does not call `exit` itself, and
    mostly one of these closes last."""
    for turn in range(5):
        end_into(mount, f"x{turn}", way, size)
    store = tmp_path / "store"
    for turn in range(5):  # the last descriptor's end is told by and by
        until(
            lambda turn=turn: (
                (store / f"x{turn}").exists() or (store / f"x{turn}.stripes/CURRENT").exists()
            )
        )
        with stripedfs.open(f"{store}/x{turn}") as file:
            assert file.read() == b"A" * size
    assert mount.said == ""


def test_a_server_without_rights_over_a_writer_tells_its_end_from_its_kill(tmp_path: Path) -> None:
    """As in a container, whose root has no CAP_SYS_PTRACE: it is shown no exit code."""
    store = tmp_path / "store"

    def give_up_rights() -> None:
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) == 0

    look = ["readlink", f"/proc/{os.getpid()}/cwd"]
    assert subprocess.run(look, stdout=subprocess.DEVNULL).returncode == 0
    assert subprocess.run(look, preexec_fn=give_up_rights).returncode == 1
    with served(store, tmp_path / "mnt", writable=True, prepared=give_up_rights) as mount:
        for way in ("by its last line", "by sys.exit", "by os._exit"):
            end_into(mount, way, way, 55)
            until((store / way).exists)
        words = [sys.executable, "-c", f"import os, sys\n{KILLED}", f"{mount.directory}/x", "55"]
        for count, way in enumerate(("alone", "among threads, one of them"), 1):
            assert subprocess.run([*words, way]).returncode == -signal.SIGKILL
            until(lambda count=count: mount.said.count("its writer was killed") == count)
        assert sorted(os.listdir(store)) == ["by its last line", "by os._exit", "by sys.exit"]


# --- without a mount ------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[WritableTree]:
    with Fetcher() as fetcher:
        tree = tree_at(WritableTree, store_of(tmp_path / "store"), "", fetcher, writing=SMALL)
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


def test_a_look_that_fails_publishes_nothing_and_close_tells(
    tree: WritableTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults put into our own look: it takes too long, and there is no descriptor for it."""
    said: list[str] = []
    monkeypatch.setattr(tree, "_say", said.append)
    going_on = threading.Event()

    def wait(thread: int) -> bool:
        return not going_on.wait(60)

    def refuse(thread: int) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    for name, look in ((b"x", wait), (b"y", refuse)):
        for whole in (True, False):
            attr, opened = tree.create(ROOT, name, 0o644, os.O_WRONLY)
            tree.write(attr.inode, opened.handle, 0, memoryview(b"whole" if whole else b"ha"))
            if whole:
                tree.flush(attr.inode, opened.handle, thread=os.getpid())
            else:
                with monkeypatch.context() as patched:
                    patched.setattr("bootseer.fuse.serve.requesters._ended_by_signal", look)
                    if look is wait:  # no look that nothing holds up has so little time
                        patched.setattr("bootseer.fuse.serve.requesters.CLOSING_LIMIT_S", 0.01)
                    with pytest.raises(FileSystemError) as caught:
                        tree.flush(attr.inode, opened.handle, thread=os.getpid())
                assert caught.value.errno == errno.EIO
            tree.release(attr.inode, opened.handle)
        assert (tmp_path / "store" / os.fsdecode(name)).read_bytes() == b"whole"
    going_on.set()
    assert ["did not answer" in said[0], "Too many open files" in said[1]] == [True, True]
    assert len(said) == 2


def test_who_closes_once_more_after_a_failed_look_publishes(
    tree: WritableTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault put into our own look, which passes: another descriptor of the same opening."""
    attr, opened = tree.create(ROOT, b"x", 0o644, os.O_WRONLY)
    tree.write(attr.inode, opened.handle, 0, memoryview(b"whole"))

    def refuse(thread: int) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("bootseer.fuse.serve.requesters._ended_by_signal", refuse)
        with pytest.raises(FileSystemError):
            tree.flush(attr.inode, opened.handle, thread=os.getpid())
    tree.flush(attr.inode, opened.handle, thread=os.getpid())
    tree.release(attr.inode, opened.handle)
    assert (tmp_path / "store" / "x").read_bytes() == b"whole"


def test_a_look_needs_no_thread_of_its_own(
    tree: WritableTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault put into what starts threads: there are too many. The writer is a killed one."""
    killed = subprocess.Popen(["sleep", "600"])
    killed.kill()
    until(lambda: "\nState:\tZ" in Path(f"/proc/{killed.pid}/status").read_text())
    struck = []

    def refuse(*_: object) -> int:
        struck.append(True)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    for thread, content_then in ((os.getpid(), b"whole"), (killed.pid, b"whole")):
        attr, opened = tree.create(ROOT, b"x", 0o644, os.O_WRONLY)
        data = b"half" if thread == killed.pid else b"whole"
        tree.write(attr.inode, opened.handle, 0, memoryview(data))
        tree.flush(attr.inode, opened.handle, thread=thread)
        tree.release(attr.inode, opened.handle)
        assert (tmp_path / "store" / "x").read_bytes() == content_then
    monkeypatch.undo()
    killed.wait()
    assert len(struck) == 2


class FailingStore:
    """A fake for injecting faults: a store that fails once a file was published."""

    def __init__(self, store: Store, name: str, failing: tuple[str, ...]) -> None:
        self._store, self._failing = store, failing
        self._publishing = (name, f"{name}.stripes/CURRENT")
        self.published = self.well = False
        self.struck = 0

    def __getattr__(self, method: str) -> Any:
        inner = getattr(self._store, method)
        if not callable(inner):
            return inner

        def call(*words: Any, **more: Any) -> Any:
            if self.published and not self.well and method in self._failing:
                self.struck += 1
                raise StoreUnavailableError("the store went away")
            result = inner(*words, **more)
            self.published |= method == "replace" and words[0] in self._publishing
            return result

        return call


@pytest.mark.parametrize("failing", [("read", "stat"), ("replace",)])
@pytest.mark.parametrize("size", [55, SIZE])
def test_a_store_that_fails_once_a_file_is_published_fails_no_close(
    tmp_path: Path, size: int, failing: tuple[str, ...]
) -> None:
    """As safetensors saves: with a mode of its own, which is set when the bytes are there."""
    said: list[str] = []
    store = FailingStore(store_of(tmp_path / "store"), "x", failing)
    with Fetcher() as fetcher:
        tree = tree_at(
            WritableTree, cast(Store, store), "", fetcher, writing=SMALL, say=said.append
        )
        attr, opened = tree.create(ROOT, b"x", 0o600, os.O_WRONLY)
        tree.write(attr.inode, opened.handle, 0, memoryview(content(size)))
        tree.flush(attr.inode, opened.handle)
        tree.release(attr.inode, opened.handle)
        assert store.struck
        assert ["x is published, but" in each for each in said] == [True]
        with stripedfs.open(f"{tmp_path}/store/x") as file:
            assert file.read() == content(size)
        store.well = True
        attr = tree.lookup(ROOT, b"x")
        assert attr.size_bytes == size
        tree.release(attr.inode, tree.open(attr.inode, os.O_RDONLY).handle)
        tree.setattr(attr.inode, mode=0o600, mtime_ns=None)
        assert stat.S_IMODE(tree.lookup(ROOT, b"x").mode) == 0o600
        tree.destroy()
    assert len(said) == 1


def test_a_fault_of_any_kind_is_told_by_close_and_nothing_is_published(
    tree: WritableTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot be started, as where processes are limited: a fault of no store."""
    attr, opened = tree.create(ROOT, b"x", 0o644, os.O_WRONLY)
    tree.write(attr.inode, opened.handle, 0, memoryview(b"some"))
    spill = saved_file.SavedFile._begin_striping

    def refuse(self: saved_file.SavedFile) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(saved_file.SavedFile, "_begin_striping", refuse)
    with pytest.raises(RuntimeError):
        tree.write(attr.inode, opened.handle, 4, memoryview(content(SIZE)))
    monkeypatch.setattr(saved_file.SavedFile, "_begin_striping", spill)
    with pytest.raises(RuntimeError):
        tree.write(attr.inode, opened.handle, 4, memoryview(content(SIZE)))
    with pytest.raises(RuntimeError):
        tree.flush(attr.inode, opened.handle)
    with pytest.raises(RuntimeError):
        tree.release(attr.inode, opened.handle)
    assert list((tmp_path / "store").iterdir()) == []
    monkeypatch.setattr("bootseer.stripedfs.mount.read_tree.REFRESH_S", -1.0)
    with pytest.raises(FileSystemError) as caught:
        tree.lookup(ROOT, b"x")
    assert caught.value.errno == errno.ENOENT
