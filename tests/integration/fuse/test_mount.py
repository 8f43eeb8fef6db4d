"""Mounting and unmounting: what is said when it cannot be, and that nothing is left behind."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bootseer.errors import (
    BusyError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.fuse.mount import mount as mount_module
from bootseer.fuse.mount.mount import open_mount, receive_descriptor
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import (
    MountPoint,
    find_mount,
    has_ended,
    unmount,
)
from bootseer.fuse.serve.receive_loop import ReceiveLoop
from bootseer.fuse.serve.server import handshake
from tests.support.mounts.fuse import (
    Mount,
    end_mount,
    in_time,
    mounted,
    output,
    python,
    refusal,
    send_descriptor,
)
from tests.support.trees.memory import MemoryTree, pattern
from tests.support.waiting import until

root = pytest.mark.root
CONTENT = pattern(300_000)


def tree() -> MemoryTree:
    return MemoryTree({"f": CONTENT})


def test_a_process_may_have_any_name() -> None:
    """Its name is the first line of /proc/self/status."""
    script = """
import os
from bootseer.fuse.mount import mount_point
from bootseer.system.processes import own_status
os.geteuid = lambda: 0
with open("/proc/self/comm", "wb") as file:
    file.write(b"d\\xc3\\xa9marrage-\\xff")
assert isinstance(mount_point.can_mount(), bool)
assert isinstance(own_status("NoNewPrivs"), str)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@root
def test_a_mount_is_named_and_found(tmp_path: Path) -> None:
    where = tmp_path / "a b"
    with mounted(tree(), where, fsname="checkpoint"):
        found = find_mount(str(where))
        assert found is not None
        assert (found.target, found.kind) == (str(where), "fuse.bootseer")
        line = next(x for x in Path("/proc/self/mounts").read_text().splitlines() if "a\\040b" in x)
        assert line.startswith("checkpoint ")
        assert {"ro", "nosuid", "nodev"} <= set(line.split()[3].split(","))
        ahead = Path(f"/sys/class/bdi/{found.device}/read_ahead_kb").read_text().strip()
        assert ahead == "1024"
    assert find_mount(str(where)) is None


@root
def test_mounting_and_unmounting_leaves_nothing_behind(tmp_path: Path) -> None:
    def things() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = things()
    for _ in range(5):
        with mounted(tree(), tmp_path / "m") as (where, _):
            assert (where / "f").read_bytes() == CONTENT
    assert things() == before


@root
def test_closing_twice_is_safe_and_the_tree_is_told_once(tmp_path: Path) -> None:
    served = tree()
    mount = Mount(served, str(tmp_path))
    try:
        mount.start()
        mount.close()
        assert served.destroyed.is_set()
        served.destroyed.clear()
        mount.close()
        assert not served.destroyed.is_set()
    finally:
        end_mount(tmp_path)


@root
def test_what_others_mount_at_the_same_place_is_left_alone(tmp_path: Path) -> None:
    mount = Mount(tree(), str(tmp_path))
    try:
        with mount:
            unmount(str(tmp_path))
            subprocess.run(["mount", "-t", "tmpfs", "other", tmp_path], check=True)
        found = find_mount(str(tmp_path))
        assert found is not None
        assert found.kind == "tmpfs"
    finally:
        end_mount(tmp_path)


@root
def test_a_mount_that_got_our_number_is_left_alone(tmp_path: Path) -> None:
    """The kernel gives the lowest number that is free, and so that of a mount that has gone."""

    def same_number() -> bool:
        with Mount(tree(), str(tmp_path)) as mount:
            mine, point = find_mount(str(tmp_path)), MountPoint.find(str(tmp_path))
            assert mine is not None
            assert point.present
            unmount(str(tmp_path))
            assert mount.wait(10)
            subprocess.run(["mount", "-t", "tmpfs", "other", tmp_path], check=True)
            other = find_mount(str(tmp_path))
            assert other is not None
            assert not point.present
            point.unmount(lazily=True)
            point.abandon()
        found = find_mount(str(tmp_path))
        assert found is not None
        assert found.kind == "tmpfs"
        unmount(str(tmp_path))
        return other.device == mine.device

    try:  # again where a mount of another test got the number first
        until(same_number, "a mount that has our number")
    finally:
        end_mount(tmp_path)


