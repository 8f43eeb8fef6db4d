"""Reading an open file back from its medium, whatever the page cache holds of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Self

from bootseer.context_managers import Closing
from bootseer.system.libc import libc
from bootseer.system.regular_files import read_fully

_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000
_STATX_BYTES = 256
_MASK = struct.Struct("=I")
_ALIGNMENTS = struct.Struct("=152xII")  # of memory and of offsets, in bytes


class Medium(Closing):
    """The file of `fd`, which stays the caller's, in pieces of `most_bytes` at the most.

    It can be read once entered, which raises the OSError of mapping that much memory.

    Where the kernel says that it has direct I/O for this very file (Linux 6.1; ext4, XFS), the
    page cache has no part in it and keeps its pages. Elsewhere these are dropped first. That is
    second best: read back step by step they come as single pages, of which every later reader
    copies at a fraction of the speed that it has with the large ones of a long write or read.
    """

    def __init__(self, fd: int, most_bytes: int) -> None:
        self._fd, self._most_bytes = fd, most_bytes
        self._unit_bytes = mmap.PAGESIZE
        self._room = memoryview(b"")
        self._direct_fd = -1

    def __enter__(self) -> Self:
        self._room = memoryview(mmap.mmap(-1, self._rounded(self._most_bytes)))
        memory_bytes, offset_bytes = direct_alignments(self._fd)
        if 0 < max(memory_bytes, offset_bytes) <= self._unit_bytes:
            try:
                self._direct_fd = os.open(
                    f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
                )
            except OSError:  # no /proc, or no descriptor to spare
                self._direct_fd = -1
        return self

    def _rounded(self, length: int) -> int:
        return -(-length // self._unit_bytes) * self._unit_bytes

    def read(self, offset: int, length: int) -> memoryview | None:
        """Bytes that hold until the next read; None where the file ends before. Raises OSError."""
        room = self._room[:length]
        if self._direct_fd >= 0 and offset % self._unit_bytes == 0:
            whole = self._room[: self._rounded(length)]
            try:
                if os.preadv(self._direct_fd, [whole], offset) >= length:
                    return room
            except OSError:
                pass  # the other way says what is wrong, or gets along
        os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)
        return room if read_fully(self._fd, room, offset) == length else None

    def close(self) -> None:
        direct_fd, self._direct_fd = self._direct_fd, -1
        if direct_fd >= 0:
            os.close(direct_fd)


def direct_alignments(fd: int) -> tuple[int, int]:
    """What direct I/O on an open file asks of memory and offsets; zeros where there is none.

    A file system may accept O_DIRECT and go by the page cache all the same (encrypted, compressed
    or journalled data), but then it does not say so here.
    """
    about = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        statx = libc().statx
    except AttributeError:  # a C library older than the call
        return 0, 0
    if statx(ctypes.c_int(fd), b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, about):
        return 0, 0
    (mask,) = _MASK.unpack_from(about)
    if not mask & _STATX_DIOALIGN:
        return 0, 0
    memory_bytes, offset_bytes = _ALIGNMENTS.unpack_from(about)
    return memory_bytes, offset_bytes
