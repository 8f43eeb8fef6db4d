"""`image run --config` on a node with an agent, which does all but run podman."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.agent.client import LOST_TEXT
from bootseer.system.processes import children_of
from tests.support.labs.containers import (
    SUM,
    WAIT,
    ContainerLab,
    checkpoint,
    deps,
    times,
)
from tests.support.processes import command_name
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("podman"),
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]

SHOW = "cat /opt/new; sha256sum /ckpt/model.pt"
SHOWN = f"new\n{SUM}"
BOOTSEER = [sys.executable, "-m", "bootseer"]


def begun(lab: ContainerLab, ref: str, *words: str) -> subprocess.Popen[str]:
    """A start that goes on, with both of its streams."""
    pipe, environ = subprocess.PIPE, lab.environment
    command = lab.words(ref, *words)
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)


@contextlib.contextmanager
def agent(lab: ContainerLab, code: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """The node's agent, as it is, or with a fault that `code` injects."""
    words = [*BOOTSEER, "agent"]
    if code:
        words = [sys.executable, "-c", code, str(lab.folder), str(lab.runtime)]
    with subprocess.Popen(words, env=lab.environment) as running:
        try:
            until((lab.runtime / "images/agent.sock").exists, "the agent")
            yield running
        finally:
            if code:
                (lab.folder / "goes-on").touch()
            running.send_signal(signal.SIGCONT)
            running.terminate()


@contextlib.contextmanager
def prepared(lab: ContainerLab) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An image whose layer is published, and the node's agent."""
    ref = lab.publish()
    lab.configure(deps(lab) + checkpoint(lab, f'cache = "{lab.cache}"\n'))
    with agent(lab) as running:
        assert lab.run(ref, "sh", "-c", SHOW)[0] == SHOWN
        lab.await_layers(ref)
        yield ref, running


def tasks(agent: subprocess.Popen[bytes]) -> list[int]:
    """The agent's processes that carry out requests."""
    return [
        child
        for child in children_of(agent.pid)
        if command_name(child) not in ("bootseer-sweep", "")
    ]


def test_podman_is_the_commands_child_and_all_else_the_agents(lab: ContainerLab) -> None:
    with prepared(lab) as (ref, running):
        job = f"{WAIT}{SHOW}; exit 250"
        with lab.begun(ref, job) as command:
            (podman,) = children_of(command.pid)
            assert command_name(podman) == "podman"
            (task,) = tasks(running)
            fields = Path(f"/proc/{podman}/stat").read_text().rpartition(")")[2].split()
            assert int(fields[2]) == os.getpgid(command.pid)  # and so an interrupt reaches it
            environ = Path(f"/proc/{podman}/environ").read_text()
            assert "BOOTSEER_CLIENT_VERSION" not in environ
            (lab.log / "go").touch()
            assert command.communicate(timeout=60)[0] == SHOWN
        assert command.returncode == 250
        assert times(lab) == 1
        assert list(lab.events.glob(f"*-{task}-*.jsonl"))
        until(lambda: not tasks(running), "the task's end")
        assert lab.left() == []


def test_a_command_that_is_ended_passes_that_on(lab: ContainerLab) -> None:
    with prepared(lab) as (ref, running):
        job = "trap 'echo asked; exit 9' TERM; " + WAIT
        with lab.begun(ref, job) as command:
            command.terminate()
            assert command.communicate(timeout=60)[0] == "asked\n"
        assert command.returncode == 9
        until(lambda: not tasks(running), "the task's end")
        assert lab.left() == []


def test_a_container_goes_on_whose_task_was_killed(lab: ContainerLab) -> None:
    with prepared(lab) as (ref, running):
        with lab.begun(ref, f"{WAIT}{SHOW}; exit 8") as command:
            (task,) = tasks(running)
            os.kill(task, signal.SIGKILL)
            until(lambda: not tasks(running), "the task's end")
            (lab.log / "go").touch()
            out, _ = command.communicate(timeout=60)
        assert (command.returncode, out) == (8, SHOWN)
        (lab.log / "go").unlink()
        assert lab.run(ref, "sh", "-c", SHOW)[0] == SHOWN
        until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


