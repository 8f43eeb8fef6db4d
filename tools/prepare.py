"""Make in advance what tests and benches need once a machine: downloads, and programs to compile.

    python -m tools.prepare

Set-up calls this as root, where Debian's packages are. Everything is kept below
`~/.cache/bootseer`, outside the clone, and what is there already takes no time. A test that finds
something missing still makes it itself: in vain where it has no network, or a time limit.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.errors import BootseerError
from tools import netdelay, stargz
from tools.containerd import suite
from tools.hdfs import class_training, jars
from tools.images import real
from tools.initimage.__main__ import default_cache
from tools.k8s import binaries, images
from tools.nodeimage.__main__ import build as build_node_image


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to have: its name for messages, and what makes it unless it is there."""

    name: str
    make: Callable[[], object]


def _make_images() -> None:
    """The images of pods and nodes: what they are made of is kept, they themselves are not all."""
    with tempfile.TemporaryDirectory() as work:
        # The init container's content is a part of the node's.
        build_node_image(Path(work, "node.tar"), "node:1", level=1)
        images.python_image(Path(work, "python.tar"), Path(work), default_cache())


DOWNLOADS = (
    Part("Hadoop's jars", jars.jars_folder),
    Part("an archive of Hadoop's classes", class_training.make_archive),
    Part("the images of pods", _make_images),
    Part("a real image: Debian's smallest system", lambda: real.image("debian")),
)
BUILDS = (
    Part("Kubernetes", binaries.folder),
    Part("stargz's snapshotter", stargz.program),
    Part("containerd's suite of tests", suite.program),
    Part("a delay for packets", netdelay.program),
)


def make_all(rows: Sequence[Sequence[Part]]) -> list[str]:
    """Make every part, the rows side by side; returns a line for each that failed."""
    with concurrent.futures.ThreadPoolExecutor(len(rows)) as pool:
        return [fault for faults in pool.map(_make_row, rows) for fault in faults]


def _make_row(parts: Sequence[Part]) -> list[str]:
    faults = []
    for part in parts:
        begun = time.monotonic()
        try:
            part.make()
        except (BootseerError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            faults.append(f"{part.name}: {error}")
            continue
        took = time.monotonic() - begun
        if took >= 1:
            print(f"setup: made {part.name} in {took:.0f} s", file=sys.stderr, flush=True)
    return faults


def main() -> int:
    """Run from the command line."""
    if os.geteuid() != 0:
        print("setup: what tests of root need is made as root", file=sys.stderr)
        return 0
    faults = make_all((BUILDS, DOWNLOADS))
    for fault in faults:
        print(f"setup: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