@root
def test_a_server_that_got_our_number_is_left_alone(tmp_path: Path) -> None:
    """Nothing but who answers tells two mounts of one name at one place apart."""

    def same_number() -> bool:
        device = open_mount(str(tmp_path), MountOptions())
        try:
            handshake(device, MountOptions())
            mine = find_mount(str(tmp_path))
            point = MountPoint.find(str(tmp_path), lambda: has_ended(device))
            assert point.present
            unmount(str(tmp_path))
            assert not point.present
            with Mount(tree(), str(tmp_path)):
                same = find_mount(str(tmp_path)) == mine
                assert not point.present
                point.unmount(lazily=True)
                point.abandon()
                assert in_time((tmp_path / "f").read_bytes) == CONTENT
        finally:
            os.close(device)
        return same

    try:
        until(same_number, "a mount that has our number")
    finally:
        end_mount(tmp_path)


@root
def test_a_mount_whose_connection_was_ended_is_still_ours(tmp_path: Path) -> None:
    device = open_mount(str(tmp_path), MountOptions())
    try:
        handshake(device, MountOptions())
        point = MountPoint.find(str(tmp_path), lambda: has_ended(device))
        assert not has_ended(device)
        user = os.open(tmp_path, os.O_PATH)
        try:  # the force takes the connection, and the use keeps the mount
            with pytest.raises(BusyError):
                unmount(str(tmp_path), force=True)
            assert has_ended(device)
            assert point.present
        finally:
            os.close(user)
        point.abandon()
        assert find_mount(str(tmp_path)) is None
    finally:
        os.close(device)
        end_mount(tmp_path)


@root
def test_a_mount_that_another_namespace_has_a_copy_of_ends(tmp_path: Path) -> None:
    """A container that was started meanwhile has one: its server went without being told."""
    served = tree()
    mount = Mount(served, str(tmp_path))
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 99"]
    try:
        mount.start()
        with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == b"\n"
                unmount(str(tmp_path))
                copy = Path(f"/proc/{other.pid}/root{tmp_path}/f")
                assert in_time(copy.read_bytes) == CONTENT
                mount.close()
                assert served.destroyed.is_set()
                assert refusal(copy.read_bytes) == errno.ENOTCONN
            finally:
                other.kill()
    finally:
        end_mount(tmp_path)


@root
def test_unmounting_a_busy_mount_says_so(tmp_path: Path) -> None:
    with mounted(tree(), tmp_path / "m") as (where, _):
        with open(where / "f", "rb"), pytest.raises(BusyError, match="in use"):
            unmount(str(where))
        assert MountPoint.find(str(where)).present
    with pytest.raises(NotFoundError, match="nothing is mounted"):
        unmount(str(tmp_path / "m"))


@root
def test_a_living_mount_is_not_replaced(tmp_path: Path) -> None:
    with mounted(tree(), tmp_path / "m") as (where, _):
        with pytest.raises(BusyError, match="mounted already"):
            in_time(lambda: open_mount(str(where), MountOptions()))
        assert (where / "f").read_bytes() == CONTENT


@root
def test_a_stale_mount_is_replaced(tmp_path: Path) -> None:
    where = tmp_path / "m"
    where.mkdir()
    code = """
from tests.support.mounts.fuse import Mount
from tests.support.trees.memory import MemoryTree
Mount(MemoryTree({}), sys.argv[1]).start()
os.write(1, b"ready\\n")
signal.pause()
"""
    with python(code, where) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
    try:
        with pytest.raises(OSError, match="not connected"):
            os.statvfs(where)
        with Mount(tree(), str(where)):
            assert (where / "f").read_bytes() == CONTENT
        assert find_mount(str(where)) is None
    finally:
        end_mount(where)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="check the path"):
        open_mount(str(tmp_path / "nothing"), MountOptions())
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no directory"):
        open_mount(str(tmp_path / "file"), MountOptions())


@pytest.mark.parametrize("name", ["/dev/fd/x", "/dev/fd/999"])
def test_a_passed_descriptor_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="descriptor"):
        open_mount(name, MountOptions())


def test_a_passed_descriptor_of_something_else(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file, pytest.raises(UsageError, match="no /dev/fuse"):
        open_mount(f"/dev/fd/{file.fileno()}", MountOptions())


def test_without_a_device_the_other_ways_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_module, "DEVICE", str(tmp_path / "no-fuse"))
    with pytest.raises(NotSupportedError, match=r"no-fuse here.*stripe get.*fsspec"):
        open_mount(str(tmp_path), MountOptions())


