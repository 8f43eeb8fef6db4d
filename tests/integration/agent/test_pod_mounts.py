"""FUSE mounts that the agent makes for processes without any privilege.

A "pod" here is a process as nobody in a mount namespace of its own, without capabilities and with
no_new_privs, where /dev/fuse is /dev/null.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import bootseer
from bootseer.agent.drain import count_pod_mounts, is_draining
from bootseer.agent.pod_mounts import MOST_AT_ONCE, MOST_MOUNTS
from bootseer.errors import DeadlineError, NotSupportedError
from bootseer.fuse.mount.agent_mount import LIMIT_S, VARIABLE
from tests.support.paths import TESTS
from tests.support.processes import command_name
from tests.support.trees.memory import pattern
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

NOBODY = 65534
PYTHON = "/usr/bin/python3"
"""Unlike a virtual environment's, any user may run it."""
CONTENT = pattern(300_000)
AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--bounding-set=-all", "--no-new-privs"),
]
POD = """
set -e
mount --bind /dev/null /dev/fuse
if test "$1" = shared; then mount --bind "$2" "$2"; mount --make-shared "$2"; fi
shift 2
exec "$@"
"""
PRELUDE = """
import json, os, socket, subprocess, sys, time
from bootseer.errors import BootseerError
from bootseer.fuse.mount import agent_mount
from bootseer.fuse.mount.mount_point import find_mount, unmount
from tests.support.mounts.fuse import Mount
from tests.support.trees.memory import MemoryTree, pattern
where = sys.argv[1]
CONTENT = pattern(300_000)
def build():
    return MemoryTree({"f": CONTENT}, keep_cache=False)
def say(*words):
    print(*words, flush=True)
def ask(request, *descriptors):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(os.environ["BOOTSEER_AGENT_SOCKET"])
        socket.send_fds(link, [request], descriptors)
        return json.loads(socket.recv_fds(link, 4096, 4)[0])["error"]
MOUNT = json.dumps(
    {"what": "mount", "read_only": True, "fsname": "x", "max_read_bytes": 65536}
).encode()
"""


class Node:
    """A folder that any user reads, with the package in it, and an agent for pods."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runtime = folder, folder / "run"
        self.socket = self.runtime / "pods/fuse.sock"
        self.agent: subprocess.Popen[bytes] | None = None

    def start_agent(self) -> None:
        words = [sys.executable, "-m", "bootseer", "agent", "--runtime", str(self.runtime)]
        self.agent = subprocess.Popen([*words, "--pods"])
        pid = self.agent.pid
        until(lambda: self.socket.exists() and children_of(pid), "the agent listens")

    def kill_agent(self) -> None:
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
            self.agent = None

    def server(self) -> int:
        """The process that answers pods."""
        assert self.agent is not None
        agent = self.agent.pid

        def look() -> int | None:  # a child has its name a moment after it is there
            names = {command_name(child): child for child in children_of(agent)}
            return names.get("bootseer-fuse")

        return until(look, "the server of pods") or 0

    def directory(self, owner: int = NOBODY) -> Path:
        made = Path(tempfile.mkdtemp(prefix="mount-", dir=self.folder))
        os.chown(made, owner, owner)
        return made

    def words(self, code: str, where: Path, *, shared: bool = False) -> list[str]:
        command = ["unshare", "--mount", "--fork", "--kill-child"]
        how = "shared" if shared else "private"
        command += ["sh", "-c", POD, "sh", how, str(where.parent), *AS_NOBODY]
        return [*command, PYTHON, "-c", PRELUDE + code, str(where)]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            VARIABLE: str(self.socket),
        }

    def run(self, code: str, where: Path | None = None, *, shared: bool = False) -> str:
        """What a pod says."""
        done = subprocess.run(
            self.words(code, where or self.directory(), shared=shared),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def node() -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="bootseer-"))
    made = Node(folder)
    try:
        folder.chmod(0o755)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(bootseer.__file__).parent, folder / "bootseer", ignore=ignore)
        for place in ("paths.py", "mounts/fuse.py", "trees/memory.py"):
            (folder / "tests/support" / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TESTS / "support" / place, folder / "tests/support" / place)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        made.runtime.mkdir(mode=0o711)
        made.start_agent()
        yield made
    finally:
        made.kill_agent()
        shutil.rmtree(folder)


SERVE = """
with Mount(build(), where):
    mounted = find_mount(where)
    say(mounted.kind, open(where + "/f", "rb").read() == CONTENT)
    (line,) = [line for line in open("/proc/self/mountinfo") if f" {where} " in line]
    say(line.split()[5], line.split()[-1])
