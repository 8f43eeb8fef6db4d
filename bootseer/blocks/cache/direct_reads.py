"""Reads of a cached object's file past the fetcher: only of blocks that this process verified.

The fetcher hands out memory that other readers may wait for, through locks and callbacks: for a
block that is verified and in the page cache that costs many times what the read does. Here a read
is a look at a few marks and one `preadv` into memory of the reading thread.

**Why a mark may be believed.** A mark is set for a block whose bytes were compared with their
entry while no other process held the claim to it, and it counts as long as the object is pinned,
which each `DirectReads` does by itself. Eviction needs the object alone; `store` writes to no block
that has an entry, and takes bytes back from none that it has no claim to. So what was verified
stays as it is, but for what a disk spoils by itself: marks older than `MARK_LIFE_S` are dropped
when the object is opened next, and its blocks are verified again. Marks are of a process, so after
any stop, a clean one or not, every block is verified before its first use.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref

MARK_LIFE_S = 3600.0
BUFFER_BYTES = 1 << 20


class Marks:
    """Which blocks of one file were verified in this process; `whole` = all of them.

    They are read without the lock, which keeps a change from undoing another one of `whole`.
    """

    __slots__ = ("__weakref__", "_lock", "_since_s", "of_blocks", "whole")

    def __init__(self, blocks: int) -> None:
        self.of_blocks = bytearray(blocks)
        self.whole = False
        self._lock = threading.Lock()
        self._since_s = time.monotonic()

    def set(self, index: int) -> None:
        """A block was verified."""
        with self._lock:
            marks = self.of_blocks
            marks[index] = 1
            self.whole = 0 not in marks

    def drop(self, index: int) -> None:
        """A block is to be verified before it is used again."""
        with self._lock:
            self.whole = False
            self.of_blocks[index] = 0

    def expire(self) -> None:
        """Drop all marks when the first may be older than `MARK_LIFE_S`."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._since_s > MARK_LIFE_S:
                self._since_s, self.whole = now_s, False
                self.of_blocks[:] = bytes(len(self.of_blocks))


_known: weakref.WeakValueDictionary[tuple[int, int], Marks] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def marks_of(data_fd: int, blocks: int) -> Marks:
    """The marks of an open file, shared by all openings of that very file in this process.

    Keep them only as long as the object is pinned. Raises OSError.
    """
    status = os.fstat(data_fd)
    key = status.st_dev, status.st_ino
    with _lock:
        marks = _known.get(key)
        if marks is None or len(marks.of_blocks) != blocks:
            marks = _known[key] = Marks(blocks)
        return marks


def drop_mark(data_fd: int, index: int) -> None:
    """A block of an open file is to be verified before it is used again. Raises OSError."""
    status = os.fstat(data_fd)
    with _lock:
        marks = _known.get((status.st_dev, status.st_ino))
    if marks is not None:
        marks.drop(index)


def _reset_after_fork() -> None:
    """Begin without marks in a child: another thread may have been setting one."""
    global _lock
    _lock = threading.Lock()
    _known.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


class _Buffer(threading.local):
    """One thread's memory for the bytes of one read."""

    def __init__(self) -> None:
        self.view = _memory(BUFFER_BYTES)


def _memory(size_bytes: int) -> memoryview:
    """Belongs to one process: a forked child must not write into its parent's."""
    return memoryview(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


_buffer = _Buffer()


class DirectReads:
    """Pins an object and reads its file; the pin ends with the last reference to this.

    `present_fd` and `data_fd` are taken over. A thread that reads keeps the descriptors open by
    its own reference, so that no read can use a number that belongs to another file by then.
    """

    __slots__ = ("__weakref__", "_data_fd", "_present_fd", "block_bytes", "marks")

    def __init__(self, present_fd: int, data_fd: int, block_bytes: int, marks: Marks) -> None:
        self._present_fd, self._data_fd = present_fd, data_fd
        self.block_bytes, self.marks = block_bytes, marks
        # Not __del__, which runs while weak references still lead here: a thread that took one
        # then would read by descriptors that are closed. They are cleared before a finalizer runs.
        weakref.finalize(self, _close, data_fd, present_fd).atexit = False

    def read(self, offset: int, size: int) -> memoryview | None:
        """`size` bytes (at least one) from `offset` on; None where a block is not verified yet.

        The view holds until this thread reads the next time, from whatever object. The bytes must
        lie within the object.
        """
        # There may be 100,000 small reads a second: the cost of each line here can be measured.
        block_bytes, marks = self.block_bytes, self.marks
        if not marks.whole:
            first, end = offset // block_bytes, (offset + size - 1) // block_bytes + 1
            if marks.of_blocks.find(0, first, end) >= 0:
                return None
        view = _buffer.view
        if size != len(view):
            if size > len(view):
                view = _buffer.view = _memory(size)
            view = view[:size]
        try:
            return view if os.preadv(self._data_fd, (view,), offset) == size else None
        except OSError:  # a failing disk: the store has the bytes
            return None

    def is_of(self, data_fd: int) -> bool:
        """Whether an open file is the one that this reads. Raises OSError."""
        return os.path.sameopenfile(self._data_fd, data_fd)


def _close(data_fd: int, present_fd: int) -> None:
    os.close(data_fd)
    os.close(present_fd)  # the pin goes last
