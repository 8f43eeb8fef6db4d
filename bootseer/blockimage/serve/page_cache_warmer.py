"""Warming: reading hot ranges ahead through the mounted image, so that its page cache has them.

The reads of these threads are answered from frames in memory. Files are opened below a private
copy of the mount: an unmount does not fail because the image is busy.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Self

from bootseer.blockimage.pack_format import Index
from bootseer.system.mount_calls import (
    ATTR_NODEV,
    BENEATH,
    NO_MOUNTS,
    NO_SYMLINKS,
    change_tree,
    clone_tree,
    open_in,
)
from bootseer.system.regular_files import reopen_to_read

THREADS = 2
WINDOW_BYTES = 128 << 10  # the most that the kernel reads ahead at one request
MOST_OPEN = 256
MOST_WARM = 64  # times a frame's bytes: files with equal content share them


def clone_mount(path: str) -> int:
    """A descriptor of a private, unattached copy of the mount at `path`; raises OSError.

    Its device nodes cannot be opened: opening alone makes some devices do something.
    """
    root = clone_tree(path)
    try:
        change_tree(root, add=ATTR_NODEV)
    except BaseException:  # the caller never gets it to close
        os.close(root)
        raise
    return root


def open_below(root: int, path: bytes) -> int:
    """Open a file to be read, never leaving the tree, its mount, nor following a link.

    Raises OSError. In a tree that another user can change, use `open_regular_below`.
    """
    return _open(root, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def open_regular_below(root: int, path: bytes) -> int:
    """`open_below` that opens nothing but regular files; raises OSError."""
    place = _open(root, path, os.O_PATH | os.O_CLOEXEC)  # which does nothing to a device or pipe
    try:
        return reopen_to_read(place, path)
    finally:
        os.close(place)


def _open(root: int, path: bytes, flags: int) -> int:
    return open_in(root, path, flags, NO_MOUNTS | NO_SYMLINKS | BENEATH)


class Warmer:
    """Threads that warm frames in the order in which `put` names them.

    `warmed(frame)` is called for each one when that is done, or could not be. `root` is a
    descriptor of the tree, which the warmer closes at its end. `close` is safe twice. `thread_ids`
    are there after `start`.
    """

    def __init__(
        self,
        root: int,
        index: Index,
        warmed: Callable[[int], None],
        *,
        threads: int = THREADS,
        finished: Callable[[], None] | None = None,
    ) -> None:
        self._root, self._index, self._warmed = root, index, warmed
        self._finished = finished
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}
        self._in_use: dict[int, int] = {}
        self._thread_count = self._living = threads
        self._closed = False
        self.thread_ids: frozenset[int] = frozenset()

    def start(self) -> Self:
        """Start the threads; returns when each of them has its id."""
        ready = threading.Barrier(self._thread_count + 1)
        threads = [
            threading.Thread(target=self._run, args=(ready,), name=f"warm-{number}", daemon=True)
            for number in range(self._thread_count)
        ]
        for thread in threads:
            thread.start()
        ready.wait()
        self.thread_ids = frozenset(thread.native_id or 0 for thread in threads)
        return self

    def put(self, frame: int) -> None:
        """This frame is here: its ranges can be warmed."""
        self._todo.put(frame)

    def end(self) -> None:
        """No further frame will come; the threads end when all is done."""
        for _ in range(self._thread_count):
            self._todo.put(None)

    def close(self) -> None:
        """End at once, without warming the frames that are left."""
        self._closed = True
        self.end()

    def _run(self, ready: threading.Barrier) -> None:
        ready.wait()
        try:
            while (number := self._todo.get()) is not None:
                if not self._closed:
                    self._warm(number)
                self._warmed(number)
        finally:
            with self._lock:
                self._living -= 1
                last = self._living == 0
                files = list(self._files.values()) if last else []
                self._files = {} if last else self._files
            for fd in files:
                os.close(fd)
            if last:
                os.close(self._root)
                if self._finished is not None:
                    self._finished()

    def _warm(self, number: int) -> None:
        frame = self._index.frames[number]
        left = MOST_WARM * frame.raw_bytes
        for path, offset, length in frame.warm:
            left -= length
            if self._closed or left < 0:
                return
            # A file that cannot be opened is read when a program asks for it, as without us.
            with contextlib.suppress(OSError):
                fd = self._open(path)
                try:
                    for at in range(offset, offset + length, WINDOW_BYTES):
                        window = min(WINDOW_BYTES, offset + length - at)
                        os.posix_fadvise(fd, at, window, os.POSIX_FADV_WILLNEED)
                finally:
                    self._done(path)

    def _open(self, path: int) -> int:
        """A file's descriptor, kept for the next range of it."""
        with self._lock:
            fd = self._files.get(path, -1)
            if fd >= 0:
                self._in_use[path] = self._in_use.get(path, 0) + 1
                return fd
        fresh = open_below(self._root, self._index.paths[path])
        spare = []
        with self._lock:
            fd = self._files.setdefault(path, fresh)
            self._in_use[path] = self._in_use.get(path, 0) + 1
            if fd != fresh:
                spare.append(fresh)
            if len(self._files) > MOST_OPEN:
                idle = [p for p in self._files if not self._in_use.get(p)]
                spare += [self._files.pop(p) for p in idle[: MOST_OPEN // 2]]
        for one in spare:
            os.close(one)
        return fd

    def _done(self, path: int) -> None:
        with self._lock:
            self._in_use[path] = self._in_use.get(path, 1) - 1
            if not self._in_use[path]:
                del self._in_use[path]
