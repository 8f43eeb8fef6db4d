"""Programs that a task of the agent has its client run, and what becomes of either when killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.agent import client
from bootseer.agent.client import LOST
from bootseer.errors import NotFoundError
from bootseer.imageprefetch.run.command import run_foreground
from tests.faults.agent.test_fork_server import AGENT, process
from tests.support.waiting import until

pytestmark = pytest.mark.root
CLIENT = """
import sys
from bootseer.agent import client
from bootseer.imageprefetch.run.command import run_foreground
runtime, *words = sys.argv[1:]
def run(program, on_signal):
    return run_foreground(program.words, on_signal, program.environ)
FAULT
print(client.ask(words, runtime=runtime, silent_s=0.9, run_program=run))
"""
WAITING = "echo $FROM_TASK; trap 'exit 7' TERM; touch running; while :; do sleep 0.02; done"


class Lab:
    """An agent, and clients of it whose working directory is `folder`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.runtime = folder / "runtime"
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        words = [sys.executable, "-c", AGENT, str(self.runtime), *options]
        self.agent = subprocess.Popen(words, env=self.environ)

    def ask(self, task: str, *words: str, fault: str = "") -> subprocess.Popen[str]:
        code = CLIENT.replace("FAULT", fault)
        command = [sys.executable, "-c", code, str(self.runtime), "test", task, *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *program: str, fault: str = "") -> subprocess.Popen[str]:
        """A client that runs this program for a task, after some code of a fault."""
        return self.ask("have_run", str(self.folder), *program, fault=fault)

    def await_program(self, child: subprocess.Popen[str]) -> None:
        """Wait until the client's program runs, and the client passes signals on to it."""
        until((self.folder / "running").exists, "the program")
        status = Path(f"/proc/{child.pid}/status")

        def heeds() -> bool:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            return bool(int(lines["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)

        until(heeds, "the client heeds signals")

    @property
    def task(self) -> int:
        return process(self.folder, "begun")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    try:
        until((lab.runtime / "images/agent.sock").exists, "the agent")
        yield lab
    finally:
        lab.agent.terminate()
        lab.agent.wait()


def ended(child: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, error = child.communicate(timeout=60)
    assert child.returncode == 0, error
    return out.split(), error


def test_a_program_runs_in_the_client_as_the_task_says(lab: Lab) -> None:
    child = lab.run("sh", "-c", "echo $FROM_TASK $PPID; exit 3")
    assert ended(child) == (["told", str(child.pid), "250"], "")
    assert json.loads((lab.folder / "codes").read_text()) == [3, 0, []]


def test_the_task_hears_of_signals_that_are_passed_on(lab: Lab) -> None:
    child = lab.run("sh", "-c", WAITING)
    lab.await_program(child)
    child.send_signal(signal.SIGTERM)
    assert ended(child) == (["told", "250"], "")
    assert json.loads((lab.folder / "codes").read_text()) == [7, 0, [signal.SIGTERM]]


def test_a_program_may_run_longer_than_a_task_may_be_silent(lab: Lab) -> None:
    child = lab.run("sleep", "2.5")
    assert ended(child) == (["250"], "")
    assert json.loads((lab.folder / "codes").read_text()) == [0, 0, []]


def test_signals_to_a_task_that_waits_for_its_program_change_nothing(lab: Lab) -> None:
    child = lab.run("sh", "-c", WAITING)
    lab.await_program(child)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(lab.task, number)
    child.send_signal(signal.SIGTERM)
    assert ended(child) == (["told", "250"], "")
    assert not (lab.folder / "undone").exists()


def test_a_program_goes_on_whose_task_was_killed(lab: Lab) -> None:
    child = lab.run("sh", "-c", WAITING)
    lab.await_program(child)
    os.kill(lab.task, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{lab.task}").exists(), "the task's end")
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert ended(child) == (["told", "7"], "")  # the program's own exit code


def test_a_killed_clients_task_undoes_nothing(lab: Lab) -> None:
    child = lab.run("sh", "-c", f"echo $$ > program; {WAITING}")
    lab.await_program(child)
    child.kill()
    until(lambda: not Path(f"/proc/{lab.task}").exists(), "the task's end")
    program = int((lab.folder / "program").read_text())
    os.kill(program, signal.SIGKILL)  # it was there still
    child.communicate(timeout=60)
    assert not (lab.folder / "undone").exists()
    assert not (lab.folder / "codes").exists()


def test_a_killed_agents_task_goes_on(lab: Lab) -> None:
    child = lab.run("sh", "-c", WAITING)
    lab.await_program(child)
    lab.agent.kill()
    lab.agent.wait()
    child.send_signal(signal.SIGTERM)
    assert ended(child) == (["told", "250"], "")


def test_what_is_lost_before_its_last_program_begins_again(lab: Lab) -> None:
    assert ended(lab.ask("have_run_before")) == ([str(LOST)], "")
    assert ended(lab.ask("have_run_again")) == ([str(LOST)], "")


UNKILLABLE = """
import signal
signal.pidfd_send_signal = lambda *_: None
client._UMOUNT_SILENT_S = 0.3
"""


def test_a_task_that_cannot_be_killed_changes_no_exit_code(lab: Lab) -> None:
    """Injected: signals that do not arrive, as in a process that the kernel holds."""
    child = lab.run("sh", "-c", "kill -STOP $(ls | sed -n 's/begun-//p'); exit 3", fault=UNKILLABLE)
    assert child.wait(60) == 0
    os.kill(lab.task, signal.SIGKILL)  # it has the client's streams
    out, error = ended(child)
    assert (out, error.count("\n")) == (["3"], 1)
    assert "cannot be ended; start the agent again" in error


def test_a_program_runs_once_where_ended_children_are_not_kept(lab: Lab) -> None:
    ignored = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    child = lab.run("sh", "-c", "echo ran; exit 3", fault=ignored)
    assert ended(child) == (["ran", "250"], "")
    assert json.loads((lab.folder / "codes").read_text()) == [3, 0, []]


def test_a_signal_that_comes_as_the_program_ends_is_harmless(lab: Lab) -> None:
    """Injected: a child that is gone when the signal is passed on to it."""
    gone = "from bootseer.imageprefetch.run import command\ncommand.os.kill = lambda *_: os_kill()"
    raising = f"def os_kill(): raise ProcessLookupError\n{gone}"
    waiting = "touch running; while ! test -e go; do sleep 0.02; done; "
    child = lab.run("sh", "-c", f"{waiting}kill -TERM $PPID; sleep 0.3; exit 3", fault=raising)
    lab.await_program(child)
    (lab.folder / "go").touch()
    assert ended(child) == (["250"], "")
    assert json.loads((lab.folder / "codes").read_text()) == [3, 0, [signal.SIGTERM]]


INTERRUPTED_BEFORE_IT_RUNS = """
from bootseer.agent import protocol
def struck(link, *, await_answer=protocol.await_answer, **limits):
    answer = await_answer(link, **limits)
    if isinstance(answer, protocol.Program):
        print("struck", flush=True)
        raise KeyboardInterrupt
    return answer
protocol.await_answer = struck
"""


def test_a_task_undoes_whose_client_was_interrupted_before_its_program(lab: Lab) -> None:
    child = lab.run("touch", "running", fault=INTERRUPTED_BEFORE_IT_RUNS)
    out, error = child.communicate(timeout=60)
    assert (out, error.splitlines()[-1]) == ("struck\n", "KeyboardInterrupt")
    assert (lab.folder / "undone").exists()
    assert not (lab.folder / "running").exists()


def test_an_interrupted_client_waits_until_all_is_undone(lab: Lab) -> None:
    """The undoing takes longer than a task is silent."""
    child = lab.ask("undo", str(lab.folder))
    process(lab.folder, "begun")
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert error.splitlines()[-1] == "KeyboardInterrupt"
    assert (lab.folder / "undone").exists()


SIGNALLED_AS_IT_BEGINS = """
import os, signal, subprocess
class Signalled(subprocess.Popen):
    def __init__(self, words, **options):
        super().__init__(words, **options)
        subprocess.Popen = Signalled.__base__
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Signalled
"""


def test_a_signal_for_a_program_that_never_begins_is_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[int] = []

    def fail(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        assert not heard
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(subprocess, "Popen", fail)
    before = signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    try:
        with pytest.raises(NotFoundError):
            run_foreground(["absent"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGHUP]


SIGNALLED_AS_HANDLERS_ARE_REPLACED = """
import os, signal
def struck(number, handler, replace=signal.signal):
    replaced = replace(number, handler)
    signal.signal = replace
    os.kill(os.getpid(), signal.SIGTERM)
    return replaced
signal.signal = struck
"""


@pytest.mark.parametrize("fault", [SIGNALLED_AS_HANDLERS_ARE_REPLACED, SIGNALLED_AS_IT_BEGINS])
def test_a_signal_as_the_program_begins_reaches_it(lab: Lab, fault: str) -> None:
    child = lab.run("sleep", "60", fault=fault)
    assert ended(child) == (["250"], "")
    ending = 128 + signal.SIGTERM
    assert json.loads((lab.folder / "codes").read_text()) == [ending, 0, [signal.SIGTERM]]


def test_an_agent_that_was_lost_is_asked_for_nothing_more(lab: Lab) -> None:
    again = "client.ask(['test', 'die'], runtime=runtime)\nassert not client.is_available(runtime)"
    assert ended(lab.ask("decline", fault=again)) == (["None"], "")
    assert ended(lab.ask("leave", "0")) == (["130"], "")


def test_an_agent_that_is_left_behind_serves_its_own_control_groups(tmp_path: Path) -> None:
    """What serves a container must not end with another one's unit or job."""
    places = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
    base = next(place for place in places if (place / "cgroup.procs").exists())
    group = base / f"bootseer-test-{os.getpid()}"
    group.mkdir()
    lab = Lab(tmp_path, "60")
    try:
        until((lab.runtime / "images/agent.sock").exists, "the agent")
        assert ended(lab.ask("leave", "0")) == (["130"], "")
        move = f"open('{group}/cgroup.procs', 'w').write('0')"
        assert ended(lab.ask("leave", "0", fault=move)) == (["None"], "")
    finally:
        lab.agent.terminate()
        lab.agent.wait()
        group.rmdir()


IMPOSTOR = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
link = listener.accept()[0]
try:
    link.sendall(bytes([253]))
    received = link.recv(1 << 16)
except OSError:
    received = b""
print(len(received), flush=True)
"""


def test_nothing_is_sent_to_another_users_process_behind_a_socket_of_ours(tmp_path: Path) -> None:
    """A fake agent, of another user, whose socket's path was made to look like root's."""
    path = tmp_path / "images/agent.sock"
    path.parent.mkdir()
    for folder in (tmp_path, path.parent):
        folder.chmod(0o777)
    tmp_path.parent.chmod(0o755)
    words = [sys.executable, "-c", IMPOSTOR, "agent.sock"]
    with subprocess.Popen(words, cwd=path.parent, stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "ready\n"
        os.chown(path, 0, 0)
        assert client.is_available(str(tmp_path))
        assert client.ask(["test", "leave", "0"], runtime=str(tmp_path)) is None
        assert impostor.stdout.readline() == "0\n"


def test_a_task_that_has_done_nothing_is_left_to_the_client(lab: Lab) -> None:
    assert ended(lab.ask("decline")) == (["None"], "")
    assert ended(lab.ask("die")) == ([str(LOST)], "")
