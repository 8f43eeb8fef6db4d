"""Starts whose agent is lost once it has begun to mount for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.agent.client import LOST_TEXT, SILENT_S
from bootseer.imageprefetch.mount import server_registry
from bootseer.system.processes import children_of
from tests.support.labs.registry_proxy import Gate
from tests.support.labs.web_servers import Request
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.processes import command_name
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(6, 60_000)
BOOTSEER = [sys.executable, "-m", "bootseer"]
# A fake: it lists the tree that it is to run a container on, or says that it pulls.
PODMAN = """#!/bin/sh
while [ $# -gt 0 ]; do
  if [ "$1" = --rootfs ]; then ls "${2%:*}"; exit; fi
  shift
done
echo pulled
"""


class Lab:
    """A node with an agent, and a registry that holds its answers back."""

    def __init__(self, mounts: Mounts, gate: Gate, ref: str) -> None:
        self.mounts, self.ref = mounts, ref
        self.is_held, self.goes_on = threading.Event(), threading.Event()
        self._gate = gate
        gate.rules = [self._hold]
        podman = mounts.folder / "bin/podman"
        podman.parent.mkdir()
        podman.write_text(PODMAN)
        podman.chmod(0o755)
        self.environment = {
            **os.environ,
            "BOOTSEER_CACHE": str(mounts.cache),
            "BOOTSEER_RUNTIME": str(mounts.runtime),
            "PATH": f"{podman.parent}:{os.environ['PATH']}",
        }
        self.agent = subprocess.Popen([*BOOTSEER, "agent"], env=self.environment)

    def _hold(self, _: object, request: Request) -> bool | None:
        if "/blobs/" in request.target:
            self.is_held.set()
            while not (self.goes_on.wait(0.05) or self._gate.ended.is_set()):
                pass
        return None

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin a command whose mount the agent has under way."""
        child = subprocess.Popen(
            [*BOOTSEER, "image", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.is_held.wait(60)
        assert child.poll() is None
        return child

    def task(self) -> int:
        """The agent's process that mounts."""
        (task,) = (
            child
            for child in children_of(self.agent.pid)
            if command_name(child) not in ("bootseer-sweep", "")
        )
        return task


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("agent/lost", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"))


@pytest.fixture
def lab(registry: Any, image: Published, tmp_path: Path) -> Iterator[Lab]:
    with Gate(registry.host) as gate, mounts_below(tmp_path) as mounts:
        lab = Lab(mounts, gate, image.ref.replace(registry.host, gate.authority))
        try:
            until((mounts.runtime / "images/agent.sock").exists, "the agent")
            yield lab
        finally:
            lab.goes_on.set()
            lab.agent.terminate()
            lab.agent.wait()


def kill(task: int) -> None:
    os.kill(task, signal.SIGKILL)


def stop(task: int) -> None:
    os.kill(task, signal.SIGSTOP)


def stop_all(task: int) -> None:
    """As a frozen cgroup; its server holds the image's lock."""
    (server,) = children_of(task)
    for process in (task, server, *children_of(server)):
        os.kill(process, signal.SIGSTOP)


@pytest.mark.parametrize("strike", [kill, stop, stop_all])
def test_a_container_starts_on_its_image_though_the_agents_task_is_lost(
    lab: Lab, strike: Callable[[int], None]
) -> None:
    child = lab.start("run", lab.ref, "--", "true")
    task = lab.task()
    strike(task)
    began_s = time.monotonic()
    lab.goes_on.set()
    out, error = child.communicate(timeout=60)
    assert (child.returncode, out.split()) == (0, sorted({name[:2] for name in FILES})), error
    assert f"bootseer: {LOST_TEXT}\n" in error
    assert "bootseer: mounted sha256:" in error
    assert strike is kill or time.monotonic() - began_s >= SILENT_S
    assert not Path(f"/proc/{task}").exists()
    assert lab.agent.poll() is None
    assert lab.mounts.gone()
    assert list((lab.mounts.runtime / "containers").iterdir()) == []


@pytest.mark.parametrize("strike", [kill, stop])
def test_a_mount_is_made_once_though_the_agents_task_is_lost(
    lab: Lab, strike: Callable[[int], None]
) -> None:
    directory = lab.mounts.folder / "m"
    directory.mkdir()
    child = lab.start("mount", "--no-fill", lab.ref, str(directory))
    strike(lab.task())
    lab.goes_on.set()
    _, error = child.communicate(timeout=60)
    assert child.returncode == 0, error
    assert f"bootseer: {LOST_TEXT}\n" in error
    assert tree_of(directory) == FILES
    lab.mounts.umount(str(directory))
    assert lab.mounts.gone()


def test_a_task_that_takes_long_is_waited_for(lab: Lab) -> None:
    directory = lab.mounts.folder / "m"
    directory.mkdir()
    child = lab.start("mount", "--no-fill", lab.ref, str(directory))
    time.sleep(SILENT_S + 1.5)
    assert child.poll() is None
    lab.goes_on.set()
    _, error = child.communicate(timeout=60)
    assert child.returncode == 0, error
    assert LOST_TEXT not in error
    (server,) = server_registry.list_servers(str(lab.mounts.runtime))
    assert b"agent" in Path(f"/proc/{server.supervisor}/cmdline").read_bytes().split(b"\0")
    lab.mounts.umount(str(directory))
    assert lab.mounts.gone()
