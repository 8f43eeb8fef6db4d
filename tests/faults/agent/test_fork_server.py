"""The fork server: what a task is given, and what becomes of it when somebody is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bootseer
from bootseer.agent import protocol
from bootseer.agent.client import INTERRUPTED
from bootseer.agent.fork_server import TaskTable
from bootseer.agent.private_server import PrivateServer
from bootseer.errors import DeadlineError, StoreUnavailableError
from tests.support.paths import ROOT
from tests.support.waiting import until

TASKS = TaskTable(
    {
        f"test {name}": f"tests.support.programs.agent_tasks:{name}"
        for name in (
            *("describe", "wait", "undo", "die", "fail", "leave"),
            *("decline", "have_run", "have_run_before", "have_run_again"),
        )
    },
    with_programs=["test have_run", "test have_run_before", "test have_run_again"],
)


@pytest.fixture
def server() -> Iterator[PrivateServer]:
    made = PrivateServer("the test", TASKS, limit_s=60.0, environ={"GIVEN": "above"})
    yield made
    made.close()


def process(folder: Path, what: str) -> int:
    """The process that left a file in the folder."""
    until(lambda: any(folder.glob(f"{what}-*")), what)
    return int(next(folder.glob(f"{what}-*")).name.partition("-")[2])


@pytest.fixture
def asked(server: PrivateServer, tmp_path: Path) -> Iterator[Callable[[], int | None]]:
    """The task `wait`, begun by a thread; call it for its exit code."""
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.ask(["test", "wait", str(tmp_path)], 1))
    )
    thread.start()
    process(tmp_path, "begun")

    def answer() -> int | None:
        thread.join(30)
        return answers[0] if answers else None

    yield answer
    (tmp_path / "go").touch()
    thread.join(30)


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [[], ["image", "mount"], ["a", "", "b\n\udcff", "="], ["x" * 300_000]]
)
def test_a_request_is_received_as_it_was_sent(words: list[str]) -> None:
    environ = {"A": "1", "EMPTY": "", "B": "x=y\n", "LONG": "y" * 300_000}
    ours, theirs = socket.socketpair()
    streams = os.pipe()
    with ours, theirs:
        sending = threading.Thread(
            target=protocol.send_request, args=(ours, words, environ, (*streams, 2))
        )
        sending.start()
        request = protocol.receive_request(theirs)
        sending.join()
    assert (request.words, request.environ) == (words, environ)
    sent = [os.stat(fd) for fd in (*streams, 2)] + [os.stat(".")]
    received = [os.stat(fd) for fd in request.descriptors]
    assert [(s.st_dev, s.st_ino) for s in received] == [(s.st_dev, s.st_ino) for s in sent]
    assert not any(os.get_inheritable(fd) for fd in request.descriptors)
    for descriptor in (*streams, *request.descriptors):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("sent", "raised"),
    [
        (b"", BrokenPipeError),
        (b"\1", BrokenPipeError),
        ((10).to_bytes(4, sys.byteorder) + b"1\0", BrokenPipeError),
        ((4).to_bytes(4, sys.byteorder) + b"2\0a\0", ValueError),
        ((5).to_bytes(4, sys.byteorder) + b"-1\0a\0", ValueError),
        ((2).to_bytes(4, sys.byteorder) + b"a\0", ValueError),
        ((0).to_bytes(4, sys.byteorder), ValueError),
        (b"\xff" * 4 + bytes(protocol.MOST_REQUEST_BYTES), ValueError),
    ],
)
def test_a_request_that_is_none_is_refused(sent: bytes, raised: type[Exception]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:

        def send() -> None:
            with ours:
                assert ours.recv(1)
                ours.sendall(sent)

        sending = threading.Thread(target=send)
        sending.start()
        with pytest.raises(raised):
            protocol.receive_request(theirs)
        sending.join()


# --- tasks ---------------------------------------------------------------------------------------


def test_a_task_has_what_its_client_has(server: PrivateServer, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as output:
        assert server.ask(["test", "describe", "a b", ""], output.fileno()) == 7
        output.seek(0)
        about = json.load(output)
    words = ["test", "describe", "a b", ""]
    assert about == {"words": words, "directory": os.getcwd(), "given": "above"}
    pid = server.pid
    assert server.ask(["test", "leave", "3"], 1) == INTERRUPTED
    assert server.ask(["test", "none"], 1) == protocol.REFUSED
    assert server.ask([], 1) == protocol.REFUSED
    assert server.pid == pid


def test_a_task_that_fails_says_why(server: PrivateServer, capfd: pytest.CaptureFixture) -> None:
    assert server.ask(["test", "fail"], 1) == 1
    assert capfd.readouterr().err == "bootseer: the agent failed: RuntimeError('as told')\n"


def test_tasks_run_side_by_side(
    server: PrivateServer, asked: Callable[[], int | None], tmp_path: Path
) -> None:
    assert server.ask(["test", "leave", "0"], 1) == INTERRUPTED
    (tmp_path / "go").touch()
    assert asked() == 0


WITHOUT_STREAMS = """
import os, sys
from bootseer.agent.private_server import PrivateServer
from tests.faults.agent.test_fork_server import TASKS
server = PrivateServer("the test", TASKS, limit_s=60.0, environ={})
code = server.ask(["test", "describe"], os.open(os.devnull, os.O_WRONLY))
server.close()
sys.exit(code)
"""


@pytest.mark.parametrize("closing", ["2>&-", "<&- >&- 2>&-"])
def test_a_task_without_standard_streams_has_its_answer(closing: str) -> None:
    words = ["sh", "-c", f'"$@" {closing}', "sh", sys.executable, "-c", WITHOUT_STREAMS]
    assert subprocess.run(words, cwd=ROOT, timeout=120, check=False).returncode == 7


WITH_FILLED_STREAMS = """
import json, os, sys
from bootseer.agent.private_server import PrivateServer
from bootseer.system.processes import fill_streams
from tests.faults.agent.test_fork_server import TASKS
fill_streams()
server = PrivateServer("the test", TASKS, limit_s=60.0, environ={})
readable, writable = os.pipe()
code = server.ask(["test", "describe"], writable)
os.close(writable)
answer = os.read(readable, 65536)
server.close()
sys.exit(code if answer and json.loads(answer)["words"] == ["test", "describe"] else 1)
"""


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_the_answer_arrives_whatever_stream_the_program_lacked(closing: str) -> None:
    """What a program puts in its place is closed on exec: the server lacks it again."""
    words = ["sh", "-c", f'"$@" {closing}', "sh", sys.executable, "-c", WITH_FILLED_STREAMS]
    assert subprocess.run(words, cwd=ROOT, timeout=120, check=False).returncode == 7


def test_a_request_that_lost_its_connection_ends_no_server(server: PrivateServer) -> None:
    """Injected: data without a descriptor, as the kernel sends it to a process that has too many.

    An IndexError ended the server.
    """
    assert server.ask(["test", "leave", "0"], 1) == INTERRUPTED
    pid = server.pid
    server._connected().send(b"\0")
    assert server.ask(["test", "leave", "0"], 1) == INTERRUPTED
    assert server.pid == pid


# --- kills ---------------------------------------------------------------------------------------


def test_a_killed_server_leaves_its_tasks_and_another_takes_over(
    server: PrivateServer, asked: Callable[[], int | None], tmp_path: Path
) -> None:
    killed = server.pid
    os.kill(killed, signal.SIGKILL)
    assert server.ask(["test", "leave", "0"], 1) == INTERRUPTED
    assert server.pid != killed
    (tmp_path / "go").touch()
    assert asked() == 0
    assert len(list(tmp_path.glob("begun-*"))) == 1


def test_a_killed_task_runs_again(
    server: PrivateServer, asked: Callable[[], int | None], tmp_path: Path
) -> None:
    os.kill(process(tmp_path, "begun"), signal.SIGKILL)
    until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "another try")
    (tmp_path / "go").touch()
    assert asked() == 0


def test_a_task_that_is_killed_each_time_is_given_up(server: PrivateServer) -> None:
    with pytest.raises(StoreUnavailableError, match="the test keeps dying"):
        server.ask(["test", "die"], 1)


def test_an_interrupted_task_says_so(
    server: PrivateServer, asked: Callable[[], int | None], tmp_path: Path
) -> None:
    os.kill(process(tmp_path, "begun"), signal.SIGINT)
    assert asked() == INTERRUPTED
    assert process(tmp_path, "interrupted") == process(tmp_path, "begun")


def test_a_task_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    server = PrivateServer("the test", TASKS, limit_s=3.0, environ={})
    try:
        with pytest.raises(DeadlineError, match="the test took more than 3 s"):
            server.ask(["test", "wait", str(tmp_path)], 1)
        process(tmp_path, "interrupted")
    finally:
        server.close()


CLIENT = """
import sys
from tests.faults.agent.test_fork_server import TASKS
from bootseer.agent.private_server import PrivateServer
server = PrivateServer("the test", TASKS, limit_s=60.0, environ={})
server.start()
print(server.pid, flush=True)
server.ask(["test", "wait", sys.argv[1]], 1)
"""


def test_a_killed_clients_task_is_interrupted_and_its_server_ends(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CLIENT, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        begun = process(tmp_path, "begun")
        client.kill()
        assert process(tmp_path, "interrupted") == begun
        until(lambda: not Path(f"/proc/{pid}").exists(), "the server's end")
        until(lambda: not Path(f"/proc/{begun}").exists(), "the task's end")
    assert not (tmp_path / "go").exists()


# --- the node's agent ----------------------------------------------------------------------------

AGENT = """
import sys
from tests.faults.agent.test_fork_server import TASKS
from bootseer.agent import server
server.serve(sys.argv[1], TASKS, idle_exit_s=float(sys.argv[2]) if sys.argv[2:] else 0.0)
"""
ASK = """
import sys
from bootseer.agent import client
print(client.ask(["test", "leave", "0"], runtime=sys.argv[1]))
"""


@pytest.mark.root
def test_an_agent_runs_nothing_for_another_namespace(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def ask(*before: str) -> str:
        words = [*before, sys.executable, "-c", ASK, str(tmp_path)]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.strip()

    assert ask() == "None"
    with subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], env=environ) as agent:
        try:
            until((tmp_path / "images/agent.sock").exists, "the agent")
            assert ask() == str(INTERRUPTED)
            assert ask("unshare", "--mount") == "None"
            assert ask("unshare", "--net") == "None"
            assert ask("unshare", "--pid", "--fork") == "None"
            assert ask() == str(INTERRUPTED)
        finally:
            agent.terminate()
    assert agent.returncode == 0
    assert not (tmp_path / "images/agent.sock").exists()
    assert ask() == "None"


@pytest.mark.root
def test_requests_that_are_refused_keep_no_agent_alive(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", ASK, str(tmp_path)]

    def ask(*before: str) -> bytes:
        done = subprocess.run([*before, *words], env=environ, capture_output=True, check=True)
        return done.stdout

    idle = [sys.executable, "-c", AGENT, str(tmp_path), "4.0"]
    with subprocess.Popen(idle, env=environ) as agent:
        try:
            until((tmp_path / "images/agent.sock").exists, "the agent")
            assert ask() == b"%d\n" % INTERRUPTED
            refused, until_s = 0, time.monotonic() + 30
            while agent.poll() is None and time.monotonic() < until_s:
                assert ask("unshare", "--net") == b"None\n"
                refused += 1
            assert agent.poll() == 0
            assert refused > 3
        finally:
            agent.terminate()


WITHOUT_EXTRAS = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {
            *("docker", "fsspec", "fuse", "google", "grpc", "hdfs_native", "pyarrow"),
            *("pyfuse3", "requests", "requests_gssapi", "torch", "yaml"),
        }:
            told.add(name)
            raise ModuleNotFoundError(name)
told = set()
sys.meta_path.insert(0, Missing())
from bootseer.cli import root
code = root.main(["agent", "--loaded-version"])
print(*sorted(told))
sys.exit(code)
"""


def test_an_agent_begins_where_no_extra_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    version, missed = done.stdout.splitlines()
    assert version == bootseer.__version__
    assert "requests" in missed.split()
