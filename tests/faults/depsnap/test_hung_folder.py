"""A store that is a directory of a file system whose server hangs, at whatever it is asked.

The directory is a real FUSE mount; its server is stopped (SIGSTOP), so that whoever reads there
waits for good, as on a network file system that does not answer. Or it takes what is asked and
keeps it, as one does whose own network hangs: the kernel then ends no process that waits for that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import DeadlineError
from bootseer.system import blocking_calls
from bootseer.system.blocking_calls import call_in_process, may_hang
from bootseer.system.mountinfo import Mounted
from tests.support.commands import deps_node
from tests.support.commands.deps_node import Node
from tests.support.mounts.fuse import end_mount, python
from tests.support.samples.wheels import make_wheel

pytestmark = pytest.mark.root

# What is read is kept by nobody: each read asks the server, which waits while a file is there that
# names what it was asked.
SERVER = """
import time
from tests.support.mounts.fuse import Mount
from tests.support.trees.memory import WritableTree
from tests.support.trees.local_tree import LocalTree
from bootseer.fuse.mount.mount_options import MountOptions
folder, seen, keeps = sys.argv[1:]
def kept(what):
    def is_named():
        try:
            return what in open(keeps).read()
        except FileNotFoundError:
            return False
    if is_named():
        print("kept", what, flush=True)
    while is_named():
        time.sleep(0.05)
class Keeping:
    def read(self, *words, **more):
        kept("read")
        return super().read(*words, **more)
    def write(self, inode, handle, offset, data, **more):
        kept("write")
        if len(data) > 1000:  # more than a beat of the lease
            kept("archive")
        return super().write(inode, handle, offset, data, **more)
    def readdir(self, *words, **more):
        kept("list")
        return super().readdir(*words, **more)
class Shown(Keeping, LocalTree):
    pass
class Written(Keeping, WritableTree):
    pass
tree = Shown(folder, direct=True, keep_cache=False) if folder else Written()
with Mount(tree, seen, options=MountOptions(read_only=bool(folder))) as mount:
    print("ready", flush=True)
    mount.wait()
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "bootseer_alpha", "1.0")
    return Node(tmp_path, wheels, tool="uv")