def test_a_killed_command_leaves_its_container_what_it_needs(lab: ContainerLab) -> None:
    with prepared(lab) as (ref, running):
        with lab.begun(ref, f"{WAIT}{{ {SHOW}; }} > /log/seen") as command:
            command.kill()
            until(lambda: not tasks(running), "the task's end")
        seen = lab.log / "seen"
        until(lambda: seen.exists() and seen.read_text() != "", "the container went on")
        until(lambda: seen.read_text().startswith("new\n"), "it read its layer")
        until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


HOLD = """
import os, sys, time
from pathlib import Path
from bootseer.cli import agent
from bootseer.imageprefetch.run import run_image
on_image, folder = run_image._on_mounted_image, Path(sys.argv[1])
def hold(*about):
    made = on_image(*about)
    (folder / "mounted").touch()
    while not (folder / "goes-on").exists():
        time.sleep(0.01)
    return made
run_image._on_mounted_image = hold
agent.command(["--runtime", sys.argv[2]])
"""


HOLD_AFTER_INSTALL = """
import os, sys, time
from pathlib import Path
from bootseer.cli import agent
from bootseer.entrypoint.container.deps_layer import DepsLayer
install, folder = DepsLayer._install, Path(sys.argv[1])
def hold(layer):
    install(layer)
    (folder / "installed").touch()
    while not (folder / "goes-on").exists():
        time.sleep(0.01)
DepsLayer._install = hold
agent.command(["--runtime", sys.argv[2]])
"""


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_start_goes_on_by_itself_when_its_task_is_lost(
    lab: ContainerLab, strike: signal.Signals
) -> None:
    """Injected: a task that waits when it has mounted, so that it can be struck there."""
    with prepared(lab) as (ref, _):
        pass
    with (
        agent(lab, HOLD) as running,
        begun(lab, ref, "sh", "-c", SHOW) as command,
    ):
        until((lab.folder / "mounted").exists, "the mount")
        assert any("tree" in line for line in lab.left())
        (task,) = tasks(running)
        os.kill(task, strike)
        out, error = command.communicate(timeout=90)
        assert (command.returncode, out) == (0, SHOWN), error
        assert "bootseer: mounted" in error.partition(f"bootseer: {LOST_TEXT}\n")[2], error
        until(lambda: not Path(f"/proc/{task}").exists(), "the task's end")
    until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


def test_an_interrupted_command_has_its_start_taken_back(lab: ContainerLab) -> None:
    with prepared(lab) as (ref, _):
        pass
    with agent(lab, HOLD) as running:
        command = subprocess.Popen(lab.words(ref, "true"), env=lab.environment)
        until((lab.folder / "mounted").exists, "the mount")
        command.terminate()
        assert command.wait(60) == 128 + signal.SIGTERM
        until(lambda: not tasks(running), "the task's end")
        assert lab.left() == []


def test_a_command_that_the_agent_does_not_parse_starts_all_the_same(lab: ContainerLab) -> None:
    with prepared(lab) as (ref, _):
        words = lab.words(ref, "sh", "-c", SHOW)
        words[words.index("run") + 1 : words.index("run") + 1] = ["--deadline", "60"]
        done = lab.execute(words)
        assert (done.returncode, done.stdout) == (0, SHOWN), done.stderr


def test_an_agent_that_does_not_answer_is_asked_once(lab: ContainerLab) -> None:
    """A fake: a socket like that of an agent which was stopped."""
    with prepared(lab) as (ref, _):
        pass
    path = lab.runtime / "images/agent.sock"
    until(lambda: not path.exists(), "the agent's end")
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen(16)
        assert lab.run(ref, "sh", "-c", SHOW)[0] == SHOWN
        stopped.setblocking(False)
        stopped.accept()[0].close()
        with pytest.raises(BlockingIOError):
            stopped.accept()
    path.unlink()


