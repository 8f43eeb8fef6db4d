"""`bootseer agent` as a node's service: health, metrics, drain."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import bootseer
from bootseer.agent import drain
from bootseer.agent.client import BEGIN_S
from bootseer.agent.server import YOUNG_S
from bootseer.blocks.link_turns import KINDS, LinkTurns
from bootseer.entrypoint.container import layer_folders
from bootseer.errors import (
    BusyError,
    DeadlineError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.image_hotsets import open_image
from bootseer.imageprefetch.image_cache import ImageCache
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.paths import ROOT
from tests.support.processes import command_name
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files()


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("agent/plain", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"))


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


class Agent:
    """A node's agent with its endpoint."""

    def __init__(self, mounts: Mounts, *options: str, package_parent: Path = ROOT) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.places = ["--runtime", str(mounts.runtime)]
        self.socket = mounts.runtime / "images/agent.sock"
        self.ours = [sys.executable, "-m", "bootseer"]
        self.process = subprocess.Popen(
            [*self.ours, "agent", *self.places, "--listen", self.address, *options],
            cwd=package_parent,
        )

    def get(self, path: str) -> tuple[int, str]:
        """The status and text of an answer; 0 where none came."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample."""
        status, text = self.get("/metrics")
        assert status == 200
        (value,) = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return value

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.ours, *words], capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def agent(mounts: Mounts) -> Iterator[Agent]:
    with served(Agent(mounts)) as made:
        yield made


@contextlib.contextmanager
def served(made: Agent) -> Iterator[Agent]:
    try:
        until(lambda: made.get("/healthz")[0] == 200, "the agent answers")
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(made.process.pid, signal.SIGCONT)
        made.process.terminate()
        made.process.wait()


def mount_by(agent: Agent, mounts: Mounts, image: Published, name: str) -> Path:
    directory = mounts.folder / name
    directory.mkdir()
    cache = ["--cache", str(mounts.folder / "cache")]
    done = agent.run("image", "mount", *agent.places, *cache, image.ref, str(directory))
    assert done.returncode == 0, done.stderr
    return directory


def test_it_tells_what_the_nodes_images_do(agent: Agent, mounts: Mounts, image: Published) -> None:
    assert agent.metric("bootseer_image_servers", state="serving") == 0
    directory = mount_by(agent, mounts, image, "m")
    assert tree_of(directory) == FILES
    assert agent.metric("bootseer_image_servers", state="serving") == 1
    assert agent.metric("bootseer_image_mounts") == 1
    assert agent.metric("bootseer_image_server_resident_bytes") > 1 << 20
    until(lambda: agent.metric("bootseer_agent_tasks_total", result="done") > 0)
    assert 1 << 20 < agent.metric("bootseer_agent_resident_bytes") < 100 << 20
    assert agent.metric("bootseer_agent_ready") == 1
    before = agent.metric("bootseer_agent_tasks_total", result="failed")
    failed = agent.run("image", "mount", *agent.places, image.ref, str(mounts.folder / "none"))
    assert failed.returncode == NotFoundError.exit_code
    until(lambda: agent.metric("bootseer_agent_tasks_total", result="failed") == before + 1)
    mounts.umount(str(directory))
    assert agent.metric("bootseer_image_mounts") == 0
    assert mounts.gone()


def test_an_idle_one_uses_no_processor(agent: Agent) -> None:
    before_s = agent.metric("bootseer_agent_cpu_seconds_total")
    time.sleep(5)
    # The first of these is the cost of asking: a fork for the health in each answer.
    assert agent.metric("bootseer_agent_cpu_seconds_total") - before_s < 0.25


def test_an_agent_that_hangs_is_not_healthy(agent: Agent) -> None:
    assert agent.get("/readyz") == (200, "ok\n")
    os.kill(agent.process.pid, signal.SIGSTOP)
    assert agent.get("/healthz") == (503, "no\n")
    os.kill(agent.process.pid, signal.SIGCONT)
    until(lambda: agent.get("/healthz")[0] == 200)
    assert agent.get("/nothing")[0] == 404


def test_an_agent_that_hangs_costs_seconds(agent: Agent, mounts: Mounts, image: Published) -> None:
    os.kill(agent.process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    directory = mount_by(agent, mounts, image, "m")
    assert BEGIN_S <= time.monotonic() - began_s < BEGIN_S + 10
    os.kill(agent.process.pid, signal.SIGCONT)
    until(lambda: agent.get("/healthz")[0] == 200)
    assert agent.metric("bootseer_image_mounts") == 1  # it did not do it once more
    mounts.umount(str(directory))
    assert mounts.gone()


def test_it_goes_on_as_the_version_that_is_installed_meanwhile(
    mounts: Mounts, image: Published, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "bootseer", tmp_path / "installed/bootseer")
    package = tmp_path / "installed/bootseer/__init__.py"
    text = package.read_text()

    def install(version: str) -> None:
        package.write_text(text.replace(f'"{bootseer.__version__}"', f'"{version}"'))

    def version() -> str:
        found = re.search(r'agent_info\{version="([^"]*)"', agent.get("/metrics")[1])
        return found[1] if found else ""

    # of another length: Python takes bytecode as valid by its source's size and second of change
    older = "0.0.1.older"
    install(older)
    with served(Agent(mounts, package_parent=tmp_path / "installed")) as agent:
        assert version() == older
        refused = agent.metric("bootseer_agent_tasks_total", result="refused")
        first = mount_by(agent, mounts, image, "first")  # by the caller itself
        until(lambda: agent.metric("bootseer_agent_tasks_total", result="refused") > refused)
        assert version() == older
        install(bootseer.__version__)
        second = mount_by(agent, mounts, image, "second")
        until(lambda: version() == bootseer.__version__)
        done = agent.metric("bootseer_agent_tasks_total", result="done")
        third = mount_by(agent, mounts, image, "third")
        until(lambda: agent.metric("bootseer_agent_tasks_total", result="done") > done)
        assert agent.process.poll() is None
        for directory in (first, second, third):
            assert tree_of(directory) == FILES
            mounts.umount(str(directory))
    assert mounts.gone()


def test_it_removes_what_killed_commands_left(mounts: Mounts) -> None:
    cache = mounts.folder / "cache"
    left = [place / "containers/x/tree" for place in (mounts.runtime, cache)]
    left += [cache / "layers/y/upper", cache / "containers/z.gone/upper"]
    used = cache / "layers/used"
    for folder in (*left, used):
        folder.mkdir(parents=True)
        (folder.parent / "file").touch()
    with (
        layer_folders.hold(str(used)),
        served(Agent(mounts, "--cache", str(cache), "--sweep-every", "0.2")),
    ):
        until(lambda: not any(folder.parent.exists() for folder in left), "they are removed")
        assert used.exists()


def test_it_tells_who_needs_the_link(agent: Agent, mounts: Mounts) -> None:
    def taken() -> dict[str, float]:
        return {kind: agent.metric("bootseer_link_taken", by=kind) for kind in KINDS}

    free = dict.fromkeys(KINDS, 0.0)
    assert taken() == free
    with LinkTurns.of(str(mounts.runtime)) as turns:
        for kind in KINDS:
            with turns.holding(kind):
                assert taken() == {**free, kind: 1.0}
    assert taken() == free


def test_it_publishes_what_starts_have_read_and_keeps_no_more_than_it_may(
    mounts: Mounts, registry: Any, tmp_path: Path
) -> None:
    image = publish(registry.reference("agent/read", "1"), FILES, tmp_path / "image")
    mounted = mounts.mount(image.ref, record=True)
    assert tree_of(Path(mounted.directory)) == FILES
    mounts.umount(mounted)
    assert mounts.gone()
    place = ["--cache", str(mounts.cache)]

    def published() -> int:
        with open_image(image.ref, str(mounts.cache)) as opened:
            block_image = opened.parts.block_image
            return len(list(store.list_published(opened.repository, opened.digest, block_image)))

    assert published() == 0
    with served(Agent(mounts, *place, "--publish-every", "0.5")):
        until(lambda: published() == 1, "a hot set is published")
    kept = ImageCache(str(mounts.cache))
    assert kept.image(image.digest) is not None
    with served(Agent(mounts, *place, "--sweep-every", "0.2", "--kept-limit", "1")):
        until(lambda: kept.image(image.digest) is None, "what is kept of the image is removed")


def test_its_endpoint_is_started_again(agent: Agent) -> None:
    def endpoint() -> int:
        path = f"/proc/{agent.process.pid}/task/{agent.process.pid}/children"
        (one,) = [
            int(child)
            for child in Path(path).read_text().split()
            if command_name(int(child)) == "bootseer-http"
        ]
        return one

    time.sleep(YOUNG_S)  # one that dies at once ends the agent
    before = endpoint()
    os.kill(before, signal.SIGKILL)
    until(lambda: agent.get("/healthz")[0] == 200, "it answers again")
    assert endpoint() != before
    os.kill(endpoint(), signal.SIGKILL)
    assert agent.process.wait(20) == StoreUnavailableError.exit_code


def test_its_endpoint_ends_with_it(agent: Agent) -> None:
    agent.process.kill()
    agent.process.wait()
    until(lambda: agent.get("/healthz") == (0, ""), "the endpoint has ended")


def test_draining_waits_for_what_is_in_use(agent: Agent, mounts: Mounts, image: Published) -> None:
    directory = mount_by(agent, mounts, image, "m")
    late = agent.run("agent", *agent.places, "--drain", "--drain-limit", "0.5")
    assert late.returncode == DeadlineError.exit_code
    assert "still in use" in late.stderr
    assert agent.get("/readyz")[0] == 200
    words = [*agent.ours, "agent", *agent.places, "--drain"]
    with subprocess.Popen(words) as command:
        until(lambda: agent.get("/readyz")[0] == 503, "it drains")
        until(lambda: agent.get("/healthz")[0] == 200, "an answer of the agent that drains")
        refused = agent.metric("bootseer_agent_tasks_total", result="refused")
        other = mount_by(agent, mounts, image, "other")  # by the caller itself
        until(lambda: agent.metric("bootseer_agent_tasks_total", result="refused") > refused)
        assert command.poll() is None
        mounts.umount(str(directory))
        mounts.umount(str(other))
        assert command.wait(60) == 0
    assert agent.process.wait(60) == 0
    assert not agent.socket.exists()
    assert agent.run("agent", *agent.places, "--drain").returncode == NotFoundError.exit_code
    assert not drain.is_draining(str(mounts.runtime))
    assert mounts.gone()


def test_a_drain_that_is_killed_drains_nothing(
    agent: Agent, mounts: Mounts, image: Published
) -> None:
    directory = mount_by(agent, mounts, image, "m")
    with subprocess.Popen([*agent.ours, "agent", *agent.places, "--drain"]) as command:
        until(lambda: agent.get("/readyz")[0] == 503, "it drains")
        again = agent.run("agent", *agent.places, "--drain")
        assert again.returncode == BusyError.exit_code
        command.kill()
    until(lambda: agent.get("/readyz")[0] == 200, "it takes on tasks again")
    mounts.umount(str(directory))
    assert mounts.gone()


def test_an_address_that_is_none_is_told(mounts: Mounts) -> None:
    places = ["--runtime", str(mounts.runtime)]
    for address in ("9464", "localhost:x", "localhost:70000"):
        words = [sys.executable, "-m", "bootseer", "agent", *places, "--listen", address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == UsageError.exit_code
        assert "write HOST:PORT" in done.stderr


def test_what_the_agent_does_at_times_ends_where_the_agent_has_ended_before() -> None:
    """Fault injection: the parent that the process is told of is none of its own, as after a kill
    between its fork and its first line."""
    code = """
import os, time
from bootseer.agent.sweeper import Sweeper
child = os.fork()
if child == 0:
    Sweeper((), (), interval_s=3600.0)._sweep(os.getpid())
end_s = time.monotonic() + 20
while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < end_s:
    time.sleep(0.01)
try:
    os.kill(child, 9)
    print("it goes on")
except ProcessLookupError:
    print("it has ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "it has ended\n"
