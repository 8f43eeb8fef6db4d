"""Reading a whole image that is complete on this node: ours against a plain EROFS file."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench import harness
from bench.image.lab import Lab
from bench.image.ours import mount_command, unmounted
from bench.image.peers import erofs, forget

COMPLETE_TIMEOUT_S = 120.0
READERS = 4
SMALLEST = 64 << 10  # below it opening files is measured, not reading


def steady(place: Lab, name: str, disk: Path, rounds: int) -> list[harness.Case]:
    """All larger files of the image, by several readers; MB/s, cold and warm page cache."""
    with place.folder("w") as folder, contextlib.ExitStack() as stack:
        ours = stack.enter_context(complete(place, folder))
        plain = folder / "plain"
        plain.mkdir()
        stack.enter_context(erofs(disk, plain))
        files = _files(plain)
        (blocks,) = (folder / "cache/blocks").glob("*/data")
        cold = {
            harness.OURS: lambda: read_all(ours, files, [blocks]),
            "plain EROFS": lambda: read_all(plain, files, [disk]),
        }
        warm = {
            harness.OURS: lambda: read_all(ours, files, []),
            "plain EROFS": lambda: read_all(plain, files, []),
        }
        cases = []
        for kind, sides in (("cold", cold), ("warm", warm)):
            values = harness.interleave(sides, rounds=rounds)
            cases += harness.cases_of(f"{name} {kind}", values, unit="MB/s", better="higher")
        return cases


@contextlib.contextmanager
def complete(place: Lab, folder: Path) -> Iterator[Path]:
    """Our mount once all of the image is on this node, and known to be: the second one."""
    runtime = folder / "run"
    mount = mount_command(place, folder, "", "--no-record", "--json", "--runtime", str(runtime))
    with unmounted(folder / "m", runtime):
        subprocess.run(mount, check=True, capture_output=True)
        until = time.monotonic() + COMPLETE_TIMEOUT_S
        while not list((folder / "cache/blocks").glob("*/sealed")):
            if time.monotonic() > until:
                raise RuntimeError("the image was not sealed")
            time.sleep(0.1)
    (folder / "m").rmdir()
    until = time.monotonic() + COMPLETE_TIMEOUT_S
    while True:
        with unmounted(folder / "m", runtime) as tree:
            done = subprocess.run(mount, check=True, capture_output=True)
            if json.loads(done.stdout)["complete"]:
                yield tree
                return
        # The first mount's server holds the image until it has ended, a moment after its mount.
        if time.monotonic() > until:
            raise RuntimeError("the second mount is served")
        (folder / "m").rmdir()


def _files(root: Path) -> list[tuple[str, int]]:
    """The larger files below a root, with their sizes."""
    out = []
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names):
            about = os.lstat(path)
            if os.path.isfile(path) and not os.path.islink(path) and about.st_size >= SMALLEST:
                out.append((os.path.relpath(path, root), about.st_size))
    return sorted(out)


def read_all(root: Path, files: list[tuple[str, int]], stores: list[Path]) -> float:
    """MB/s of reading all files once; those named in `stores` and the files are out of memory."""
    if stores:
        for name, _ in files:
            with (root / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for path in stores:
            forget(path)
    listed = "\0".join(name for name, _ in files).encode()
    began = time.perf_counter()
    subprocess.run(
        ["xargs", "-0", "-n", "64", "-P", str(READERS), "cat"],
        cwd=root,
        input=listed,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return sum(size for _, size in files) / 1e6 / (time.perf_counter() - began)
