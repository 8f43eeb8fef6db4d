"""Callers that end before their image is mounted, by any signal: nothing that nobody asked for."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.agent import fork_server
from bootseer.agent.protocol import BEGUN, READY, confirm_begun, send_request
from bootseer.errors import StoreUnavailableError
from bootseer.fuse.serve import daemon
from bootseer.imageprefetch.mount import mount_task, server_registry
from bootseer.imageprefetch.mount.mount import umount
from bootseer.imageprefetch.mount.settings import MountSettings, encode_settings
from bootseer.imageprefetch.snapshotter import mount_helper
from tests.support.mounts.images import Mounts, Published, mounts_below, publish, some_files
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

BOOTSEER = [sys.executable, "-m", "bootseer", "image"]
SERVED = 3  # who mounts, its supervisor and its worker hold the lock of a mount that comes up
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("interrupted/plain", "1")
    return publish(ref, some_files(6, 60_000), tmp_path_factory.mktemp("image"))


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


class Lab:
    """Commands with a podman that is a fake: it waits for a file and ends."""

    def __init__(self, mounts: Mounts, image: Published) -> None:
        self.mounts, self.image = mounts, image
        self.tree, self.go = mounts.folder / "tree", mounts.folder / "go"
        self.tree.mkdir()
        (mounts.runtime / "images").mkdir(parents=True)
        podman = mounts.folder / "bin/podman"
        podman.parent.mkdir()
        podman.write_text(f"#!/bin/sh\necho ready\nwhile [ ! -e {self.go} ]; do sleep 0.05; done\n")
        podman.chmod(0o755)
        self.environment = {
            **os.environ,
            "BOOTSEER_CACHE": str(mounts.cache),
            "BOOTSEER_RUNTIME": str(mounts.runtime),
            "PATH": f"{podman.parent}:{os.environ['PATH']}",
            "TMPDIR": str(mounts.folder),
        }

    def start(self, what: str) -> subprocess.Popen[str]:
        more = {"mount": [str(self.tree)], "run": ["--", "true"], "record": ["--", "true"]}
        return subprocess.Popen(
            [*BOOTSEER, what, self.image.ref, *more[what]],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def interrupted(self, what: str, number: signal.Signals) -> str:
        """Signal a command whose mount is coming up; what it said. Then nothing keeps the mount."""
        with server_registry.lock_image(str(self.mounts.runtime), self.image.digest):
            child = self.start(what)
            until(lambda: len(self.mounts.processes()) >= SERVED)
            child.send_signal(number)
            out, error = child.communicate(timeout=60)  # nobody else holds its output either
        assert child.returncode == CODES[number], error
        assert out == ""
        return error

    @contextlib.contextmanager
    def agent(self) -> Iterator[Path]:
        """The node's agent; yields the file with what it said."""
        said = self.mounts.folder / "agent.log"
        with (
            said.open("w") as log,
            subprocess.Popen([*BOOTSEER, "agent"], env=self.environment, stderr=log) as agent,
        ):
            try:
                until((self.mounts.runtime / "images/agent.sock").exists)
                self.agent_pid = agent.pid
                yield said
            finally:
                agent.terminate()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


@pytest.fixture
def lab(mounts: Mounts, image: Published) -> Lab:
    return Lab(mounts, image)


@pytest.mark.parametrize("number", CODES)
def test_a_mount_that_nobody_waits_for_is_not_made(lab: Lab, number: signal.Signals) -> None:
    lab.interrupted("mount", number)
    assert lab.mounts.gone()


def test_who_waits_for_a_registry_hears_which_try_it_is(mounts: Mounts) -> None:
    tree = mounts.folder / "tree"
    tree.mkdir()
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # and does not listen
        host = f"127.0.0.1:{refusing.getsockname()[1]}"
        places = ["--runtime", str(mounts.runtime), "--cache", str(mounts.cache)]
        child = subprocess.Popen(
            [*BOOTSEER, "mount", *places, f"{host}/a/b:1", str(tree)],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stderr is not None
            told = child.stderr.readline()
        finally:
            child.terminate()
            child.communicate()
    asked = rf"bootseer: waiting for the registry to answer for {host}/a/b:1 for \d+ s now"
    wanted = rf"{asked}, and for up to \d+ s more \(try (\d+)\): .*{host} is not reachable .*\n"
    found = re.fullmatch(wanted, told)
    assert found, told
    assert int(found[1]) > 1
    assert mounts.gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nor_is_a_containers_tree(lab: Lab, number: signal.Signals) -> None:
    lab.interrupted("run", number)
    assert lab.mounts.gone()
    if number != signal.SIGKILL:
        assert list((lab.mounts.runtime / "containers").iterdir()) == []


def test_with_an_agent_it_is_as_without(lab: Lab) -> None:
    with lab.agent() as said:
        for number in (signal.SIGINT, signal.SIGKILL):
            error = lab.interrupted("mount", number)
            assert "Traceback" not in error
            assert "bootseer" not in error
            assert lab.mounts.gone()
        lab.interrupted("run", signal.SIGTERM)
        assert lab.mounts.gone()
        assert list((lab.mounts.runtime / "containers").iterdir()) == []
        assert said.read_text() == ""
        lab.go.touch()
        child = lab.start("run")  # the agent goes on
        assert child.communicate(timeout=60)[0] == "ready\n"
    assert lab.mounts.gone()


def test_an_agents_answer_that_nobody_reads_is_taken_back(lab: Lab) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    settings = encode_settings(lab.mounts.settings(lab.image.ref))

    def mount() -> None:
        os.dup2(writable, 1)
        mount_task.main([*mount_task.NAME.split(), settings])

    with pytest.raises(StoreUnavailableError, match="Broken pipe"):
        daemon.run_in_child(mount)
    os.close(writable)
    assert lab.mounts.gone()


SNAPSHOTTER = """
import sys
from bootseer.imageprefetch.mount.settings import decode_settings
from bootseer.imageprefetch.snapshotter.mount_helper import MountHelper
MountHelper().mount(decode_settings(sys.argv[1]))
"""


def test_a_killed_snapshotters_mount_is_taken_back(lab: Lab) -> None:
    settings = encode_settings(lab.mounts.settings(lab.image.ref))
    with server_registry.lock_image(str(lab.mounts.runtime), lab.image.digest):
        child = subprocess.Popen([sys.executable, "-c", SNAPSHOTTER, settings])
        until(lambda: len(lab.mounts.processes()) >= SERVED)
        child.kill()
        child.wait()
        until(lambda: len(lab.mounts.processes()) < SERVED, "the end of the mount")
    assert lab.mounts.gone()


def test_so_is_one_that_was_just_made(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    settings = lab.mounts.settings(lab.image.ref)
    monkeypatch.setattr(fork_server, "_interrupt_on_hang_up", lambda _: None)  # it goes only then
    client, link = socket.socketpair()
    with (
        client,
        link,
        requesting_mount(client, settings, writable),
        pytest.raises(StoreUnavailableError, match="looking failed"),
    ):
        daemon.run_in_child(lambda: answer_request(link))
    os.close(writable)
    assert lab.mounts.gone()


def test_one_that_was_heard_of_stays(lab: Lab) -> None:
    settings = lab.mounts.settings(lab.image.ref)
    client, theirs = socket.socketpair()

    class Link(socket.socket):
        def sendall(self, data: bytes) -> None:  # type: ignore[override]
            super().sendall(data)
            if data[0] not in (READY, BEGUN):
                client.close()

    with (
        Link(fileno=theirs.detach()) as link,
        open(os.devnull, "wb") as null,
        requesting_mount(client, settings, null.fileno()),
        pytest.raises(StoreUnavailableError, match="looking failed"),
    ):
        daemon.run_in_child(lambda: answer_request(link))
    client.close()
    umount(settings.directory, runtime_dir=settings.runtime)  # it is there
    assert lab.mounts.gone()


@contextlib.contextmanager
def requesting_mount(client: socket.socket, settings: MountSettings, output: int) -> Iterator[None]:
    """Ask for a mount, and have it begin once it can."""

    def ask() -> None:
        words = [*mount_task.NAME.split(), encode_settings(settings)]
        with open(os.devnull, "rb") as null:
            send_request(client, words, os.environ, (null.fileno(), output, 2))
        begun.append(confirm_begun(client))

    begun: list[bool] = []
    thread = threading.Thread(target=ask)
    thread.start()
    yield
    thread.join()
    assert begun == [True]


def answer_request(link: socket.socket) -> None:
    """As the child that the snapshotter's fork server makes for a request."""
    fork_server.ForkServer(mount_helper.TASKS, socket.socket(), lambda: None)._answer(link)


def test_an_interrupt_of_the_agents_process_is_one_of_the_command(lab: Lab) -> None:
    """As ^C is in the terminal that the agent runs in."""
    with lab.agent():
        with server_registry.lock_image(str(lab.mounts.runtime), lab.image.digest):
            child = lab.start("mount")
            until(lambda: len(lab.mounts.processes()) >= SERVED)
            for task in children(lab.agent_pid):
                os.kill(task, signal.SIGINT)
            out, error = child.communicate(timeout=60)
        assert (child.returncode, out, error.strip()) == (CODES[signal.SIGINT], "", "")
    assert lab.mounts.gone()


def test_a_recorded_start_that_is_ended_before_it_began_leaves_nothing(lab: Lab) -> None:
    lab.interrupted("record", signal.SIGTERM)
    assert lab.mounts.gone()
    assert list((lab.mounts.runtime / "containers").iterdir()) == []


def test_what_a_killed_recording_left_is_swept_by_the_next_container(lab: Lab) -> None:
    child = lab.start("record")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    servers = lab.mounts.processes()
    for number in (signal.SIGSTOP, signal.SIGKILL):  # or they would take their mounts away
        for pid in (*servers, child.pid):
            os.kill(pid, number)
    lab.go.touch()
    child.communicate(timeout=60)
    assert lab.mounts.left()
    child = lab.start("run")
    assert child.communicate(timeout=60)[0] == "ready\n"
    assert child.returncode == 0
    assert lab.mounts.gone()
    assert list((lab.mounts.runtime / "containers").iterdir()) == []