@pytest.fixture
def server(node: Node, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A published snapshot, and its store seen through a mount from the second node on."""
    done = node.run()
    assert (done.returncode, node.last()) == (0, ("ok", "published")), done.stderr
    with served(node.store, node, tmp_path) as process:
        node.fresh()
        yield process


@pytest.fixture
def writable(node: Node, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An empty store that can be written."""
    with served("", node, tmp_path) as process:
        yield process


@contextlib.contextmanager
def served(folder: str | Path, node: Node, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    seen = tmp_path / "mounted"
    seen.mkdir()
    process = python(SERVER, folder, seen, tmp_path / "keeps")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        node.store = seen
        yield process
    finally:
        (tmp_path / "keeps").unlink(missing_ok=True)
        process.send_signal(signal.SIGCONT)
        end_mount(seen)
        process.kill()
        process.communicate()


def is_stopped(process: subprocess.Popen[str]) -> bool:
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(
    ("at", "form", "words"),
    [
        ("restore", "archive", "did not answer for 10 s"),
        ("staging made", "archive", "brought nothing for 10 s"),
        ("made", "copy", "brought nothing for 10 s"),
    ],
)
def test_a_store_that_hangs_while_the_archive_is_read_is_given_up(
    at: str, form: str, words: str, node: Node, server: subprocess.Popen[str]
) -> None:
    child = node.start(at, "print", form=form, store_timeout_s=10.0)
    assert child.stdin is not None
    assert child.stdout is not None
    said = child.stdout.readline()
    assert said == at + "\n", child.stderr and child.stderr.read()
    server.send_signal(signal.SIGSTOP)
    while not is_stopped(server):
        os.sched_yield()
    child.stdin.write("\n")
    child.stdin.flush()
    code, errors = node.finish(child)
    assert is_stopped(server)
    assert code == 0
    assert words in errors
    assert node.last() == ("fallback", "installed")
    assert node.installs == 2
    assert node.works()
    assert list(node.place.glob(".bootseer-*")) == []


def start_kept(node: Node, server: subprocess.Popen[str], at: str, form: str) -> tuple[int, str]:
    """A start of whose archive's reads the server keeps the first one after a step."""
    child = node.start(at, "print", form=form, store_timeout_s=10.0)
    assert child.stdin is not None
    assert child.stdout is not None
    assert server.stdout is not None
    assert child.stdout.readline() == at + "\n"
    (node.store.parent / "keeps").write_text("read")
    child.stdin.write("\n")
    child.stdin.flush()
    ended = node.finish(child)
    assert server.stdout.readline() == "kept read\n"
    return ended


@pytest.mark.parametrize(("at", "form"), [("restore", "archive"), ("unpacked", "copy")])
def test_a_start_ends_though_what_it_read_from_keeps_its_request(
    at: str, form: str, node: Node, server: subprocess.Popen[str]
) -> None:
    """A thread that waited for it kept the start from ending, after its install had run."""
    code, errors = start_kept(node, server, at, form)
    assert code == 0
    assert "did not answer for 10 s" in errors
    assert node.last() == ("fallback", "installed")
    assert node.works()


@pytest.mark.parametrize(
    ("what", "limit_s"),
    [("list", 1.0), ("read", 10.0)],  # the listing before is to be answered
    ids=["a listing", "a record"],
)
def test_a_start_ends_though_what_it_asked_first_is_kept(
    what: str, limit_s: float, node: Node, server: subprocess.Popen[str]
) -> None:
    """A thread that waited for it kept the start from ending, after its install had run."""
    (node.store.parent / "keeps").write_text(what)
    code, errors = node.finish(node.start(store_timeout_s=limit_s))
    assert server.stdout is not None
    assert server.stdout.readline() == f"kept {what}\n"
    assert code == 0
    assert f"{node.store} did not answer for " in errors
    assert node.last() == ("fallback", "installed")
    assert node.installs == 2
    assert node.works()


@pytest.mark.parametrize("publish", ["inline", "background"])
def test_a_start_ends_though_its_lease_is_kept(
    publish: str, node: Node, writable: subprocess.Popen[str]
) -> None:
    """The thread that renewed it kept the start from ending."""
    child = node.start("lease", "print", store_timeout_s=10.0, publish=publish)
    assert child.stdin is not None
    assert child.stdout is not None
    assert writable.stdout is not None
    assert child.stdout.readline() == "lease\n", child.stderr and child.stderr.read()
    (node.store.parent / "keeps").write_text("list")
    assert writable.stdout.readline() == "kept list\n"
    child.stdin.write("\n")
    child.stdin.flush()
    code, errors = node.finish(child)
    assert code == 0
    assert f"{node.store} did not answer for 10 s" in errors
    assert node.last() == ("fallback", "installed")
    assert node.works()


def test_a_start_ends_though_what_it_packs_is_kept(
    node: Node, writable: subprocess.Popen[str]
) -> None:
    """What packed was the start itself."""
    (node.store.parent / "keeps").write_text("archive")
    code, errors = node.finish(node.start(publish_stall_s=5.0))
    assert writable.stdout is not None
    assert writable.stdout.readline() == "kept archive\n"
    assert code == 0
    assert f"{node.store} did not answer for 5 s" in errors
    assert node.last() == ("fallback", "installed")
    assert node.works()


def test_packing_apart_is_given_up_once_it_does_nothing(
    node: Node, writable: subprocess.Popen[str]
) -> None:
    """What it waits for keeps no process of ours but the one that packs."""

    def work() -> bytes:
        (node.store / "file").write_bytes(b"x")
        return b"done"

    assert call_in_process(work, 60.0, "it", while_at_work=True) == b"done"
    (node.store.parent / "keeps").write_text("write")
    with pytest.raises(DeadlineError, match="it did not answer for 1 s"):
        call_in_process(work, 1.0, "it", while_at_work=True)
    assert writable.stdout is not None
    assert writable.stdout.readline() == "kept write\n"


def test_an_error_of_a_room_of_ours_comes_back_as_what_it_is() -> None:
    class OwnError(DeadlineError):
        """Known to nobody but the process apart."""

    def work() -> bytes:
        raise OwnError("its words")

    with pytest.raises(DeadlineError, match="its words"):
        call_in_process(work, 60.0, "it")


def test_packing_apart_may_take_its_time() -> None:
    """Longer than the limit, as long as it works."""

    def work() -> bytes:
        while time.process_time() < 2.5:  # this process's own
            pass
        return b"done"

    assert call_in_process(work, 2.0, "it", while_at_work=True) == b"done"


def test_a_start_publishes_to_one_that_answers(node: Node, writable: subprocess.Popen[str]) -> None:
    """The first start, its lease included, through processes apart."""
    code, errors = node.finish(node.start(store_timeout_s=60.0))
    assert (code, errors, node.last()) == (0, "", ("ok", "published"))
    node.fresh()
    code, errors = node.finish(node.start(store_timeout_s=60.0))
    assert (code, errors, node.last()) == (0, "", ("ok", "restored"))
    assert node.installs == 1
    assert node.works()


def test_a_start_whose_parent_ignores_the_ends_of_children_publishes(
    node: Node, writable: subprocess.Popen[str]
) -> None:
    """Who ignores SIGCHLD hands that on; the kernel then keeps no child to be waited for."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = node.start(store_timeout_s=60.0)
    finally:
        signal.signal(signal.SIGCHLD, before)
    code, errors = node.finish(child)
    assert (code, errors, node.last()) == (0, "", ("ok", "published"))


def test_a_start_that_may_not_fork_any_more_ends_as_its_install_did(
    node: Node, writable: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a traceback and exit code 1, after a good install."""
    driver = """
import os
from bootseer.depsnap import install_process
real = install_process.run
def refuse():
    raise BlockingIOError(11, "no more processes")
def run_and_refuse(*words):
    code = real(*words)
    os.fork = refuse
    return code
install_process.run = run_and_refuse
"""
    monkeypatch.setattr(deps_node, "DRIVER", driver + deps_node.DRIVER)
    code, errors = node.finish(node.start(store_timeout_s=60.0))
    assert code == 0
    assert "no more processes" in errors
    assert "Traceback" not in errors
    assert node.last() == ("fallback", "installed")
    assert node.works()


def test_where_no_mounts_can_be_seen_nothing_is_said_to_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without /proc, as in a bare chroot, no start restored anything."""

    def unseen() -> list[Mounted]:
        raise FileNotFoundError(2, "no such file", "/proc/self/mountinfo")

    monkeypatch.setattr(blocking_calls, "all_mounts", unseen)
    assert not may_hang(str(tmp_path))


def test_a_way_back_from_a_local_disk_leads_to_what_is_above_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/link").symlink_to("/elsewhere")
    kinds = [("/", "virtiofs"), (f"{tmp_path}", "ext4"), (f"{tmp_path}/disk", "ext4")]
    shown = [Mounted(target, "0:1", kind) for target, kind in kinds]
    monkeypatch.setattr(blocking_calls, "all_mounts", lambda: shown)
    assert not may_hang(f"{tmp_path}/disk/x")
    assert not may_hang(f"{tmp_path}/disk/y/../x")
    assert may_hang(f"{tmp_path}/disk/link/x")


def test_files_of_a_process_apart_take_no_standard_streams_place(tmp_path: Path) -> None:
    """What something printed there stood in the file that came first."""

    def work() -> bytes:
        with (tmp_path / "file").open("wb", 0) as file:
            os.write(2, b"a warning")
            file.write(b"content")
            return str(file.fileno()).encode()

    assert int(call_in_process(work, 60.0, "it")) > 2
    assert (tmp_path / "file").read_bytes() == b"content"


def test_the_next_start_does_not_wait_for_what_was_left_behind(
    node: Node, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    """It held the tree's lock, and our standard error."""
    code, errors = start_kept(node, server, "made", "copy")
    assert code == 0
    assert "brought nothing for 10 s" in errors
    shutil.rmtree(node.place)
    node.make_venv()
    node.store = tmp_path / "store"
    code, errors = node.finish(node.start(form="copy"))
    assert (code, errors, node.last()) == (0, "", ("ok", "restored"))
    assert node.works()


def test_the_way_to_a_folder_tells_whether_it_may_hang(
    node: Node, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Though its server answers nothing: it is not asked."""
    (tmp_path / "link").symlink_to("mounted/deps")
    (tmp_path / "back").symlink_to(node.home)
    server.send_signal(signal.SIGSTOP)
    while not is_stopped(server):
        os.sched_yield()
    assert may_hang(f"{node.store}/deps/x")
    assert may_hang(f"{tmp_path}/link/x")
    assert may_hang(f"{node.home}/../mounted")
    assert not may_hang(f"{tmp_path}/back/x")
    assert not may_hang(f"{tmp_path}/mounted2")


@pytest.mark.parametrize("form", ["archive", "auto"])
def test_one_that_answers_is_restored_from_where_it_lies(
    form: str, node: Node, server: subprocess.Popen[str]
) -> None:
    assert may_hang(str(node.store))
    assert not may_hang(str(node.home))
    child = node.start(form=form, store_timeout_s=1e9)  # more than poll(2) takes
    code, errors = node.finish(child)
    assert (code, errors, node.last()) == (0, "", ("ok", "restored"))
    assert node.installs == 1
    assert node.works()
