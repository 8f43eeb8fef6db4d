"""All sides of `bench.image` once, with a tiny image; a program, for it moves to another network.

image_bench_worker.py SCRATCH
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.image import hotsets as image_hotsets
from bench.image import ours as image_ours
from bench.image import peers as image_peers
from bench.image import steady as image_steady
from bench.image.lab import Link, Start, lab, own_group
from bench.image_files import lazy as image_files_lazy
from tools.containerd.server import Containerd
from tools.images.layout import Image, write_layout
from tools.images.members import Repeated, directory, file, symlink
from tools.netlab import own_network
from tools.podman import Podman
from tools.registry import Registry

WORK = "numpy+pyarrow"
LARGE_BYTES = 3 << 20
LINK = Link("test", 400, 2)
# It lingers: `ctr` may lose what a container wrote that ends before its output is opened.
SCRIPT = b"#!/bin/sh\ncat /usr/lib/large >/dev/null\necho first work\nsleep 0.5\n"


def tiny(folder: Path, size_bytes: int = LARGE_BYTES) -> str:
    """An image whose python3 is a shell script that reads one file; returns its source."""
    members = [directory(name) for name in ("bin", "usr", "usr/bin", "usr/lib")]
    members += [file("bin/busybox", Path("/bin/busybox"), mode=0o755)]
    members += [symlink(f"bin/{name}", "busybox") for name in ("sh", "cat", "sleep")]
    members += [file("usr/bin/python3", SCRIPT, mode=0o755)]
    members += [file("usr/lib/large", Repeated(bytes(range(251)), size_bytes))]
    return write_layout(folder, Image([members])).source


def peers(scratch: Path, source: str) -> tuple[Path, Path]:
    """What `image_peers.prepare` makes, without recording."""
    disk = scratch / "plain.erofs"
    with Registry(scratch / "r", storage=scratch / "stored") as registry:
        stock = registry.push(source, image_peers.REPOSITORY, image_peers.STOCK)
        with Podman(scratch / "q", trusted=[registry.host]) as podman:
            podman.pull(stock)
            with podman.mounted(stock) as tree:
                subprocess.run(["mkfs.erofs", "--quiet", disk, tree], check=True)
        lazy = registry.reference(image_peers.REPOSITORY, image_peers.LAZY)
        with Containerd(scratch / "d") as server:
            server("images", "pull", "--plain-http", stock)
            words = ("images", "optimize", "--oci", "--no-optimize")
            server(*words, stock, lazy, program="ctr-remote")
            server("images", "push", "--plain-http", lazy)
    return scratch / "stored", disk


def clocked(side: Callable[[], Start]) -> dict[str, float]:
    """What a side tells of its start, and what is seen of it from outside."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    start = side()
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    waited_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**dataclasses.asdict(start), "wall_s": wall_s, "waited_cpu_s": waited_s}


def main() -> None:
    """Print what each side came to, as JSON."""
    scratch = Path(sys.argv[1])
    source = tiny(scratch / "layout")
    storage, disk = peers(scratch, source)
    with own_group() as group, own_network(), lab(LINK, scratch, storage, group) as place:
        other = tiny(scratch / "other", 4 << 20)
        also = functools.partial(image_hotsets.publish, other=other)
        sizes = image_ours.publish(place, source, [WORK], also)
        (scratch / "shown").mkdir()
        (scratch / "shown/line").write_text("first work\n")
        shown = image_files_lazy.Lazy(place, scratch / "shown", scratch / "shown")
        image_ours.compile_modules()
        starts = {
            "ours": lambda: image_ours.start(place, WORK),
            "with agent": lambda: image_ours.start(place, WORK, with_agent=True),
            "run": lambda: image_ours.run_start(place, WORK),
            "run with agent": lambda: image_ours.run_start(place, WORK, with_agent=True),
            "carried": lambda: image_ours.start(place, WORK, name=image_hotsets.CARRIED),
            "no hot set": lambda: image_ours.start(place, WORK, "--no-hot", "--no-fill"),
            "random": lambda: image_ours.start(place, WORK, name="random"),
            "three": lambda: image_ours.together(place, WORK, 3),
            "podman": lambda: image_peers.podman_pull(place, WORK),
            "containerd": lambda: image_peers.containerd_pull(place, WORK),
            "stargz": lambda: image_peers.stargz_pull(place, WORK, image_peers.LAZY),
            "shown": lambda: shown.start("/bin/sh", "-c", "cat /shared/line"),
            "cold": lambda: image_peers.cold_disk(place, WORK, disk),
            "warm": lambda: image_peers.warm_disk(place, WORK, disk),
        }
        told = {side: clocked(start) for side, start in starts.items()}
        began = time.perf_counter()
        steady = image_steady.steady(place, "steady", disk, 1)
        steady_s = time.perf_counter() - began
    about = {
        "starts": told,
        "pack_bytes": sizes[WORK],
        "layer_bytes": max(path.stat().st_size for path in (scratch / "layout").rglob("sha256/*")),
        "link_bytes_per_s": LINK.mbit * 1e6 / 8,
        "steady_s": steady_s,
        "steady_mb": (LARGE_BYTES + os.stat("/bin/busybox").st_size) / 1e6,
        "steady": [case.values for case in steady],
    }
    print(json.dumps(about))


if __name__ == "__main__":
    main()
