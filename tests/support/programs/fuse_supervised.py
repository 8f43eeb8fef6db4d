"""A supervised mount in a process of its own: `python fuse_supervised.py DIRECTORY SETTINGS`.

SETTINGS is JSON: `file` (what is served as /f), `direct`, `crash` ("build" or "read": the worker
ends itself there; "refuse": the tree cannot be built), `slow_s` (each read waits so long),
`passed` (files are passed through), `limits`, `options`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import sys
import threading
import time
from typing import Any

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.operations import Attr, Data, Handle, Inode, Opened
from bootseer.fuse.serve.handover import RestartLimits, supervise
from tests.support.trees.memory import Later, MemoryTree


class FileTree(MemoryTree):
    """One file /f of a local disk, read by pread into memory of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__({"f": b""}, direct=settings.get("direct", False), keep_cache=False)
        self.fd = os.open(settings["file"], os.O_RDONLY)
        self.settings = settings

    def _attr(self, path: str) -> Attr:
        attr = super()._attr(path)
        if not stat.S_ISREG(attr.mode):
            return attr
        return attr._replace(size_bytes=os.fstat(self.fd).st_size)

    def open(self, inode: Inode, flags: int) -> Opened:
        opened = super().open(inode, flags)
        return opened._replace(backing_fd=self.fd) if self.settings.get("passed") else opened

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | None:
        if self.settings.get("crash") == "read":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)  # whichever thread took the signal, no answer comes
        data = Data((os.pread(self.fd, size, offset),))
        if not self.settings.get("slow_s"):
            return data
        threading.Timer(self.settings["slow_s"], later().data, [data]).start()
        return None


def main() -> int:
    directory, settings = sys.argv[1], json.loads(sys.argv[2])
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # the test's end is ours

    def build() -> FileTree:
        if settings.get("crash") == "build":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(settings.get("build_s", 0))
        if settings.get("crash") == "refuse":
            raise NotFoundError("no such checkpoint; check the name")
        return FileTree(settings)

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        supervise(
            build,
            directory,
            MountOptions(on_fault=lambda text: say(f"fault: {text}"), **settings["options"]),
            limits=RestartLimits(**settings.get("limits", {})),
            on_ready=lambda: say("ready"),
            on_death=lambda pid: say(f"dead {pid}"),
        )
    except BootseerError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    say("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