def test_a_directory_in_the_devices_place_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_module, "DEVICE", str(tmp_path))
    with pytest.raises(NotSupportedError, match="no usable"):
        open_mount(str(tmp_path), MountOptions())


@root
def test_a_denied_device_says_so(tmp_path: Path) -> None:
    """The device file's mode keeps user 65534 out, as a container's device rule would."""
    node = tmp_path / "fuse"
    os.mknod(node, 0o020600, os.makedev(10, 229))
    code = """
from bootseer.errors import AccessDeniedError
from bootseer.fuse.mount import mount
mount.DEVICE = sys.argv[1]
os.chmod(os.path.dirname(sys.argv[1]), 0o755)
held = os.open(os.path.dirname(sys.argv[1]), os.O_PATH)
mount.DEVICE = f"/proc/self/fd/{held}/fuse"
os.setgid(65534); os.setuid(65534)
try:
    mount.open_device()
except AccessDeniedError as error:
    print(error)
"""
    assert "may not be opened here" in output(code, node)


@root
def test_mounting_without_the_capability_needs_the_helper(tmp_path: Path) -> None:
    """Root whose CAP_SYS_ADMIN is taken is refused by fusermount3 as well, and told so."""
    code = """
from bootseer.errors import AccessDeniedError
from bootseer.fuse.mount.mount import open_mount
from bootseer.fuse.mount.mount_options import MountOptions
try:
    open_mount(sys.argv[1], MountOptions())
except AccessDeniedError as error:
    print(error)
"""
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    done = subprocess.run(
        [*command, sys.executable, "-c", "import sys\n" + code, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "fusermount3 did not mount" in done.stdout
    assert "stripe get" in done.stdout


@root
def test_a_descriptor_over_a_socket(tmp_path: Path) -> None:
    where = tmp_path / "m"
    where.mkdir()
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def give() -> None:
            descriptor = open_mount(str(where), MountOptions())
            link, _ = listener.accept()
            with link:
                send_descriptor(link, descriptor)
            os.close(descriptor)

        giver = threading.Thread(target=give)
        giver.start()
        try:
            mount = Mount(tree(), f"unix:{path}")
            mount.start()
            giver.join(60)
            assert in_time((where / "f").read_bytes) == CONTENT
            unmount(str(where))
            assert mount.wait(60)
            mount.close()
        finally:
            end_mount(where)


@root
def test_a_socket_that_gives_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="receive a mounted"):
        receive_descriptor(str(tmp_path / "none"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mute"))
        listener.listen()
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(StoreUnavailableError, match="sent no descriptor"):
            receive_descriptor(str(tmp_path / "mute"))


@root
def test_a_descriptor_that_was_served_before_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "m"
    where.mkdir()
    descriptor = open_mount(str(where), MountOptions())
    try:
        handshake(descriptor, MountOptions())
        threading.Thread(target=refusal, args=((where / "x").stat,), daemon=True).start()
        with pytest.raises(StoreUnavailableError, match="another server began it"):
            in_time(lambda: Mount(tree(), f"/dev/fd/{descriptor}").start())
    finally:
        end_mount(where)


@root
def test_a_mount_that_ends_before_it_began(tmp_path: Path) -> None:
    where = tmp_path / "m"
    where.mkdir()
    descriptor = open_mount(str(where), MountOptions())
    try:
        end_mount(where)
        with pytest.raises(StoreUnavailableError, match="does not begin"):
            handshake(descriptor, MountOptions())
    finally:
        os.close(descriptor)


@root
def test_a_dead_thread_ends_the_mount_rather_than_its_readers_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tree(), tmp_path / "m", threads=1) as (where, faults):
        monkeypatch.setattr(ReceiveLoop, "_handle_other", None)  # fault injection: the thread fails
        gone = (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED)
        assert refusal((where / "f").read_bytes) in gone
        assert refusal(lambda: os.statvfs(where)) in (None, *gone)
        assert faults[0].startswith("a receiving thread failed: TypeError")


class Leaving(MemoryTree):
    """Fault injection: a read that means to end its thread."""

    def read(self, *_: object) -> None:  # type: ignore[override]
        raise SystemExit


@root
def test_nothing_that_a_read_raises_ends_a_thread(tmp_path: Path) -> None:
    with mounted(Leaving({"f": CONTENT}), tmp_path / "m", threads=1) as (where, faults):
        assert refusal((where / "f").read_bytes) == errno.EIO
        assert in_time((where / "f").stat).st_size == len(CONTENT)
    assert faults == ["read failed: SystemExit: "]
