"""The image that brings the snapshotter onto a node, installed and run."""

from __future__ import annotations

import fcntl
import gzip
import io
import os
import socket
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.labs.snapshotter_client import Client
from tests.support.paths import ROOT
from tests.support.waiting import until
from tools.archives import extract_all

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("patchelf")]

# A fake: this machine has no systemd. It writes down what it is asked.
SYSTEMCTL = '#!/bin/sh\necho "$*" >> "$ASKED"\n'


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.nodeimage.__main__ import build

    folder = tmp_path_factory.mktemp("node")
    # Built once for all workers, whose base directories lie in one.
    shared = tmp_path_factory.getbasetemp().parent / "node-image.tar"
    with open(f"{shared}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if "PYTEST_XDIST_WORKER" not in os.environ or not shared.exists():
            build(shared, "node:1", level=1)
    with tarfile.open(shared) as archive:
        layers = [archive.extractfile(m) for m in archive.getmembers() if m.isfile()]
        (packed,) = (d for d in (f.read() for f in layers if f) if d.startswith(b"\x1f\x8b"))
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as layer:
        extract_all(layer, folder)
    return folder / "payload"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A node's root, its systemctl, and a process in its mount namespace."""
    (tmp_path / "host/etc").mkdir(parents=True)
    (tmp_path / "host/run/systemd/system").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL)
    (tmp_path / "bin/systemctl").chmod(0o755)
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as init:
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        yield {"HOST_PID": str(init.pid), "PATH": path, "ASKED": str(tmp_path / "asked")}


def install(
    payload: Path, host: Path, node: dict[str, str], *units: str
) -> subprocess.CompletedProcess[str]:
    words = [f"{payload}/bin/busybox", "sh", f"{payload}/install-node.sh", str(host), *units]
    return subprocess.run(words, env=node, capture_output=True, text=True, check=False)


def asked(node: dict[str, str]) -> list[str]:
    path = Path(node["ASKED"])
    return path.read_text().splitlines() if path.exists() else []


def test_it_is_installed_once_and_then_left_alone(
    payload: Path, node: dict[str, str], tmp_path: Path
) -> None:
    unit, host = "bootseer-snapshotter.service", tmp_path / "host"
    done = install(payload, host, node)
    assert (done.returncode, done.stdout) == (0, "installed on the node\n"), done.stderr
    assert asked(node) == ["daemon-reload", f"restart {unit}", f"enable --now {unit}"]
    started = (host / "etc/systemd/system" / unit).read_text().split("ExecStart=")[1].split()[0]
    assert os.access(host / started[1:], os.X_OK)
    done = install(payload, host, node)
    assert (done.returncode, done.stdout) == (0, "")
    assert asked(node)[3:] == [f"enable --now {unit}"]
    assert sorted(path.name for path in (host / "opt").iterdir()) == ["bootseer"]


def test_agent_and_snapshotter_share_a_node(
    payload: Path, node: dict[str, str], tmp_path: Path
) -> None:
    agent, snapshotter = "bootseer-agent.service", "bootseer-snapshotter.service"
    host = tmp_path / "host"
    assert install(payload, host, node).returncode == 0
    before = len(asked(node))
    assert install(payload, host, node, agent).returncode == 0
    assert asked(node)[before:] == ["daemon-reload", f"restart {agent}", f"enable --now {agent}"]
    (host / "opt/bootseer/complete").write_text("older")
    before = len(asked(node))
    assert install(payload, host, node, agent).returncode == 0  # both run the new program then
    assert sorted(asked(node)[before + 1 : before + 3]) == [
        f"restart {agent}",
        f"restart {snapshotter}",
    ]
    assert asked(node)[before + 3 :] == [f"enable --now {agent}"]
    done = install(payload, host, node, "other.service")
    assert (done.returncode, done.stderr) == (2, "there is no unit other.service in this image\n")


def test_an_older_one_is_replaced(payload: Path, node: dict[str, str], tmp_path: Path) -> None:
    old = tmp_path / "host/opt/bootseer"
    old.mkdir(parents=True)
    (old / "complete").write_text("older")
    (old / "left").touch()
    unfinished = tmp_path / "host/opt/bootseer.new"
    unfinished.mkdir()
    (unfinished / "half").touch()
    assert install(payload, tmp_path / "host", node).returncode == 0
    assert not (old / "left").exists()
    assert not (old / "half").exists()
    assert sorted(path.name for path in old.parent.iterdir()) == ["bootseer"]


def test_a_node_without_systemd_is_told(
    payload: Path, node: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "host/run/systemd/system").rmdir()
    done = install(payload, tmp_path / "host", node)
    assert done.returncode == 7
    assert "not booted with systemd" in done.stderr
    assert asked(node) == []


def test_what_was_installed_serves(payload: Path, node: dict[str, str], tmp_path: Path) -> None:
    """With no variable of ours set, nothing of this machine's Python in reach."""
    host = tmp_path / "host"
    assert install(payload, host, node).returncode == 0
    words = ["--root", str(tmp_path / "snap"), "--address", str(tmp_path / "s"), "--no-fill"]
    script = f'mount --bind {host}/opt /opt && exec /opt/bootseer/bin/bootseer-snapshotter "$@"'
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "sh", "-c", script, "sh", *words]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"PATH": "/bin"})
    try:
        assert child.stderr is not None
        assert "listening" in child.stderr.readline()
        client = Client(tmp_path / "s")
        labels = {
            "containerd.io/snapshot.ref": "chain",
            "containerd.io/snapshot/cri.image-ref": "127.0.0.1:1/none:1",
        }
        client.prepare("extract", "", labels)  # asks a registry that is not there, then goes on
        client.commit("chain", "extract")
        assert client.names() == ["chain"]
        client.close()
        child.terminate()
        assert child.wait() == 0
    finally:
        child.kill()
        child.communicate()


def test_the_agent_that_was_installed_answers(
    payload: Path, node: dict[str, str], tmp_path: Path
) -> None:
    host = tmp_path / "host"
    assert install(payload, host, node, "bootseer-agent.service").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["agent", "--pods", "--runtime", str(tmp_path / "run"), "--listen", address]
    script = f'mount --bind {host}/opt /opt && exec /opt/bootseer/bin/bootseer "$@"'
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "sh", "-c", script, "sh", *words]
    with subprocess.Popen(command, env={"PATH": "/bin"}) as child:
        try:
            until(lambda: healthy(address), "the agent answers")
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
                assert b"bootseer_agent_ready 1.0" in answer.read()
            assert (tmp_path / "run/pods/fuse.sock").exists()
        finally:
            child.terminate()
    assert child.returncode == 0


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("name", ["snapshotter", "agent"])
def test_the_manifest_is_taken_by_a_real_api_server(api: Any, name: str) -> None:
    folder = str(ROOT / "k8s" / name)
    said = api.kubectl("apply", "--dry-run=server", "--validate=true", "-k", folder)
    assert f"daemonset.apps/bootseer-{name} created (server dry run)" in said


@pytest.mark.parametrize("name", ["snapshotter", "agent"])
def test_manifest_unit_and_image_agree(name: str) -> None:
    from tools.nodeimage.__main__ import DEFAULT_NAME

    folder = ROOT / "k8s" / name
    documents = list(yaml.safe_load_all((folder / "daemonset.yaml").read_text()))
    pod = documents[-1]["spec"]["template"]["spec"]
    containers = pod["initContainers"] + pod["containers"]
    assert {container["image"] for container in containers} == {DEFAULT_NAME}
    assert pod["hostPID"]
    unit = (folder / f"bootseer-{name}.service").read_text()
    # One cache for both: what the agent sweeps and publishes is what the snapshotter keeps.
    assert "\nEnvironment=BOOTSEER_CACHE=/var/lib/bootseer/cache\n" in unit
    assert "\nKillMode=process\n" in unit  # or a restart would end every container's image
