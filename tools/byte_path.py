"""Which modules run while a byte travels from a store to a reader: `python -m tools.byte_path`.

An image of a real registry, with a hot set, and a checkpoint of a real HDFS are mounted by the
commands that users run. Then cold blocks of each are read, and every module of bootseer is written
down of which a function runs, in any process of the mount, between request and reply of each of
these reads: a timer that is due within one of them is not on the way, nor is a function whose kept
result is used. The order is that of first use.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# A server is forked by the command, so it inherits the hook; `open` is the number of the read that
# goes on, 0 between two of them.
HOOK = """
import mmap, os, sys, threading
folder = sys.argv.pop(1)
open_now = mmap.mmap(os.open(folder + "/open", os.O_RDWR), 1)
seen = set()
def note(frame, event, arg):
    read = open_now[0]
    if event == "call" and read:
        name = frame.f_globals.get("__name__", "")
        if (read, name) not in seen and name.startswith("bootseer."):
            seen.add((read, name))
            # Opened each time: a server closes whatever descriptors it was given.
            out = os.open(folder + "/modules", os.O_WRONLY | os.O_APPEND)
            os.write(out, f"{read} {name}{chr(10)}".encode())
            os.close(out)
        if name.startswith("bootseer.fuse.serve") and frame.f_code.co_qualname == "Device.__exit__":
            open_now[0] = 0  # the reply was written; what follows is not on the byte's way
threading.setprofile(note)
sys.setprofile(note)
from bootseer.__main__ import main
sys.exit(main())
"""
SIZE_BYTES = 16 << 20
READS = 3
PAGE_BYTES = 4096
TIMEOUT_S = 120


class Trace:
    """The modules that run within each `reading`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "open").write_bytes(b"\0")
        (folder / "modules").touch()
        with (folder / "open").open("r+b") as file:
            self._open = mmap.mmap(file.fileno(), 1)

    def bootseer(self, *words: str) -> None:
        """Run a command of ours under the hook. Raises CalledProcessError."""
        subprocess.run(
            [sys.executable, "-c", HOOK, str(self.folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=TIMEOUT_S,
        )

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Note what runs meanwhile as read `number`, from 1 on."""
        self._open[0] = number
        yield
        self._open[0] = 0

    def modules(self) -> list[str]:
        """What ran within every one of the reads, in the order of first use."""
        reads: dict[str, set[str]] = {}
        for line in (self.folder / "modules").read_text().splitlines():
            number, name = line.split()
            reads.setdefault(name, set()).add(number)
        return [name for name, numbers in reads.items() if len(numbers) == READS]


def of_an_image(folder: Path) -> list[str]:
    """The way of an image's byte, from a registry to a reader of `image mount`."""
    from tools.images.layout import Image, Layer, write_layout
    from tools.images.members import directory, file
    from tools.podman import Podman
    from tools.registry import Registry

    content = os.urandom(SIZE_BYTES)
    hot = file("hot", os.urandom(PAGE_BYTES))
    program = [directory("bin"), file("bin/busybox", Path("/bin/busybox"), mode=0o755)]
    image = Image([Layer([*program, hot, directory("d"), file("d/f", content)])], {})
    trace, cache = Trace(folder / "trace"), str(folder / "cache")
    with (
        Registry(folder / "registry") as registry,
        Podman(folder / "podman", trusted=[registry.host]) as podman,
    ):
        reference = registry.push(write_layout(folder / "layout", image).source, "lab/bytes", "1")
        _bootseer("image", "build", "--plain-http", "--cache", cache, reference)
        start = ["--workload", "start", "--plain-http", "--cache", cache]
        command = ["/bin/busybox", "cat", "/hot"]
        _bootseer(
            "image",
            "record",
            *start,
            "--push",
            reference,
            "--",
            *command,
            environment=podman.environment,
        )
        shutil.rmtree(cache)
        target = folder / "tree"
        target.mkdir()
        runtime = ["--runtime", str(folder / "run")]
        trace.bootseer("image", "mount", "--no-fill", *start, *runtime, reference, str(target))
        try:
            _read_cold(trace, target / "d" / "f", content)
        finally:
            _bootseer("image", "umount", *runtime, str(target))
    return trace.modules()


def of_a_checkpoint(folder: Path) -> list[str]:
    """The way of a checkpoint's byte, from WebHDFS to a reader of `stripe mount`."""
    from tools.hdfs.cluster import Cluster

    content = os.urandom(SIZE_BYTES)
    (folder / "file").write_bytes(content)
    trace, target = Trace(folder / "trace"), folder / "tree"
    target.mkdir()
    with Cluster(folder / "hdfs", datanodes=1) as cluster:
        url = f"webhdfs://{cluster.http_addresses[0]}/bytes"
        _bootseer("stripe", "put", str(folder / "file"), f"{url}/file")
        trace.bootseer("stripe", "mount", url, str(target))
        try:
            _read_cold(trace, target / "file", content)
        finally:
            _bootseer("stripe", "umount", str(target))
    return trace.modules()


def _read_cold(trace: Trace, path: Path, content: bytes) -> None:
    """Read blocks that nothing has touched; look-up, open and connecting are not on their way."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.pread(descriptor, PAGE_BYTES, 0)
        for number in range(1, READS + 1):
            time.sleep(1.0)  # what follows a mount and a read has ended by then
            offset = SIZE_BYTES * number // (READS + 1)
            with trace.reading(number):
                data = os.pread(descriptor, PAGE_BYTES, offset)
            assert data == content[offset : offset + PAGE_BYTES]
    finally:
        os.close(descriptor)


def _bootseer(*words: str, environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(
        [sys.executable, "-m", "bootseer", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=TIMEOUT_S,
    )


def draw(modules: Sequence[str]) -> str:
    """The modules as docs/design.md has them: a line for each folder that the way comes through."""
    places = [name.removeprefix("bootseer.").replace(".", "/").rpartition("/") for name in modules]
    lines = []
    for folder, group in itertools.groupby(places, key=lambda place: place[0]):
        names = "  ".join(name for _, _, name in group)
        lines += textwrap.wrap(
            names, 70, initial_indent=f"{folder + '/':24}", subsequent_indent=" " * 24
        )
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    ways = {"image": of_an_image, "checkpoint": of_a_checkpoint}
    with tempfile.TemporaryDirectory(prefix="bytes-") as scratch:
        for name in words or ways:
            folder = Path(scratch, name)
            folder.mkdir()
            modules = ways[name](folder)
            print(f"{name}: {len(modules)} modules\n\n{draw(modules)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
