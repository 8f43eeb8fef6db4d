"""Our side of `bench.image`, by the commands that a user has.

A start is `bootseer image mount` and a container of podman's on the mounted tree, or `bootseer
image run`, which does both. Each starts from an empty cache folder, with a server of its own; the
page cache holds nothing of the image, for a mount that has ended takes its pages with it, and our
own modules. No process of ours runs before a start, unless it is one `with_agent`: that agent is
started for it, before the clock is, and ends with it.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import bootseer
from bench.image.lab import WORK, Lab, Start, cpu_s, measured
from bench.image.peers import REPOSITORY, rootfs_command
from bootseer.blocks.cache import present_index
from bootseer.blocks.table import parse

TAG = "stock"
READY_TIMEOUT_S = 30.0
BOOTSEER = (str(Path(sys.executable).with_name("bootseer")), "image")


def workload(work: str) -> str:
    """A program's name as a workload."""
    return work.replace("+", "-")


def image(lab: Lab) -> str:
    """The stock image's name in the registry that also has the block image."""
    return lab.ours.reference(REPOSITORY, TAG)


def publish(
    lab: Lab, source: str, works: Sequence[str], also: Callable[[Lab, Path], None] | None = None
) -> dict[str, int]:
    """Push the stock image, make its block image, record each program; returns packs' sizes.

    `also` is called with the folder of the recordings.
    """
    lab.ours.push(source, REPOSITORY, TAG)
    sizes = {}
    with lab.folder("b") as cache:
        call(lab, "build", "--plain-http", "--cache", str(cache), image(lab))
        for work in works:
            words = ["--plain-http", "--cache", str(cache), "--workload", workload(work), "--push"]
            call(lab, "record", *words, image(lab), "--", "python3", "-c", WORK[work])
            (pack,) = cache.rglob(f"{workload(work)}/pack-*")
            sizes[work] = pack.stat().st_size
        if also is not None:
            also(lab, cache)
    return sizes


@contextlib.contextmanager
def agent(runtime: Path) -> Iterator[None]:
    """The node's resident program, for mounts with this runtime folder."""
    words = [*BOOTSEER, "agent", "--runtime", str(runtime)]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + READY_TIMEOUT_S
        while not (runtime / "images/agent.sock").exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("bootseer image agent does not answer")
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait()


def compile_modules() -> None:
    """Compile our own modules, as installing them does."""
    compileall.compile_dir(Path(bootseer.__file__).parent, quiet=1)


def start(
    lab: Lab, work: str, *options: str, name: str | None = None, with_agent: bool = False
) -> Start:
    """From nothing local to the first work; `name` is the workload whose hot set is used."""
    with lab.folder("o") as folder, contextlib.ExitStack() as stack:
        runtime = folder / "run"
        if with_agent:
            stack.enter_context(agent(runtime))
        tree = stack.enter_context(unmounted(folder / "m", runtime))
        options = ("--runtime", str(runtime), *options)
        mount = mount_command(lab, folder, workload(work) if name is None else name, *options)
        environment = lab.podman.environment
        return measured(lab, mount, rootfs_command(lab, tree, work), environment=environment)


def run_start(lab: Lab, work: str, *options: str, with_agent: bool = False) -> Start:
    """The same by one command, `image run`."""
    with lab.folder("o") as folder, contextlib.ExitStack() as stack:
        runtime = folder / "run"
        if with_agent:
            stack.enter_context(agent(runtime))
        words = ["run", "--plain-http", "--workload", workload(work), "--cache", f"{folder}/cache"]
        words += ["--runtime", str(runtime), *options, image(lab)]
        words += ["--cgroup-parent", f"/{lab.group}"]
        command = [*BOOTSEER, *words, "--", "python3", "-c", WORK[work]]
        return measured(lab, command, environment=lab.podman.environment)


def mount_command(lab: Lab, folder: Path, name: str, *options: str) -> list[str]:
    """`image mount` at `folder`/m with all that it keeps below `folder`."""
    words = ["mount", "--plain-http", "--workload", name, "--cache", f"{folder}/cache"]
    words += ["--log-file", f"{folder}/log", *options]
    return [*BOOTSEER, *words, image(lab), f"{folder}/m"]


@contextlib.contextmanager
def unmounted(tree: Path, runtime: Path) -> Iterator[Path]:
    """An empty folder at which something is mounted within, and unmounted afterwards."""
    tree.mkdir()
    try:
        yield tree
    finally:
        # The container's overlay may be let go of a moment later.
        words = ["umount", "--runtime", str(runtime), str(tree)]
        for _ in range(100):
            done = subprocess.run([*BOOTSEER, *words], capture_output=True, check=False)
            if not done.returncode or not os.path.ismount(tree):
                break
            time.sleep(0.05)
        else:
            subprocess.run(["umount", "-l", tree], check=False)


def together(
    lab: Lab, work: str, count: int, distinct: Callable[[int], None] | None = None
) -> Start:
    """Containers of one image at once, each with a mount of its own; until the last one's work.

    `distinct` is told the stored bytes of the different blocks, and of the pack, that they took.
    """
    with lab.folder("o") as folder, contextlib.ExitStack() as stack:
        commands, runtime = [], folder / "run"
        for number in range(count):
            words = ("--no-fill", "--runtime", str(runtime))
            mount = mount_command(lab, folder, workload(work), *words)
            tree = stack.enter_context(unmounted(folder / f"m{number}", runtime))
            commands.append(([*mount[:-1], str(tree)], rootfs_command(lab, tree, work)))
        received, used, began = lab.received_bytes(), cpu_s(lab.group), time.perf_counter()
        _all_of(commands, lab.podman.environment)
        seconds = time.perf_counter() - began
        if distinct is not None:
            distinct(distinct_bytes(folder / "cache"))
        return Start(seconds, lab.received_bytes() - received, cpu_s(lab.group) - used)


def distinct_bytes(cache: Path) -> int:
    """Stored bytes of one image's blocks and packs that a cache folder has."""
    (path,) = cache.glob("images/*/table-*")
    table, size = parse(path.read_bytes()), present_index.ENTRY_BYTES
    there = bytes(table.blocks * size)
    for present in cache.glob("blocks/*/present"):  # none where the pack had all that was read
        with present.open("rb") as file:
            there = present_index.read_entries(file.fileno(), 0, table.blocks)
    rows = (table[n] for n in range(table.blocks) if any(there[n * size : (n + 1) * size]))
    blocks = {row.offset: row.length for row in rows}  # equal ones are stored once
    packs = (path.stat().st_size for path in cache.glob("images/*/pack-*"))
    return sum(blocks.values()) + sum(packs)


def _all_of(
    commands: Sequence[tuple[list[str], list[str]]], environment: Mapping[str, str]
) -> None:
    failed: list[str] = []

    def one(words: tuple[list[str], list[str]]) -> None:
        for command in words:
            done = subprocess.run(
                command, env=dict(environment), capture_output=True, text=True, check=False
            )
            if done.returncode:
                failed.append(f"{' '.join(command)}: {done.stderr[-1000:]}")
                return

    threads = [threading.Thread(target=one, args=(words,)) for words in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError(failed[0])


def call(lab: Lab, *words: str) -> str:
    done = subprocess.run(
        [*BOOTSEER, *words],
        env=lab.podman.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"bootseer image {' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout
