"""A plain user mounts through fusermount3, or serves a descriptor that somebody passed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import bootseer
from bootseer.fuse.mount.mount import open_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import unmount
from tests.support.mounts.fuse import end_mount, in_time
from tests.support.paths import TESTS
from tests.support.trees.memory import pattern

pytestmark = [pytest.mark.root, pytest.mark.debian("fuse3"), pytest.mark.slow]

CONTENT = pattern(300_000)
PYTHON = "/usr/bin/python3"
"""Unlike a virtual environment's, any user may run it."""
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
PRELUDE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, 9)
from bootseer.errors import BootseerError
from bootseer.fuse.serve.handover import supervise
from bootseer.fuse.mount.mount_point import find_mount
from bootseer.fuse.mount.mount_options import MountOptions
from tests.support.mounts.fuse import Mount
from tests.support.trees.memory import MemoryTree, pattern
where = sys.argv[1]
CONTENT = pattern(300_000)
def build():
    return MemoryTree({"f": CONTENT}, keep_cache=False)
def say(*words):
    print(*words, flush=True)
"""
# In namespaces of its own: /dev/fuse is open to all, as on a desktop or with a device plugin,
# and every process and mount ends with the first process.
OPEN_DEVICE = """
set -e
mount -t tmpfs none "$1"
mknod -m 666 "$1/fuse" c 10 229
mount --bind "$1/fuse" /dev/fuse
shift
exec "$@"
"""


@pytest.fixture(scope="module")
def everybodys() -> Iterator[Path]:
    """A directory that user 65534 reads, with the package and the test trees in it."""
    directory = Path(tempfile.mkdtemp(prefix="bootseer-"))
    try:
        directory.chmod(0o755)
        ignore = shutil.ignore_patterns("__pycache__")
        package = Path(bootseer.__file__).parent
        shutil.copytree(package, directory / "bootseer", ignore=ignore)
        for place in ("paths.py", "mounts/fuse.py", "trees/memory.py"):
            (directory / "tests/support" / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TESTS / "support" / place, directory / "tests/support" / place)
        subprocess.run(["chmod", "-R", "a+rX", directory], check=True)
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def where(everybodys: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="mount-", dir=everybodys))
    os.chown(directory, 65534, 65534)
    yield directory
    end_mount(directory)
    directory.rmdir()


def environment(everybodys: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(everybodys),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def as_plain_user(everybodys: Path, where: Path, code: str, *options: str) -> str:
    """What `code` says, run as user 65534 where /dev/fuse is open to all."""
    device = Path(tempfile.mkdtemp(prefix="device-", dir=everybodys))
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["sh", "-c", OPEN_DEVICE, "sh", str(device), *AS_NOBODY, *options]
    try:
        done = subprocess.run(
            [*command, PYTHON, "-c", PRELUDE + code, where],
            env=environment(everybodys),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        device.rmdir()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_user_mounts_reads_and_unmounts(everybodys: Path, where: Path) -> None:
    code = """
with Mount(build(), where):
    say(find_mount(where).kind)
    say(open(where + "/f", "rb").read() == CONTENT)
say(find_mount(where))
"""
    said = as_plain_user(everybodys, where, code)
    assert said.split() == ["fuse.bootseer", "True", "None"]


# Programs of their own: a fork of the server would hold its descriptor, and so wait for itself.
READER = """
import sys
try:
    sys.stdout.write(open(sys.argv[1], "rb").read()[:5].hex())
except OSError:
    sys.stdout.write("failed")
"""
KILLER = """
import os, signal, sys, time
supervisor, file = int(sys.argv[1]), sys.argv[2]
def worker(other_than):
    while True:
        with open(f"/proc/{supervisor}/task/{supervisor}/children") as children:
            for child in map(int, children.read().split()):
                if child not in (other_than, os.getpid()):
                    return child
        time.sleep(0.01)
first, killed = open(file, "rb").read(), 0
for _ in range(3):
    killed = worker(killed)
    os.kill(killed, 9)
    assert open(file, "rb").read() == first