def test_the_jobs_own_options_are_not_ours(lab: ContainerLab) -> None:
    with prepared(lab) as (ref, running):
        job = ("sh", "-c", WAIT, "sh", "--runtime", "/elsewhere")
        with subprocess.Popen(
            lab.words(ref, *job), env=lab.environment, stdout=subprocess.PIPE, text=True
        ) as command:
            try:
                assert command.stdout is not None
                assert command.stdout.readline() == "ready\n"
                assert len(tasks(running)) == 1
            finally:
                (lab.log / "go").touch()
        assert command.returncode == 0


def test_a_start_whose_task_is_lost_after_the_install_runs_its_job(lab: ContainerLab) -> None:
    """Injected: a task that waits when the install has run, so that it can be struck there."""
    ref = lab.publish()
    lab.configure(deps(lab))
    with (
        agent(lab, HOLD_AFTER_INSTALL) as running,
        begun(lab, ref, "cat", "/opt/new") as command,
    ):
        until((lab.folder / "installed").exists, "the install's end")
        assert times(lab) == 1
        (task,) = tasks(running)
        os.kill(task, signal.SIGKILL)
        out, error = command.communicate(timeout=90)
        assert (command.returncode, out) == (0, "new\n"), error
        assert f"bootseer: {LOST_TEXT}\n" in error
        assert times(lab) == 2
    lab.await_layers(ref)
    until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


def test_warming_leaves_an_agent_behind_where_that_is_asked_for(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(deps(lab))
    warm = [*BOOTSEER, "warm", "--config", str(lab.settings), "--image", ref]
    warm += ["--", "--volume", f"{lab.log}:/log"]
    assert lab.execute(warm).returncode == 0
    assert not (lab.runtime / "images/agent.sock").exists()
    lab.environment["BOOTSEER_AGENT_KEEP"] = "5"
    assert lab.execute(warm).returncode == 0
    until((lab.runtime / "images/agent.sock").exists, "the agent that was left behind")
    assert lab.run(ref, "cat", "/opt/new")[0] == "new\n"
    until(lambda: not (lab.runtime / "images/agent.sock").exists(), "the end of the idle agent")


MODULES = """
import os, sys
from bootseer.cli import agent
from bootseer.cli.image import direct
from bootseer.entrypoint import part_process
from bootseer.imageprefetch.run.command import run_foreground
for name in agent.MODULES:
    __import__(name)
before, told = set(sys.modules), sys.argv[1]
def note(who):
    with open(f"{told}-{who}", "w") as file:
        file.write("\\n".join(set(sys.modules) - before))
from bootseer.stripedfs.mount import mount
building = mount.build_tree
def build_noted(*about, **more):
    tree = building(*about, **more)
    note("server")
    return tree
mount.build_tree = build_noted
class Programs:
    run_before = staticmethod(run_foreground)
    @staticmethod
    def run(words, on_signal, *, on_begun):
        note("task")
        return run_foreground(words, on_signal, on_begun=on_begun)
sys.exit(direct.run_without_click(sys.argv[2:], in_agent=True, programs=Programs))
"""


def test_an_agent_has_imported_all_that_a_container_needs(lab: ContainerLab) -> None:
    """What the agent lacks, each start would import again, and its job wait for it."""
    with prepared(lab) as (ref, _):
        pass
    told = lab.folder / "modules"
    words = lab.words(ref, "sh", "-c", SHOW)
    done = lab.execute([sys.executable, "-c", MODULES, str(told), *words[3:]])
    assert (done.returncode, done.stdout) == (0, SHOWN), done.stderr
    helpers = {"bootseer.imageprefetch.resolve.registry_helper"}
    for who in ("task", "server"):
        later = set(Path(f"{told}-{who}").read_text().split()) - helpers
        assert not later, (who, later)