"""


def test_a_pod_serves_a_mount_that_it_could_not_make(node: Node) -> None:
    first, second = node.run(SERVE).splitlines()
    assert first == "fuse.bootseer True"
    options, of_superblock = second.split()
    assert {"ro", "nosuid", "nodev"} <= set(options.split(","))
    assert {f"user_id={NOBODY}", f"group_id={NOBODY}"} <= set(of_superblock.split(","))
    assert "allow_other" not in of_superblock


def test_without_an_agent_a_pod_cannot_mount(node: Node) -> None:
    """What the other tests show is the agent's work."""
    node.kill_agent()
    said = node.run(
        "try:\n    Mount(build(), where).start()\nexcept BootseerError as e:\n    say('no', e)"
    )
    assert said.startswith("no")


def test_what_a_server_that_died_left_is_replaced(node: Node) -> None:
    """As when a command is run again in its container."""
    code = """
program = '''
import os, sys
sys.path[:0] = [p for p in os.environ["PYTHONPATH"].split(":")]
from tests.support.mounts.fuse import Mount
from tests.support.trees.memory import MemoryTree
Mount(MemoryTree({"f": b"old"}, keep_cache=False), sys.argv[1]).start()
os._exit(0)
'''
subprocess.run([sys.executable, "-c", program, where], check=True)
for _ in range(500):
    try:
        os.stat(where)
    except OSError as error:
        say(error.strerror)
        break
    time.sleep(0.01)
"""
    first, *rest = node.run(code + SERVE).splitlines()
    assert first == "Transport endpoint is not connected"
    assert rest[0] == "fuse.bootseer True"


