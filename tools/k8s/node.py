"""Process 1 of the cluster's namespaces: mounts, network, programs. Its end ends all of them.

Started by `cluster.Cluster` as `python -m tools.k8s.node RUN STATE PROGRAMS CGROUP all|api`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.k8s import settings

CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
SYSTEMD = ("systemd", "none,name=systemd")


def main() -> None:
    run, state, programs = (Path(word) for word in sys.argv[1:4])
    cgroup, api_only = sys.argv[4], sys.argv[5] == "api"
    os.umask(0o022)
    socket.sethostname("lab-node")
    _mounts(state, cgroup, api_only=api_only)
    _network()
    node = _Node(run)
    signal.signal(signal.SIGTERM, lambda *_: node.end())
    node.start("etcd", settings.etcd(state))
    node.start("apiserver", settings.apiserver(programs, run, api_only=api_only))
    if not api_only:
        node.start("registry", ["docker-registry", "serve", f"{run}/registry.yml"])
        if (run / "snapshotter.json").exists():
            node.start("snapshotter", json.loads((run / "snapshotter.json").read_text("utf-8")))
        node.start("containerd", ["containerd", "--config", f"{run}/containerd.toml"])
        _until(lambda: (run / "containerd.sock").exists() and _answers("http://127.0.0.1:5055/v2/"))
        _push_images(run)
        _until((run / "api-ready").exists)  # told by whoever holds the certificate
        node.start("controllers", settings.controllers(programs, run))
        node.start("scheduler", settings.scheduler(programs, run))
        node.start("kubelet", settings.kubelet(programs, run, state))
    while True:  # process 1 reaps what others leave
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


class _Node:
    def __init__(self, run: Path) -> None:
        self._run = run
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: Sequence[str]) -> None:
        with (self._run / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._children.append(child)
        (self._run / f"{name}.pid").write_text(str(child.pid), encoding="ascii")

    def end(self) -> None:
        for child in self._children:
            child.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        os._exit(0)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _mounts(state: Path, cgroup: str, *, api_only: bool) -> None:
    _call("mount", "--make-rprivate", "/")
    _call("mount", "--make-rshared", "/")
    _call("mount", "-t", "tmpfs", "-o", "mode=755", "lab-run", "/run")
    # In memory: unmounting overlays on a disk would wait until all of it is written back.
    _call("mount", "-t", "tmpfs", "-o", "mode=755", "lab-state", str(state))
    for name in ("var-upper", "var-work", "etcd"):
        (state / name).mkdir(mode=0o700, exist_ok=True)
    (state / "var-upper").chmod(0o755)
    layers = f"lowerdir=/var,upperdir={state}/var-upper,workdir={state}/var-work"
    _call("mount", "-t", "overlay", "-o", layers, "lab-var", "/var")
    _call("mount", "-t", "sysfs", "sysfs", "/sys")  # of our own network namespace
    if not api_only:
        _cgroups(cgroup)


def _cgroups(cgroup: str) -> None:
    """Kubernetes 1.20 knows cgroup v1. SystemExit says so where the machine keeps it to v2."""
    _call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys/fs/cgroup")
    for name, options in [*zip(CONTROLLERS, CONTROLLERS, strict=True), SYSTEMD]:
        folder = f"/sys/fs/cgroup/{name}"
        os.mkdir(folder)
        mount = ["mount", "-t", "cgroup", "-o", options, "cgroup", folder]
        done = subprocess.run(mount, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            said, *_ = done.stderr.decode(errors="replace").splitlines() or ["no reason given"]
            raise SystemExit(
                f"the Kubernetes node needs cgroup v1, and its {name} is not to be had: {said}; "
                "boot with systemd.unified_cgroup_hierarchy=0"
            )
        os.makedirs(f"{folder}/{cgroup}", exist_ok=True)


def _network() -> None:
    _call("ip", "link", "set", "lo", "up")
    _call("ip", "link", "add", "cni0", "type", "bridge")
    _call("ip", "addr", "add", f"{settings.NODE_IP}/16", "dev", "cni0")
    _call("ip", "link", "set", "cni0", "up")
    _call("ip", "route", "add", settings.SERVICES, "dev", "cni0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=2).close()
    except OSError:
        return False
    return True


def _until(ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("the node's programs did not become ready; see their logs")
        time.sleep(0.05)


def _push_images(run: Path) -> None:
    """Every image of the folder `images` goes to the node's registry, as a cluster has one."""
    ctr = ["ctr", "--address", f"{run}/containerd.sock", "-n", "lab"]
    with (run / "push.log").open("wb") as log:
        for archive in sorted((run / "images").glob("*.tar")):
            name = (archive.with_suffix(".name")).read_text(encoding="ascii")
            for words in (
                ["image", "import", str(archive)],
                ["image", "push", "--plain-http", name],
                ["image", "rm", name],
            ):
                subprocess.run([*ctr, *words], check=True, stdout=log, stderr=log)


if __name__ == "__main__":
    main()
