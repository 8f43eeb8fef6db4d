"""Where `bench.image` measures: a shaped link to a registry, and what a start cost on our side.

The registries run in a network namespace of their own behind the link; everything else, the
measured programs included, is on our end of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.netdelay import delayed
from tools.netlab import Network
from tools.podman import Podman
from tools.registry import Registry

CONTROLLERS = Path("/sys/fs/cgroup")
PORT = "port0"  # our end of the registry's link
PEERS_PORT, OURS_PORT = 5000, 5001
MARK = b"first work"
WORK = {
    "numpy+pyarrow": "import numpy, pyarrow\n"
    "print('first work', numpy.arange(9).sum(), pyarrow.array([1, 2]).sum(), flush=True)",
    "torch": "import torch\nprint('first work', float(torch.ones(3).sum()), flush=True)",
}


@dataclass(frozen=True, slots=True)
class Link:
    """One shape of the link; `mbit` 0 and `rtt_ms` 0 leave it as it is."""

    name: str
    mbit: float
    rtt_ms: float


FREE = Link("unshaped", 0, 0)
LINKS = (Link("1 Gbit/s", 1000, 1), Link("200 Mbit/s", 200, 5), FREE)


@dataclass(frozen=True, slots=True)
class Start:
    """One start until its first work: time, bytes over the link, processor time."""

    seconds: float
    received_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Lab:
    """Servers, folders and the link of one round of cases."""

    link: Link
    scratch: Path
    peers: Registry
    ours: Registry
    podman: Podman
    group: str

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """An empty folder with a short path, removed afterwards."""
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def received_bytes(self) -> int:
        """What has come over the link so far."""
        for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == PORT:
                return int(counts.split()[0])
        raise RuntimeError(f"no {PORT} in this network")


@contextlib.contextmanager
def lab(link: Link, scratch: Path, peers_storage: Path, group: str) -> Iterator[Lab]:
    """To be used in a network of our own (`tools.netlab.own_network`)."""
    with Network(1, mbit=link.mbit) as network, delayed(network.hosts[0].prefix, link.rtt_ms):
        host = network.hosts[0]

        def registry(name: str, port: int, storage: Path | None) -> Registry:
            where = {"address": host.address, "prefix": (*host.prefix, *_uncounted())}
            return Registry(scratch / name, port=port, storage=storage, **where)  # type: ignore[arg-type]

        with (
            registry("peers", PEERS_PORT, peers_storage) as peers,
            registry("ours", OURS_PORT, scratch / "ours-data") as ours,
            Podman(scratch / "p", trusted=[peers.host, ours.host]) as podman,
        ):
            yield Lab(link, scratch, peers, ours, podman, group)


def _accounts() -> Path:
    """The root of the groups by which the kernel adds up processor time: of cgroup v2, or v1."""
    unified = (CONTROLLERS / "cgroup.controllers").exists()
    return CONTROLLERS if unified else CONTROLLERS / "cpuacct"


def _uncounted() -> tuple[str, ...]:
    """A registry elsewhere costs us nothing: the words that leave it out of our accounts."""
    return ("sh", "-c", f'echo 0 > {_accounts()}/cgroup.procs; exec "$@"', "sh")


def _current(root: Path) -> Path:
    """The group of this process; the root where that is not to be seen from here."""
    wanted = "" if root == CONTROLLERS else root.name
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        if wanted in names.split(",") and (root / path.lstrip("/")).is_dir():
            return root / path.lstrip("/")
    return root


@contextlib.contextmanager
def own_group() -> Iterator[str]:
    """Account this process, and what it starts, in a control group; yields its name."""
    name = f"bootseer-bench-{os.getpid()}"
    root = _accounts()
    before = _current(root)
    # In v2 a group of processes holds no others, and containers make groups below this one.
    inner = root / name / "own" if root == CONTROLLERS else root / name
    inner.mkdir(parents=True)
    try:
        (inner / "cgroup.procs").write_text(str(os.getpid()))
        yield name
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        for each in [root] if root == CONTROLLERS else CONTROLLERS.iterdir():
            for folder in sorted((each / name).rglob("*/"), reverse=True):
                _remove(folder, each)
            _remove(each / name, each)


def _remove(group: Path, root: Path) -> None:
    """Remove a group; what is still ending in it goes to the group of all."""
    for _ in range(100):
        try:
            for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
                (root / "cgroup.procs").write_text(pid)
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)


def cpu_s(group: str) -> float:
    """Processor seconds of the group and those below it so far."""
    folder = _accounts() / group
    usage = folder / ("cpu.stat" if folder.parent == CONTROLLERS else "cpuacct.usage")
    return parse_cpu_s(usage.read_text(encoding="ascii"))


def parse_cpu_s(text: str) -> float:
    """The seconds that `cpu.stat` tells by name in microseconds, `cpuacct.usage` in nanoseconds."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    return int(text) / 1e9


def measured(
    lab: Lab, *commands: Sequence[str], environment: Mapping[str, str] | None = None
) -> Start:
    """Run commands one after the other; the last prints `MARK` when it has done its first work.

    Time, bytes and processor time are those until that line. Raises RuntimeError with the words
    of a command that fails.
    """
    environ = {**os.environ, **(environment or {})}
    received, used, began = lab.received_bytes(), cpu_s(lab.group), time.perf_counter()
    for command in commands[:-1]:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace")
            raise RuntimeError(f"{' '.join(command)}: {said[-2000:]}")
    with tempfile.TemporaryFile() as errors:
        last = subprocess.Popen(
            commands[-1],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert last.stdout is not None
        line = last.stdout.readline()
        seconds = time.perf_counter() - began
        start = Start(seconds, lab.received_bytes() - received, cpu_s(lab.group) - used)
        last.stdout.read()
        last.stdout.close()
        last.wait()
        if not line.startswith(MARK) or last.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(commands[-1])}: {line!r} {said[-2000:]}")
    return start
