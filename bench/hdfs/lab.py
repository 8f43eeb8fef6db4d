"""What the cases of HDFS share: a cluster behind capped links, its files, measured processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import cores
from bench.hdfs.links import senders
from tools.hdfs.cluster import Cluster
from tools.netlab import OURS, Host, Network

ROOT = Path(__file__).parents[2]
MIB, GIB = 1 << 20, 1 << 30
LINK_MBIT = 830.0  # 94.6 MiB/s of payload


@dataclass(frozen=True, slots=True)
class Content:
    """A local file and the digest of what a reader must find."""

    path: Path
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Run:
    """Of one side's turn."""

    mib_s: float
    cpu_s_gib: float = 0.0
    peak_mib: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What a cluster and its files are like.

    `mbit` of 0 leaves the links free. `apart` gives half of the processors to the servers and the
    other half to the clients, as the two would have on machines of their own.
    """

    datanodes: int
    size_bytes: int
    mbit: float = LINK_MBIT
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Lab:
    """What the sides need to know. `stored` are the files made so far by name, here and there.

    `near` are the processors of the clients and `far` those of HDFS; where they share them, none.
    """

    kind: Kind
    cluster: Cluster
    hosts: Sequence[Host]
    scratch: Path
    near: Sequence[int] = ()
    far: Sequence[int] = ()
    stored: dict[str, Content] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return self.kind.size_bytes

    @property
    def web(self) -> str:
        return self.cluster.http_addresses[0]

    @property
    def rpc(self) -> str:
        return self.cluster.rpc_addresses[0]

    def conditions(self, file_bytes: int) -> str:
        """What else decides the figures of a file of this size, for the result file."""
        links = f"links {self.kind.mbit:g} Mbit/s each" if self.kind.mbit else "links free"
        split = "cores shared"
        if self.near:
            split = f"clients on {_cores(self.near)}, HDFS on {_cores(self.far)}"
        about = f"{self.kind.datanodes} DataNodes; {links}; file {file_bytes // MIB} MiB"
        return f"{about}; {split}; no agent"

    def webhdfs(self, path: str) -> str:
        return f"webhdfs://{self.web}{path}"

    def hdfs(self, path: str) -> str:
        return f"hdfs://{self.rpc}{path}"

    def source(self, size_bytes: int = 0) -> Content:
        """A local file of this size (0: the lab's), made when first asked for."""
        size = size_bytes or self.size_bytes
        name = f"data-{size}"
        if name not in self.stored:
            self.stored[name] = _make_source(self.scratch / name, size)
        return self.stored[name]

    def state(self) -> Content:
        """A local file as torch.save writes a state dict; its digest is of the tensors."""
        name = "state.pt"
        if name not in self.stored:
            path = self.scratch / name
            made = json.loads(measured(side_command("state", path, self.size_bytes)).output)
            self.stored[name] = Content(path, path.stat().st_size, made["digest"])
        return self.stored[name]

    def plain(self, name: str, content: Content, replication: int = 1) -> None:
        """Store it as /bench/NAME, unless it is there."""
        if name in self.stored:
            return
        import hdfs_native

        client = hdfs_native.Client(f"hdfs://{self.rpc}")
        options = hdfs_native.WriteOptions(replication=replication)
        with content.path.open("rb") as file, client.create(f"/bench/{name}", options) as out:
            while piece := file.read(8 * MIB):
                out.write(piece)
        self.stored[name] = content

    def striped(
        self, name: str, content: Content, placement: str = "steered", replication: int = 1
    ) -> None:
        """Store it striped as /bench/NAME, unless it is there."""
        if name in self.stored:
            return
        put(self, content, name, placement, replication)
        # Java compiles what it runs often.
        measured(side_command("ours", self.webhdfs(f"/bench/{name}")))
        self.stored[name] = content


Side = Callable[[], Run]
Sides = Callable[[Lab], dict[str, Side]]


@contextlib.contextmanager
def lab(kind: Kind, scratch: Path) -> Iterator[Lab]:
    """A cluster below an empty folder, in memory; within `own_network`."""
    near, far = cores.halves() if kind.apart else ([], [])
    with Network(kind.datanodes, mbit=kind.mbit) as network, contextlib.ExitStack() as stack:
        hosts = [(host.address, host.prefix) for host in network.hosts]
        with cores.only_on(far):
            cluster = stack.enter_context(
                Cluster(
                    scratch / "hdfs", host=OURS, hosts=hosts, full_speed=True, permissions=False
                )
            )
            stack.enter_context(senders(network.hosts))
        with cores.only_on(near):
            yield Lab(kind, cluster, network.hosts, scratch, near, far)


def _cores(cpus: Sequence[int]) -> str:
    """Which processors: `core 0`, or `cores 0-3, 8`."""
    ranges: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        first = ranges.pop()[0] if ranges and ranges[-1][1] == cpu - 1 else cpu
        ranges.append((first, cpu))
    named = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"core{'s' if len(cpus) > 1 else ''} {', '.join(named)}"


def _make_source(path: Path, size: int) -> Content:
    import xxhash

    digest, block = xxhash.xxh3_64(), os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(size // MIB):
            piece = number.to_bytes(8, "big") + block[8:]
            digest.update(piece)
            file.write(piece)
    return Content(path, size, str(digest.hexdigest()))


# Processes.


@dataclass(frozen=True, slots=True)
class Done:
    """A program that ended well."""

    output: str
    errors: str
    seconds: float
    cpu_s: float
    peak_mib: float


def side_command(*words: object) -> list[str]:
    """The command of one turn of `bench.hdfs.side`."""
    return [sys.executable, "-m", "bench.hdfs.side", *map(str, words)]


def measured(command: Sequence[str], noticed: Callable[[], None] | None = None) -> Done:
    """Run a program to its end; RuntimeError when it fails.

    `noticed` is called when its first line is there; that line is no part of the output.
    """
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if noticed is not None:
        process.stdout.readline()
        noticed()
    output, errors = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    if status:
        raise RuntimeError(f"{' '.join(command)}: {errors[-2000:]}")
    cpu_s = used.ru_utime + used.ru_stime
    return Done(output, errors, seconds, cpu_s, used.ru_maxrss / 1024)


def run_of(content: Content, seconds: float, cpu_s: float = 0.0, peak_mib: float = 0.0) -> Run:
    """Seconds and processor seconds as figures a MiB and a GiB."""
    size = content.size_bytes
    return Run(size / MIB / seconds, cpu_s * GIB / size, peak_mib)


def checked(done: Done, content: Content) -> dict[str, float]:
    """What a turn of `bench.hdfs.side` told; RuntimeError when it found other bytes."""
    result = json.loads(done.output)
    if result["digest"] != content.digest:
        raise RuntimeError(f"wrong bytes: {result}")
    return {key: float(value) for key, value in result.items() if key != "digest"}


def read(lab: Lab, kind: str, *words: str, name: str) -> Run:
    """One reading of the stored file `name` in a process of its own."""
    content = lab.stored[name]
    done = measured(side_command(kind, *words))
    told = checked(done, content)
    return run_of(content, told["seconds"], told["cpu_s"], told["peak_mib"])


def put(lab: Lab, content: Content, name: str, placement: str, replication: int = 1) -> Run:
    """One writing of a striped checkpoint."""
    url = lab.webhdfs(f"/bench/{name}")
    done = measured(side_command("put", content.path, url, placement, replication))
    told = json.loads(done.output)
    return run_of(content, told["seconds"], told["cpu_s"], told["peak_mib"])


def curl(lab: Lab, name: str) -> Run:
    """One WebHDFS stream."""
    url = f"http://{lab.web}/webhdfs/v1/bench/{name}?op=OPEN"
    told = "%{time_total} %{size_download}"
    done = measured(["curl", "-sSL", "--fail", "-o", "/dev/null", "-w", told, url])
    seconds, size = done.output.split()
    if int(size) != lab.stored[name].size_bytes:
        raise RuntimeError(f"curl read {size} bytes")
    return run_of(lab.stored[name], float(seconds), done.cpu_s)


def curl_upload(lab: Lab, content: Content, name: str) -> Run:
    """One WebHDFS stream, the other way; the file is removed again."""
    query = "op=CREATE&overwrite=true&replication=1&user.name=root"
    url = f"http://{lab.web}/webhdfs/v1/bench/{name}?{query}"
    where = measured(["curl", "-sSi", "-X", "PUT", url]).output
    found = re.search(r"(?im)^location: *(\S+)", where)
    if found is None:
        raise RuntimeError(f"no redirect: {where}")
    told = "%{time_total} %{size_upload}"
    sent = ["-T", str(content.path), "-o", "/dev/null", "-w", told, found.group(1)]
    done = measured(["curl", "-sS", "--fail", *sent])
    forget(lab, name)
    return run_of(content, float(done.output.split()[0]), done.cpu_s)


def forget(lab: Lab, name: str) -> None:
    """Remove a file or folder of the cluster."""
    url = f"http://{lab.web}/webhdfs/v1/bench/{name}?op=DELETE&recursive=true&user.name=root"
    measured(["curl", "-sS", "--fail", "-X", "DELETE", url])
