"""Striped and plain checkpoints on a real HDFS whose DataNodes have links of ~95 MiB/s each.

A NameNode and three DataNodes (Hadoop 2.7.3) run here, each DataNode in a network namespace of
its own behind a link capped in both directions; clients and the NameNode share one free of caps.
The DataNodes' files lie in memory (tmpfs), so reads never wait for a disk. Sides take turns in
processes of their own; each reads all of one file of 768 MiB or writes one of 1 GiB (`--quick`
192 MiB) whose blocks are of 128 MiB, and the bytes read are compared with the source's.

`striped read r1`: ours reads a checkpoint whose stripes were steered over the DataNodes, through
webhdfs://; `over hdfs-native` reads the same through hdfs://, `random placement` (through hdfs://
too) one whose stripes HDFS placed. `one reader` is curl on a plain file, `link sum` what the
links carry together by plain TCP. `plain read r3`: one existing file at replication 3, no
conversion; only WebHDFS lets the replica be chosen. `striped write r1`: WebHDFS alone can steer;
Hadoop 2.7 waits 0.4 s or more at the end of many an object, which a longer file hides. `mount
read`: the file as a mount shows it, with a fresh mount for each run; there are four DataNodes
here, for three links carry no more than 3.05 times one. Cases ending in `CPU` are the processor
seconds of the client (and of its mount) a GiB; `peak memory` is the largest resident set in MiB
of what fetches, Python and libraries included; our budget is 512 MiB by default, of which 432 are
for blocks. Needs root, and for some sides curl and rclone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import harness
from bench.hdfs_links import link_sum, senders
from tools.hdfs.cluster import Cluster
from tools.netlab import OURS, Host, Network, own_network

ROOT = Path(__file__).parents[1]
FILE_BYTES, WRITTEN_BYTES, QUICK_FILE_BYTES = 768 << 20, 1 << 30, 192 << 20
LINK_MBIT = 830.0  # 94.6 MiB/s of payload
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """Of one side's turn."""

    mib_s: float
    cpu_s_gib: float = 0.0
    peak_mib: float = 0.0


@dataclass(frozen=True, slots=True)
class Lab:
    """What the sides need to know."""

    cluster: Cluster
    hosts: Sequence[Host]
    source: Path
    size_bytes: int
    digest: str
    scratch: Path

    @property
    def web(self) -> str:
        return self.cluster.http_addresses[0]

    @property
    def rpc(self) -> str:
        return self.cluster.rpc_addresses[0]

    def webhdfs(self, path: str) -> str:
        return f"webhdfs://{self.web}{path}"

    def hdfs(self, path: str) -> str:
        return f"hdfs://{self.rpc}{path}"


