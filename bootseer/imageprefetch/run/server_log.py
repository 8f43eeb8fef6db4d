"""Reporting the faults of an image's server to those whose containers run on the image.

All containers of an image on a node share one server, whichever mount started it; it writes its
faults to a file (`mount_events.FaultLog`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator

from bootseer.imageprefetch.mount.server_registry import FAULTS
from bootseer.reporting import Once
from bootseer.system.regular_files import open_to_read

POLL_S = 0.2


@contextlib.contextmanager
def follow_faults(state: str, ref: str, complain: Callable[[str], None]) -> Iterator[None]:
    """Report each kind of fault that the server with the folder `state` meets within the block.

    An agent of an earlier version names no folder ("").
    """
    if not state:
        yield
        return
    follower = LogFollower(os.path.join(state, FAULTS), ref, complain)
    follower.start()
    try:
        yield
    finally:
        follower.stop()


class LogFollower:
    """Reports each kind of fault that is added to a server's file of faults, for the image `ref`.

    What the file holds before `start` is about other containers, or was reported with the mount; a
    fault that lasts is written again. Nothing raises: a file that cannot be read has no faults.
    """

    def __init__(self, path: str, ref: str, complain: Callable[[str], None]) -> None:
        self._path, self._ref, self._complain = path, ref, complain
        self._fd, self._at, self._rest = -1, 0, b""
        self._passed_on = Once()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="image-log", daemon=True)

    def start(self) -> None:
        """Follow the file from its present end."""
        try:  # held open: the server removes it at its end, and its last lines count
            self._fd = open_to_read(self._path)
            self._at = os.fstat(self._fd).st_size
        except OSError:
            pass
        try:
            self._thread.start()
        except RuntimeError:  # there is no thread to be had
            self._close()
            raise

    def stop(self) -> None:
        """Report what was added since the last look, and end."""
        self._over.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _follow(self) -> None:
        while not self._over.wait(POLL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        if self._fd < 0:
            return
        try:
            size = os.fstat(self._fd).st_size
            if size < self._at:  # the server cut it because it was long
                self._at, self._rest = 0, b""
            data = os.pread(self._fd, size - self._at, self._at)
        except OSError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._report(line)

    def _report(self, line: bytes) -> None:
        try:
            kind, text = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return
        if isinstance(kind, str) and self._passed_on.is_new(kind):
            self._complain(f"{self._ref}: {text}")
