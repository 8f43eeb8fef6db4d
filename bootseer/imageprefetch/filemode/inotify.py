"""Which files are opened, and in which order, by inotify(7): no privilege needed."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable

from bootseer.context_managers import Closing
from bootseer.imageprefetch.filemode.threads import start_without_signals
from bootseer.system.libc import last_error, libc
from bootseer.system.readiness import readable

_EVENT = struct.Struct("iIII")
_IN_OPEN, _IN_Q_OVERFLOW, _IN_ISDIR = 0x20, 0x4000, 0x40000000
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x01000000, 0x02000000
_READ_BYTES = 1 << 20


class OpenWatcher(Closing):
    """Notes the first opening of each file in the directories added; a context manager.

    `first_s` maps a path to the clock's time. `complete` becomes false at the kernel's limits: then
    some openings may be missing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.first_s: dict[str, float] = {}
        self.complete = True
        self._folders: dict[int, str] = {}
        self._fd = self._end_read = self._end_write = -1
        self._thread: threading.Thread | None = None

    def start(self) -> OpenWatcher:
        """Begin to watch; `add` directories then."""
        self._fd = libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._end_read, self._end_write = os.pipe2(os.O_CLOEXEC)
        if self._fd < 0:
            self.complete = False
        else:
            self._thread = threading.Thread(target=self._run, name="opens", daemon=True)
            start_without_signals(self._thread)
        return self

    def add(self, folder: str) -> None:
        """Watch a directory's own files from now on."""
        if self._fd < 0 or not self.complete:
            return
        mask = _IN_OPEN | _IN_ONLYDIR | _IN_DONT_FOLLOW
        watch = libc().inotify_add_watch(self._fd, os.fsencode(folder), mask)
        if watch >= 0:
            self._folders[watch] = folder
        elif last_error().errno == errno.ENOSPC:
            self.complete = False  # as many as this user may have

    def _run(self) -> None:
        while True:
            ready = readable(self._fd, self._end_read)
            if self._fd in ready:
                self._note(os.read(self._fd, _READ_BYTES))
            elif ready:
                return

    def _note(self, data: bytes) -> None:
        now_s = self._clock()
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                self.complete = False
            folder = self._folders.get(watch)
            if folder is not None and name and not mask & _IN_ISDIR:
                path = f"{folder.rstrip('/')}/{os.fsdecode(name)}"
                self.first_s.setdefault(path, now_s)

    def close(self) -> None:
        """Note what has happened up to now, and stop; twice is safe."""
        if self._thread is not None:
            os.write(self._end_write, b".")
            self._thread.join()
            self._thread = None
        for fd in (self._fd, self._end_read, self._end_write):
            if fd >= 0:
                os.close(fd)
        self._fd = self._end_read = self._end_write = -1

    def __enter__(self) -> OpenWatcher:
        return self.start()
