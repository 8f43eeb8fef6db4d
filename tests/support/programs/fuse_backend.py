"""A process that serves a tree by either server: `fuse_backend.py BACKEND TREE MOUNTPOINT`.

TREE is a local directory, or `:answers` for files whose reads are answered in unusual ways.
Prints a line once the mount answers; ends when it is unmounted.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import CorruptDataError
from bootseer.fuse import fusepy_server
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.operations import Data, FileSystemError, Handle, Inode, Operations
from tests.support.mounts.fuse import Mount, end_mount
from tests.support.trees.local_tree import LocalTree
from tests.support.trees.memory import Later, MemoryTree

BACKENDS = ("fuse", "fusepy")


class Answers(MemoryTree):
    """Each file's name says how its reads are answered."""

    def __init__(self) -> None:
        names = ["later", "pieces", "refused later", "refused", "fails", "corrupt", "view"]
        super().__init__(dict.fromkeys(names, b"0123456789" * 1000), direct=True)
        self.kept: list[bool] = []

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | memoryview | None:
        content = memoryview(self.content(inode))[offset : offset + size]
        match self.paths[inode]:
            case "later":
                answer = later().data
                threading.Timer(0.05, answer, [Data((content,))]).start()
                return None
            case "pieces":
                return Data([content[i : i + 7] for i in range(0, len(content), 7)], lambda: None)
            case "refused later":
                threading.Timer(0.05, later().error, [errno.ETIMEDOUT]).start()
                return None
            case "refused":
                raise FileSystemError(errno.EACCES)
            case "fails":
                raise ZeroDivisionError
            case "corrupt":
                raise CorruptDataError("block 7 of x does not match its digest; repair it")
        return content


def serve(backend: str, operations: Operations, mountpoint: str) -> None:
    """Serve until unmounted."""
    options = MountOptions(allow_other=True)

    def ready() -> None:
        print("ready", flush=True)

    if backend == "fusepy":
        fusepy_server.serve(operations, mountpoint, options=options, ready=ready)
        return
    with Mount(operations, mountpoint, options=options) as mount:
        ready()
        mount.wait()


@contextlib.contextmanager
def backend_mount(backend: str, tree: str, mountpoint: Path) -> Iterator[Path]:
    """Such a process with its mount, both gone afterwards."""
    command = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, __file__, backend]
    process = subprocess.Popen([*command, tree, str(mountpoint)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        end = time.monotonic() + 20
        # libfuse says it is ready a moment before the first question can be answered.
        while not mountpoint.is_mount():
            assert time.monotonic() < end
            time.sleep(0.01)
        yield mountpoint
    finally:
        end_mount(mountpoint)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main() -> None:
    backend, tree, mountpoint = sys.argv[1:]
    if tree == ":answers":
        serve(backend, Answers(), mountpoint)
        return
    # fusepy copies each answer: a file that shrank under its map would end it by SIGBUS.
    with LocalTree(tree, mapped=backend == "fuse") as operations:
        serve(backend, operations, mountpoint)


if __name__ == "__main__":
    main()
