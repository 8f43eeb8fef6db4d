"""The cases of `bench.hdfs`: whom each compares, and what is told of their runs."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from bench import harness
from bench.hdfs.lab import (
    GIB,
    MIB,
    Content,
    Kind,
    Lab,
    Run,
    Side,
    Sides,
    checked,
    curl,
    curl_upload,
    forget,
    measured,
    put,
    read,
    run_of,
    side_command,
)
from bench.hdfs.links import link_sum
from bench.hdfs.mounts import Reader, by_cat, by_dd, by_python, our_mount, rclone_mount

BUDGET_MIB = 512.0
NATIVE = "over hdfs-native"
BLOCK_BYTES = 128 * MIB  # HDFS's default
STOP_AFTER = 1 / 3

Runs = dict[str, list[Run]]
Told = Callable[[str, Runs], list[harness.Case]]


# Speed.


def speeds(name: str, runs: Runs) -> list[harness.Case]:
    """MiB/s, and processor time and memory where they were taken."""
    speed = {side: [r.mib_s for r in values] for side, values in runs.items()}
    cases = harness.cases_of(name, speed, unit="MiB/s", better="higher")
    clients = {s: v for s, v in runs.items() if all(r.cpu_s_gib for r in v)}
    cpu = {side: [r.cpu_s_gib for r in values] for side, values in clients.items()}
    cases += harness.cases_of(f"{name} CPU", cpu, unit="CPU-s/GiB")
    peak = {s: [r.peak_mib for r in v] for s, v in clients.items() if all(r.peak_mib for r in v)}
    return cases + harness.cases_of(f"{name} peak memory", peak, unit="MiB")


def striped_read(lab: Lab) -> dict[str, Side]:
    lab.plain("plain1", lab.source())
    lab.striped("steered", lab.source())
    lab.striped("random", lab.source(), "store")
    return {
        harness.OURS: lambda: read(lab, "ours", lab.webhdfs("/bench/steered"), name="steered"),
        NATIVE: lambda: read(lab, "ours", lab.hdfs("/bench/steered"), name="steered"),
        "random placement": lambda: read(lab, "ours", lab.hdfs("/bench/random"), name="random"),
        "one reader": lambda: curl(lab, "plain1"),
        "link sum": lambda: Run(link_sum(lab.hosts)),
    }


def plain_read(lab: Lab) -> dict[str, Side]:
    lab.plain("plain3", lab.source(), 3)
    return {
        harness.OURS: lambda: read(lab, "ours", lab.webhdfs("/bench/plain3"), name="plain3"),
        NATIVE: lambda: read(lab, "ours", lab.hdfs("/bench/plain3"), name="plain3"),
        "one reader": lambda: curl(lab, "plain3"),
        "link sum": lambda: Run(link_sum(lab.hosts)),
    }


def striped_write(lab: Lab) -> dict[str, Side]:
    def ours(placement: str) -> Run:
        done = put(lab, lab.source(), "new", placement)
        forget(lab, "new.stripes")
        return done

    return {
        harness.OURS: lambda: ours("steered"),
        "random placement": lambda: ours("store"),
        "one writer": lambda: curl_upload(lab, lab.source(), "new"),
    }


def mount_read(lab: Lab) -> dict[str, Side]:
    return _mounts(lab, by_python("file")) | {
        "fsspec webhdfs": lambda: read(lab, "fsspec", lab.web, "/bench/plain1", name="plain1"),
        "hdfs-native": lambda: read(lab, "native", lab.rpc, "/bench/plain1", name="plain1"),
        "one reader": lambda: curl(lab, "plain1"),
        "link sum": lambda: Run(link_sum(lab.hosts)),
    }


def mount_dd(lab: Lab) -> dict[str, Side]:
    return _mounts(lab, by_dd)


def mount_cat(lab: Lab) -> dict[str, Side]:
    return _mounts(lab, by_cat)


def mount_torch(lab: Lab) -> dict[str, Side]:
    return _mounts(lab, by_python("torch"), "state")


def mount_mapped(lab: Lab) -> dict[str, Side]:
    return _mounts(lab, by_python("mapped"), "state")


def mount_block(lab: Lab) -> dict[str, Side]:
    """A plain file of one block on one DataNode, where there is nothing to be read in parallel."""
    lab.plain("block1", lab.source(one_block(lab.size_bytes)))
    sides: dict[str, Side] = {
        harness.OURS: lambda: our_mount(lab, lab.webhdfs("/bench"), "block1", by_cat),
        NATIVE: lambda: our_mount(lab, lab.hdfs("/bench"), "block1", by_cat),
    }
    if shutil.which("rclone"):
        sides["rclone mount"] = lambda: rclone_mount(lab, "block1", by_cat)
    return sides


def _mounts(lab: Lab, reader: Reader, state: str = "") -> dict[str, Side]:
    """The same file by our mount, striped, and by rclone's, plain."""
    content = lab.state() if state else lab.source()
    plain, striped = (f"{state}1", state) if state else ("plain1", "steered")
    lab.plain(plain, content)
    lab.striped(striped, content)
    sides: dict[str, Side] = {
        harness.OURS: lambda: our_mount(lab, lab.webhdfs("/bench"), striped, reader),
        NATIVE: lambda: our_mount(lab, lab.hdfs("/bench"), striped, reader),
    }
    if shutil.which("rclone"):
        sides["rclone mount"] = lambda: rclone_mount(lab, plain, reader)
    return sides