Side = Callable[[], Run]


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share a cluster and a file."""

    datanodes: int
    size_bytes: int
    cases: dict[str, Callable[[Lab], dict[str, Side]]]


def run(options: harness.Options) -> list[harness.Case]:
    """Run every case and return their figures."""
    if os.geteuid() != 0:
        raise RuntimeError("bench hdfs needs root: it makes network namespaces")
    cases: list[harness.Case] = []
    with own_network():
        for group in GROUPS:
            cases += run_group(group, options)
    return cases


def run_group(group: Group, options: harness.Options) -> list[harness.Case]:
    """Run the cases that share a cluster; within `own_network`."""
    size = QUICK_FILE_BYTES if options.quick else group.size_bytes
    cases: list[harness.Case] = []
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-hdfs-", dir="/dev/shm") as folder:
        source = Path(folder, "data")
        digest = _make_source(source, size)
        with _lab(Path(folder), group.datanodes, source, digest) as lab:
            for name, sides in group.cases.items():
                cases += _case(name, sides(lab), options.runs, 0 if options.quick else 1)
    return cases


@contextlib.contextmanager
def _lab(scratch: Path, datanodes: int, source: Path, digest: str) -> Iterator[Lab]:
    """A cluster with the files that are read."""
    with Network(datanodes, mbit=LINK_MBIT) as network:
        hosts = [(host.address, host.prefix) for host in network.hosts]
        with Cluster(
            scratch / "hdfs", host=OURS, hosts=hosts, full_speed=True, permissions=False
        ) as cluster:
            lab = Lab(cluster, network.hosts, source, source.stat().st_size, digest, scratch)
            _prepare(lab)
            with senders(network.hosts):
                yield lab


def _case(name: str, sides: dict[str, Side], rounds: int, warmup: int) -> list[harness.Case]:
    runs: dict[str, list[Run]] = {side: [] for side in sides}

    def counted(side: str) -> Callable[[], float]:
        def turn() -> float:
            runs[side].append(sides[side]())
            return 0.0

        return turn

    harness.interleave({side: counted(side) for side in sides}, rounds=rounds, warmup=warmup)
    kept = {side: values[-rounds:] for side, values in runs.items()}
    speed = {side: [r.mib_s for r in values] for side, values in kept.items()}
    print(f"{name}: { ({s: [round(x) for x in v] for s, v in speed.items()}) }", file=sys.stderr)
    cases = harness.cases_of(name, speed, unit="MiB/s", better="higher")
    clients = {s: v for s, v in kept.items() if all(r.cpu_s_gib for r in v)}
    cpu = {side: [r.cpu_s_gib for r in values] for side, values in clients.items()}
    cases += harness.cases_of(f"{name} CPU", cpu, unit="CPU-s/GiB")
    peak = {s: [r.peak_mib for r in v] for s, v in clients.items() if all(r.peak_mib for r in v)}
    return cases + harness.cases_of(f"{name} peak memory", peak, unit="MiB")


# Inputs.


def _make_source(path: Path, size: int) -> str:
    import xxhash

    digest, block = xxhash.xxh3_64(), os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(size // MIB):
            piece = number.to_bytes(8, "big") + block[8:]
            digest.update(piece)
            file.write(piece)
    return str(digest.hexdigest())


def _prepare(lab: Lab) -> None:
    """Store the files that are read: plain at replication 1 and 3, striped steered and random."""
    import hdfs_native

    client = hdfs_native.Client(f"hdfs://{lab.rpc}")
    for name, replication in (("plain1", 1), ("plain3", 3)):
        options = hdfs_native.WriteOptions(replication=replication)
        with lab.source.open("rb") as file, client.create(f"/bench/{name}", options) as out:
            while piece := file.read(8 * MIB):
                out.write(piece)
    for name, placement in (("steered", "steered"), ("random", "store")):
        _python(lab, "put", str(lab.source), lab.webhdfs(f"/bench/{name}"), placement)
        _read(lab, "ours", lab.webhdfs(f"/bench/{name}"))  # Java compiles what it runs often


# Sides.


def striped_read(lab: Lab) -> dict[str, Side]:
    return {
        harness.OURS: lambda: _read(lab, "ours", lab.webhdfs("/bench/steered")),
        "over hdfs-native": lambda: _read(lab, "ours", lab.hdfs("/bench/steered")),
        "random placement": lambda: _read(lab, "ours", lab.hdfs("/bench/random")),
        "one reader": lambda: curl(lab, "/bench/plain1"),
        "link sum": lambda: Run(link_sum(lab.hosts)),
    }


def plain_read(lab: Lab) -> dict[str, Side]:
    return {
        harness.OURS: lambda: _read(lab, "ours", lab.webhdfs("/bench/plain3")),
        "over hdfs-native": lambda: _read(lab, "ours", lab.hdfs("/bench/plain3")),
        "one reader": lambda: curl(lab, "/bench/plain3"),
        "link sum": lambda: Run(link_sum(lab.hosts)),
    }


def mount_read(lab: Lab) -> dict[str, Side]:
    sides: dict[str, Side] = {
        harness.OURS: lambda: our_mount(lab, lab.webhdfs("/bench"), "steered"),
        "over hdfs-native": lambda: our_mount(lab, lab.hdfs("/bench"), "steered"),
        "fsspec webhdfs": lambda: _read(lab, "fsspec", lab.web, "/bench/plain1"),
        "hdfs-native": lambda: _read(lab, "native", lab.rpc, "/bench/plain1"),
        "one reader": lambda: curl(lab, "/bench/plain1"),
        "link sum": lambda: Run(link_sum(lab.hosts)),
    }
    if shutil.which("rclone"):
        sides["rclone mount"] = lambda: rclone_mount(lab, "plain1")
    return sides


def striped_write(lab: Lab) -> dict[str, Side]:
    def ours(placement: str) -> Run:
        done = _python(lab, "put", str(lab.source), lab.webhdfs("/bench/new"), placement)
        _forget(lab, "/bench/new.stripes")
        return done

    return {
        harness.OURS: lambda: ours("steered"),
        "random placement": lambda: ours("store"),
        "one writer": lambda: curl_upload(lab, "/bench/new"),
    }


GROUPS = (
    Group(3, FILE_BYTES, {"striped read r1": striped_read, "plain read r3": plain_read}),
    Group(3, WRITTEN_BYTES, {"striped write r1": striped_write}),
    Group(4, FILE_BYTES, {"mount read": mount_read}),
)


def _read(lab: Lab, *words: str) -> Run:
    return _python(lab, *words, digest=lab.digest)


def _python(lab: Lab, *words: str, digest: str = "") -> Run:
    """One turn of `bench.hdfs_side`."""
    done = _measured([sys.executable, "-m", "bench.hdfs_side", *words])
    result = json.loads(done.output)
    if result["bytes"] != lab.size_bytes or result["digest"] != digest:
        raise RuntimeError(f"{' '.join(words)}: wrong bytes, {result}")
    return _run_of(lab, float(result["seconds"]), done.cpu_s, float(result["peak_mib"]))


def _run_of(lab: Lab, seconds: float, cpu_s: float = 0.0, peak_mib: float = 0.0) -> Run:
    return Run(lab.size_bytes / MIB / seconds, cpu_s * GIB / lab.size_bytes, peak_mib)


@dataclass(frozen=True, slots=True)
class Done:
    """A program that ended well."""

    output: str
    cpu_s: float


def _measured(command: Sequence[str]) -> Done:
    """Run a program to its end; RuntimeError when it fails."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    if status:
        raise RuntimeError(f"{' '.join(command)}: {errors[-2000:]}")
    return Done(output, used.ru_utime + used.ru_stime)