print("read", len(first), flush=True)
os.kill(supervisor, signal.SIGTERM)
"""


def test_a_plain_users_failing_server_leaves_no_reader_waiting(
    everybodys: Path, where: Path
) -> None:
    code = f"""
import subprocess
from bootseer.fuse.serve.receive_loop import ReceiveLoop
ReceiveLoop._handle_other = None  # fault injection: both receiving threads fail
with Mount(build(), where):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", {READER!r}, where + "/f"], check=True)
        say()
say(find_mount(where))
"""
    assert as_plain_user(everybodys, where, code).split() == ["failed", "failed", "None"]


def test_a_plain_user_supervises(everybodys: Path, where: Path) -> None:
    code = f"""
import subprocess
def ready():
    words = [sys.executable, "-c", {KILLER!r}, str(os.getpid()), where + "/f"]
    globals()["killer"] = subprocess.Popen(words)
supervise(build, where, on_ready=ready)
say(killer.wait(), find_mount(where))
"""
    assert as_plain_user(everybodys, where, code).split() == ["read", "300000", "0", "None"]


REFUSED = """
try:
    Mount(build(), where).start()
except BootseerError as error:
    say(type(error).__name__, error)
"""


def test_without_new_privileges_the_way_out_is_named(everybodys: Path, where: Path) -> None:
    said = as_plain_user(everybodys, where, REFUSED, "--no-new-privs")
    assert said.startswith("AccessDeniedError fusermount3 did not mount")
    assert "no_new_privs: pass a mounted descriptor as /dev/fd/N" in said


def test_allow_other_is_the_administrators_to_allow(everybodys: Path, where: Path) -> None:
    code = REFUSED.replace(
        "(build(), where)", "(build(), where, options=MountOptions(allow_other=1))"
    )
    said = as_plain_user(everybodys, where, code)
    assert said.startswith("AccessDeniedError")
    assert "user_allow_other in /etc/fuse.conf" in said


def test_without_the_helper_the_package_is_named(everybodys: Path, where: Path) -> None:
    code = 'import bootseer.fuse.mount.mount_point as m; m.HELPER = "no-fusermount3"\n' + REFUSED
    said = as_plain_user(everybodys, where, code)
    assert said.startswith("NotSupportedError")
    assert "install the package fuse3" in said


def serve_passed(everybodys: Path, where: Path, code: str) -> subprocess.Popen[str]:
    """Mount here, and serve the descriptor without any privilege."""
    descriptor = open_mount(str(where), MountOptions(allow_other=True))
    try:
        return subprocess.Popen(
            [*AS_NOBODY, "--no-new-privs", PYTHON, "-c", PRELUDE + code, f"/dev/fd/{descriptor}"],
            env=environment(everybodys),
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[descriptor],
        )
    finally:
        os.close(descriptor)


def test_a_server_without_privilege_serves_a_passed_descriptor(
    everybodys: Path, where: Path
) -> None:
    code = """
mount = Mount(build(), where)
mount.start()
say(os.getuid())
mount.wait()
mount.close()
say("gone")
"""
    with serve_passed(everybodys, where, code) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "65534\n"
            assert in_time((where / "f").read_bytes) == CONTENT
            unmount(str(where))
            assert process.stdout.readline() == "gone\n"
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_passed_descriptor_survives_its_server(everybodys: Path, where: Path) -> None:
    code = """
supervise(build, where, on_ready=lambda: say("ready"), on_death=lambda pid: say("dead"))
say("ended")
"""
    with serve_passed(everybodys, where, code) as process:
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(3):
                assert in_time((where / "f").read_bytes) == CONTENT
                os.kill(int(Path(children).read_text().split()[0]), signal.SIGKILL)
                assert process.stdout.readline() == "dead\n"
            assert in_time((where / "f").read_bytes) == CONTENT
            process.terminate()
            assert process.stdout.readline() == "ended\n"
            assert process.wait(60) == 0
            # The descriptor went with the server, so that nobody waits for it.
            with pytest.raises(OSError, match="not connected"):
                os.statvfs(where)
        finally:
            process.kill()