# A DataNode that stops.


def pauses(name: str, runs: Runs) -> list[harness.Case]:
    """Seconds of the longest pause."""
    values = {side: [r.pause_s for r in each] for side, each in runs.items()}
    return harness.cases_of(name, values, unit="s")


def stopped(lab: Lab) -> dict[str, Side]:
    lab.striped("striped3", lab.source(), "store", 3)
    content, turns = lab.stored["striped3"], itertools.count()
    mark = int(content.size_bytes * STOP_AFTER)

    def run(*words: object, harm: bool = True) -> Run:
        number = next(turns) % len(lab.hosts)

        def stop() -> None:
            if harm:
                lab.cluster.pause_datanode(number)

        try:
            done = measured(side_command("stall", mark, *words), stop)
        finally:
            lab.cluster.resume_datanode(number)
        told = checked(done, content)
        return dataclasses.replace(
            run_of(content, told["seconds"], done.cpu_s), pause_s=told["pause_s"]
        )

    def through_mount(path: Path, _content: Content) -> Run:
        return run("file", path)

    web, native = lab.webhdfs("/bench/striped3"), lab.hdfs("/bench/striped3")
    return {
        harness.OURS: lambda: run("ours", web),
        NATIVE: lambda: run("ours", native),
        "mount": lambda: our_mount(lab, lab.webhdfs("/bench"), "striped3", through_mount),
        "none stopped": lambda: run("ours", web, harm=False),
    }


# Memory.


def peaks(name: str, runs: Runs) -> list[harness.Case]:
    """The largest resident set alone."""
    values = {side: [r.peak_mib for r in each] for side, each in runs.items()}
    return harness.cases_of(name, values, unit="MiB")


def memory_small(lab: Lab) -> dict[str, Side]:
    return _memory(lab, quarter(lab.size_bytes))


def memory_large(lab: Lab) -> dict[str, Side]:
    return _memory(lab, lab.size_bytes)


def _memory(lab: Lab, size_bytes: int) -> dict[str, Side]:
    name = f"steered-{size_bytes}"
    lab.striped(name, lab.source(size_bytes))
    web, content = lab.webhdfs(f"/bench/{name}"), lab.stored[name]

    def cat() -> Run:
        words = [sys.executable, "-m", "bootseer", "stripe", "cat", web]
        done = measured(["sh", "-c", 'exec "$@" >/dev/null', "sh", *words])
        return run_of(content, done.seconds, done.cpu_s, done.peak_mib)

    return {
        harness.OURS: lambda: our_mount(lab, lab.webhdfs("/bench"), name, by_dd),
        "stripedfs.open": lambda: read(lab, "ours", web, name=name),
        "stripe cat": cat,
        "budget": lambda: Run(0.0, peak_mib=BUDGET_MIB),
    }


# The size of the file that is read, by the lab's.


def whole(size_bytes: int) -> int:
    return size_bytes


def one_block(size_bytes: int) -> int:
    return min(size_bytes, BLOCK_BYTES)


def quarter(size_bytes: int) -> int:
    return max(size_bytes // 4 // MIB, 1) * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One case."""

    kind: Kind
    sides: Sides
    told: Told = speeds
    file_bytes: Callable[[int], int] = whole


READ, WRITE, MOUNT = Kind(3, 768 * MIB), Kind(3, GIB), Kind(4, 512 * MIB)
FREE = Kind(3, 2 * GIB, mbit=0)
APART = ", cores apart"
CASES = {
    "striped read r1": Spec(READ, striped_read),
    "plain read r3": Spec(READ, plain_read),
    "longest pause, DataNode stopped": Spec(READ, stopped, pauses),
    "striped write r1": Spec(WRITE, striped_write),
    "mount read": Spec(MOUNT, mount_read),
    "mount dd": Spec(MOUNT, mount_dd),
    "mount cat": Spec(MOUNT, mount_cat),
    "mount torch.load": Spec(MOUNT, mount_torch),
    "mount torch.load mapped": Spec(MOUNT, mount_mapped),
    "mount plain file of one block": Spec(MOUNT, mount_block, file_bytes=one_block),
    "memory of a file of 0.5 GiB": Spec(FREE, memory_small, peaks, quarter),
    "memory of a file of 2 GiB": Spec(FREE, memory_large, peaks),
}
CASES |= {
    f"{name}{APART}": dataclasses.replace(
        CASES[name], kind=dataclasses.replace(CASES[name].kind, apart=True)
    )
    for name in ("striped read r1", "mount read", "mount dd", "mount cat", "mount torch.load")
}
