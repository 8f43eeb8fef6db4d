"""Signals through `bootseer run`: each arrives once, and deaths and stops look as without us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bootseer.entrypoint import job_process
from tests.support.commands.run import clean_env, lines, named, wrapped

pytestmark = pytest.mark.slow

# Prints the number of each signal that arrives; ends on SIGWINCH.
LISTENER = """
import os, signal
numbers = signal.valid_signals() - {9, 19, 17}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
os.write(1, b"ready %d\\n" % os.getpid())
while True:
    number = signal.sigwait(numbers)
    os.write(1, b"%d\\n" % number)
    if number == signal.SIGWINCH: os._exit(42)
"""
FORWARDED = sorted(
    set(range(1, 32)) - {4, 5, 7, 8, 9, 11, 17, 19, 31} - {signal.SIGWINCH} | {34, 40, 64}
)


class Job:
    """A wrapped command in a session of its own, so that nothing here is hit by its signals."""

    def __init__(self, tmp_path, *command: str, wrap: bool = True) -> None:
        self.events = tmp_path / "events"
        self.process = subprocess.Popen(
            wrapped(*command) if wrap else command,
            stdout=subprocess.PIPE,
            env=clean_env(BOOTSEER_EVENTS=str(self.events)),
            start_new_session=True,
        )
        self.child = int(self.read().split()[1])

    def read(self) -> bytes:
        return self.process.stdout.readline()

    def end(self) -> int:
        code = self.process.wait(60)
        self.process.stdout.close()
        return code

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        for pid in (self.child, self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(60)
        self.process.stdout.close()


def listener(tmp_path) -> Job:
    return Job(tmp_path, sys.executable, "-c", LISTENER)


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def test_every_signal_is_passed_on_once(tmp_path):
    with listener(tmp_path) as job:
        for number in FORWARDED:
            os.kill(job.process.pid, number)
            assert int(job.read()) == number
        os.kill(job.process.pid, signal.SIGWINCH)
        assert int(job.read()) == signal.SIGWINCH
        assert job.end() == 42
    assert named(job.events, "job", "end")[0]["attributes"]["process.exit.code"] == 42


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "ALRM", "KILL"])
def test_a_death_by_signal_is_128_and_its_number(tmp_path, name):
    number = signal.Signals[f"SIG{name}"]
    script = "import os, signal, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    script += "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    script += "print('ready', os.getpid(), flush=True)\nwhile True: signal.pause()"
    with Job(tmp_path, sys.executable, "-c", script) as job:
        # SIGKILL cannot be passed on, so it goes to the command itself.
        os.kill(job.child if name == "KILL" else job.process.pid, number)
        assert job.end() == 128 + number
    end = named(job.events, "job", "end")[0]
    assert end["attributes"]["error.type"] == f"signal_{int(number)}"
    assert end["status"] == "error"


def test_a_killed_wrapper_leaves_the_job_and_a_visible_open_phase(tmp_path):
    with listener(tmp_path) as job:
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.process.wait(60) == -signal.SIGKILL
        os.kill(job.child, signal.SIGUSR1)
        assert int(job.read()) == signal.SIGUSR1, "the job lives on"
    # In a container, when that began is told as well.
    told = [e["event"] for e in lines(job.events) if e["name"] != "container.start"]
    assert told == ["resource", "begin"]


def test_a_killed_group_takes_both(tmp_path):
    with listener(tmp_path) as job:
        assert os.getpgid(job.child) == job.process.pid
        os.killpg(job.process.pid, signal.SIGKILL)
        assert job.process.wait(60) == -signal.SIGKILL
        assert job.process.stdout.read() == b"", "nobody holds the pipe any more"


def test_stop_and_continue_through_us(tmp_path):
    script = "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    script += (
        "print('ready', os.getpid(), flush=True)\nsignal.sigwait([signal.SIGTERM])\nos._exit(3)"
    )
    with Job(tmp_path, sys.executable, "-c", script) as job:
        # SIGTSTP stops nobody in an orphaned group, so this stop is sent to the child itself.
        os.kill(job.child, signal.SIGSTOP)
        wait_for(lambda: state(job.child) == "T")
        wait_for(lambda: state(job.process.pid) != "R")  # it has heard of that
        assert state(job.process.pid) == "S", "without a terminal nobody would wake us"
        os.kill(job.process.pid, signal.SIGCONT)
        wait_for(lambda: state(job.child) == "S")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 3


def test_signals_before_the_command_runs_are_kept_for_it(tmp_path):
    """From the wrapper's first line on, nothing may be lost: the child must end."""
    process = subprocess.Popen(
        wrapped("sleep", "60"),
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path)),
        start_new_session=True,
    )
    wait_for(lambda: any(tmp_path.glob("*.jsonl")) or process.poll() is not None)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True).stdout == b""


def test_children_of_others_are_reaped_and_forgotten(tmp_path):
    """A command that is exec'ed by a shell may find children that it never made."""
    script = "sleep 0.05 & exec " + " ".join(wrapped("sh", "-c", "'sleep 0.2; exit 6'"))
    done = subprocess.run(
        ["sh", "-c", script], env=clean_env(BOOTSEER_EVENTS=str(tmp_path)), timeout=60
    )
    assert done.returncode == 6


def test_a_state_that_cannot_be_asked_counts_as_stopped(monkeypatch):
    """Injected: no thread to be had to read /proc with."""

    def fail(path):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("bootseer.system.processes.read_proc", fail)
    child = job_process.Child.__new__(job_process.Child)
    child.pid = os.getpid()
    assert child._is_stopped()