def curl(lab: Lab, path: str) -> Run:
    """One WebHDFS stream."""
    url = f"http://{lab.web}/webhdfs/v1{path}?op=OPEN"
    told = "%{time_total} %{size_download}"
    done = _measured(["curl", "-sSL", "--fail", "-o", "/dev/null", "-w", told, url])
    seconds, size = done.output.split()
    if int(size) != lab.size_bytes:
        raise RuntimeError(f"curl read {size} bytes")
    return _run_of(lab, float(seconds), done.cpu_s)


def curl_upload(lab: Lab, path: str) -> Run:
    """One WebHDFS stream, the other way."""
    url = f"http://{lab.web}/webhdfs/v1{path}?op=CREATE&overwrite=true&replication=1&user.name=root"
    where = _measured(["curl", "-sSi", "-X", "PUT", url]).output
    found = re.search(r"(?im)^location: *(\S+)", where)
    if found is None:
        raise RuntimeError(f"no redirect: {where}")
    told = "%{time_total} %{size_upload}"
    sent = ["-T", str(lab.source), "-o", "/dev/null", "-w", told, found.group(1)]
    done = _measured(["curl", "-sS", "--fail", *sent])
    _forget(lab, path)
    return _run_of(lab, float(done.output.split()[0]), done.cpu_s)


def _forget(lab: Lab, path: str) -> None:
    url = f"http://{lab.web}/webhdfs/v1{path}?op=DELETE&recursive=true&user.name=root"
    _measured(["curl", "-sS", "--fail", "-X", "DELETE", url])


def our_mount(lab: Lab, url: str, name: str) -> Run:
    command = [sys.executable, "-m", "bootseer", "stripe", "mount", "--foreground", url]
    with mounted(lab, command) as (process, folder):
        return _read_mount(lab, process, folder / name)


def rclone_mount(lab: Lab, name: str) -> Run:
    remote = f":hdfs,namenode='{lab.rpc}',username=root:/bench"
    with mounted(lab, ["rclone", "mount", "--read-only", "--config", "", remote]) as found:
        process, folder = found
        return _read_mount(lab, process, folder / name)


def _read_mount(lab: Lab, process: subprocess.Popen[bytes], path: Path) -> Run:
    done = _measured([sys.executable, "-m", "bench.hdfs_side", "file", str(path)])
    result = json.loads(done.output)
    if result["bytes"] != lab.size_bytes or result["digest"] != lab.digest:
        raise RuntimeError(f"{path}: wrong bytes, {result}")
    server_s, peak_mib = _of_tree(process.pid)
    return _run_of(lab, float(result["seconds"]), done.cpu_s + server_s, peak_mib)


def _of_tree(pid: int) -> tuple[float, float]:
    """Processor seconds and peak MiB of a process and its children, while they run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = sum(int(f) for f in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    peak_mib = int(found.group(1)) / 1024 if found else 0.0
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        more_s, more_mib = _of_tree(int(child))
        cpu_s, peak_mib = cpu_s + more_s, peak_mib + more_mib
    return cpu_s, peak_mib


@contextlib.contextmanager
def mounted(lab: Lab, command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A fresh mount by a program that stays in the foreground."""
    folder = Path(tempfile.mkdtemp(prefix="mount-", dir=lab.scratch))
    log = (lab.scratch / "mount.log").open("wb")
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", "--", *command, str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        end = time.monotonic() + 30
        while folder.stat().st_dev == lab.scratch.stat().st_dev:
            if process.poll() is not None or time.monotonic() > end:
                said = Path(log.name).read_text(errors="replace")[-1000:]
                raise RuntimeError(f"{command[0]} does not mount: {said}")
            time.sleep(0.02)
        yield process, folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False, stderr=subprocess.DEVNULL)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        log.close()
