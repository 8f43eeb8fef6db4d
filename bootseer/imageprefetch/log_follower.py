"""Following the log of an image's server while a container runs on the image."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

POLL_S = 0.2


class LogFollower:
    """Passes on the lines that a log gains about the image `ref`, without their times.

    What the log held before `start` was reported with the mount. Nothing here raises: a log that
    cannot be read says nothing.
    """

    def __init__(self, path: str, ref: str, complain: Callable[[str], None]) -> None:
        self._path, self._ref, self._complain = path, ref.encode(), complain
        self._at, self._rest = 0, b""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="image-log", daemon=True)

    def start(self) -> None:
        """Follow the log from its present end."""
        try:
            self._at = os.stat(self._path).st_size
        except OSError:
            pass
        self._thread.start()

    def stop(self) -> None:
        """Pass on what is there still, and end."""
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(POLL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.partition(b" ")[2]
            if text.startswith(self._ref + b": "):
                self._complain(text.decode(errors="replace"))