def test_a_mount_outlives_the_agent(node: Node, tmp_path: Path) -> None:
    directory = node.directory()
    go, done = node.folder / "go", node.folder / "done"
    done.touch()
    os.chown(done, NOBODY, NOBODY)
    code = f"""
with Mount(build(), where):
    say("mounted")
    while not os.path.exists({str(go)!r}):
        time.sleep(0.01)
    say(open(where + "/f", "rb").read() == CONTENT)
"""
    words = node.words(code, directory)
    with subprocess.Popen(words, env=node.environment, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "mounted\n"
        node.kill_agent()
        node.start_agent()
        go.touch()
        assert pod.stdout.readline() == "True\n"
    assert pod.returncode == 0


def refused(node: Node, code: str, where: Path | None = None, *, shared: bool = False) -> str:
    return node.run(f"say(ask({code}))", where, shared=shared)


def test_what_a_pod_may_not_have_mounted(node: Node, tmp_path: Path) -> None:
    opened = "os.open(where, os.O_PATH)"
    own = node.directory(owner=0)
    assert "not owned" in refused(node, f"MOUNT, {opened}", own)
    assert "seen outside" in refused(node, f"MOUNT, {opened}", shared=True)
    file = node.folder / "file"
    file.touch()
    os.chown(file, NOBODY, NOBODY)
    assert "no directory" in refused(node, f"MOUNT, {opened}", file)
    assert "send one descriptor" in refused(node, "MOUNT")
    assert "send one descriptor" in refused(node, f"MOUNT, {opened}, {opened}")
    assert "cannot be read" in refused(node, f"b'{{}}', {opened}")
    assert "cannot be read" in refused(node, f"b'x', {opened}")
    unmount = b'{"what": "unmount"}'
    assert "nothing of this user's" in refused(node, f"{unmount!r}, {opened}")
    assert "only mount and unmount" in refused(node, f"""b'{{"what": "chroot"}}', {opened}""")
    large = 'MOUNT.replace(b"65536", b"99999999")'
    assert "max_read_bytes" in refused(node, f"{large}, {opened}")


TRY = """
try:
    Mount(build(), where).start()
except BootseerError as error:
    say("no:", error)
"""


def test_a_newer_pods_request_is_refused_and_the_pod_goes_on(node: Node) -> None:
    """FAKE: what a later version may send. It could not see that a field was left out."""
    opened = "os.open(where, os.O_PATH)"
    of_another = "of another version of bootseer"
    for field in (b'"version": 2', b'"version": null', b'"noexec": true'):
        request = f"MOUNT[:-1] + {b', ' + field + b'}'!r}, {opened}"
        assert of_another in refused(node, request)
    unmount = b'{"version": 1, "what": "unmount", "forced": true}'
    assert of_another in refused(node, f"{unmount!r}, {opened}")
    for request in ("b'[]'", "b'null'", """b'{"what": []}'"""):
        assert "cannot be read" in refused(node, f"{request}, {opened}")
    said = node.run("agent_mount.VERSION = 2" + TRY)
    assert said.startswith("no: fusermount3 did not mount")  # which is tried last
    assert of_another in said
    assert node.run(SERVE).startswith("fuse.bootseer True")


START = """
command = [sys.executable, "-m", "bootseer", "start", "--config", where + "/bootseer.toml"]
command += ["--events", where + "/events", "--", "cat", where + "/ckpt/model.pt"]
done = subprocess.run(command, capture_output=True)
written = [json.loads(line) for name in os.listdir(where + "/events")
           for line in open(where + "/events/" + name)]
loads = [e for e in written if (e["event"], e["name"]) == ("end", "checkpoint.load")]
say(json.dumps([done.returncode, done.stdout == CONTENT, done.stderr.decode(), loads]))
"""


@pytest.mark.parametrize("is_other", [False, True], ids=["same", "other"])
def test_a_start_in_a_pod_whose_agent_is_of_another_version(node: Node, is_other: bool) -> None:
    """Its checkpoint is copied, and the report says why."""
    if is_other:
        place = node.folder / "bootseer/fuse/mount/agent_mount.py"
        changed = place.read_text().replace("\nVERSION = 1\n", "\nVERSION = 2\n")
        assert changed != place.read_text()
        place.write_text(changed)
    for name in ("xxhash", "zstandard"):  # which Debian's Python may lack
        (package,) = importlib.import_module(name).__path__
        shutil.copytree(package, node.folder / name)
        subprocess.run(["chmod", "-R", "a+rX", node.folder / name], check=True)
    where, store = node.directory(), node.folder / "store"
    store.mkdir()
    (store / "model.pt").write_bytes(CONTENT)
    text = f'[checkpoint]\nurl = "file://{store}/model.pt"\nto = "{where}/ckpt"\nload = ["false"]\n'
    (where / "bootseer.toml").write_text(text)
    code, is_whole, error, loads = json.loads(node.run(START, where))
    (load,) = loads
    assert (code, is_whole, load["status"]) == (0, True, "ok"), error
    about = load["attributes"]
    assert about["bootseer.form"] == ("copy" if is_other else "mount")
    for told in (error, about["bootseer.why"]):
        assert ("of another version of bootseer" in told) == is_other


def test_a_socket_that_a_pod_may_not_open_costs_nothing(node: Node) -> None:
    node.socket.chmod(0o600)
    began_s = time.monotonic()
    said = node.run(TRY)
    assert said.startswith("no: fusermount3 did not mount")
    assert "Permission denied" in said or "permission" in said
    assert time.monotonic() - began_s < LIMIT_S


def test_a_plain_user_does_without_roots_agent(node: Node) -> None:
    """Whose socket it may see, or not even that."""
    images = node.runtime / "images"
    code = f"""
from bootseer.agent import client
say(os.path.exists({str(images / "agent.sock")!r}), client.is_available({str(node.runtime)!r}))
command = ["image", "mount", "--runtime", {str(node.runtime)!r}, "127.0.0.1:1/a/b:1", where]
done = subprocess.run(
    [sys.executable, "-m", "bootseer", *command], stderr=subprocess.PIPE, text=True
)
say(done.returncode, done.stderr)
"""
    for mode, sees in ((0o755, "True True"), (0o700, "False False")):
        images.chmod(mode)
        first, rest = node.run(code).split("\n", 1)
        assert first == sees
        assert rest.startswith(f"{NotSupportedError.exit_code} bootseer: mounting an image needs")
        assert rest.count("bootseer: ") == 1


def test_what_pods_have_mounted_is_in_use(node: Node) -> None:
    go = node.folder / "go"
    code = f"""
with Mount(build(), where):
    say("mounted")
    while not os.path.exists({str(go)!r}):
        time.sleep(0.01)
"""
    drain = [sys.executable, "-m", "bootseer", "agent", "--runtime", str(node.runtime), "--drain"]
    assert count_pod_mounts(str(node.runtime)) == 0
    words = node.words(code, node.directory())
    with subprocess.Popen(words, env=node.environment, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "mounted\n"
        assert count_pod_mounts(str(node.runtime)) == 1
        assert count_pod_mounts(str(node.folder)) == 0  # another agent's
        late = subprocess.run(
            [*drain, "--drain-limit", "0.5"], stderr=subprocess.PIPE, text=True, check=False
        )
        assert late.returncode == DeadlineError.exit_code
        assert "still in use" in late.stderr
        with subprocess.Popen(drain) as command:
            until(lambda: is_draining(str(node.runtime)), "it drains")
            said = node.run(TRY)
            assert said.startswith("no:")
            assert "it is to end" in said
            assert command.poll() is None
            go.touch()
            assert pod.wait(60) == 0
            assert command.wait(60) == 0
    assert node.agent is not None
    assert node.agent.wait(60) == 0


def test_what_others_read_is_not_covered(node: Node) -> None:
    """A pod's own entry in /proc is owned by its user."""
    said = node.run('say(ask(MOUNT, os.open(f"/proc/{os.getpid()}", os.O_PATH)))')
    assert said == "nothing is mounted over a file system of the kind proc"


def test_a_killed_agent_leaves_its_place_free(node: Node) -> None:
    """Though a pod's request is still being read."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as idle:
        idle.connect(str(node.socket))
        until(lambda: len(children_of(node.server())) == 1, "the request is read")
        node.kill_agent()
        node.start_agent()
    assert node.run(SERVE).startswith("fuse.bootseer True")


def children_of(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in path.read_text().split()]


def test_a_directory_of_another_namespace_is_refused(node: Node) -> None:
    """A process that got a descriptor of the node's own directory."""
    directory = node.directory()
    descriptor = os.open(directory, os.O_PATH)
    try:
        words = node.words(f"say(ask(MOUNT, {descriptor}))", directory)
        done = subprocess.run(
            words,
            env=node.environment,
            pass_fds=(descriptor,),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        os.close(descriptor)
    assert "not one of this process's mount namespace" in done.stdout


def test_a_process_of_another_user_namespace_is_refused(node: Node) -> None:
    code = """
import ctypes
assert ctypes.CDLL(None).unshare(0x10020000) == 0
say(ask(MOUNT, os.open(where, os.O_PATH)))
"""
    assert "user namespace" in node.run(code)


def test_a_pod_gets_only_so_many(node: Node) -> None:
    code = """
def ask_for(number):
    os.mkdir(f"{where}/{number}")
    return ask(MOUNT, os.open(f"{where}/{number}", os.O_PATH))
answers = [ask_for(number) for number in range(MOST + 2)]
assert answers[:MOST] == [""] * MOST, answers
say("\\n".join(answers[MOST:]))
"""
    said = node.run(code.replace("MOST", str(MOST_MOUNTS))).splitlines()
    assert said == [f"there are {MOST_MOUNTS} mounts already"] * 2


def test_an_agent_that_hangs_costs_seconds(node: Node) -> None:
    os.kill(node.server(), signal.SIGSTOP)
    code = """
began = time.monotonic()
try:
    Mount(build(), where).start()
except BootseerError as error:
    say(time.monotonic() - began, error)
"""
    try:
        took_s, reason = node.run(code).split(" ", 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.server(), signal.SIGCONT)
    assert float(took_s) < LIMIT_S + 3
    assert "agent" in reason
    until(lambda: node.run(SERVE).startswith("fuse.bootseer"), "it answers again")


def test_a_client_that_says_nothing_costs_nothing(node: Node) -> None:
    code = """
links = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
for link in links:
    link.connect(os.environ["BOOTSEER_AGENT_SOCKET"])
say(ask(MOUNT, os.open(where, os.O_PATH)))
time.sleep(5)
"""
    with subprocess.Popen(
        node.words(code, node.directory()),
        env=node.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "too many requests at a time; try again\n"
        assert len(children_of(node.server())) <= MOST_AT_ONCE
        assert node.run(SERVE).startswith("fuse.bootseer True")  # another pod
    assert pod.returncode == 0
