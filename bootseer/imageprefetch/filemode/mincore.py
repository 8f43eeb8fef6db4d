"""Which pages of a file are in the page cache, by mincore(2).

cachestat(2) would need no mapping, but for a file on overlayfs, which most containers have, it
looks at the wrong cache and reports nothing; mincore sees the real one. The kernel answers only
processes that own a file, or may write to it; for others mincore reports every page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

from bootseer.blocks.extents import PAGE_BYTES, Extent
from bootseer.system.libc import last_error, libc
from bootseer.system.processes import CAP_FOWNER, has_capability

_PROT_READ, _MAP_PRIVATE = 1, 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_STEP_BYTES = 1 << 30
_ODD = bytes(value & 1 for value in range(256))


class ResidencyProbe:
    """Probes files for which the kernel answers this process; `owns_all`: for all of them."""

    def __init__(self) -> None:
        calls = map(libc().__getitem__, ("mmap", "munmap", "mincore"))
        self._mmap, self._munmap, self._mincore = calls
        self._mmap.restype = ctypes.c_void_p
        size, address = ctypes.c_size_t, ctypes.c_void_p
        self._mmap.argtypes = (
            address,
            size,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_longlong,
        )
        self._munmap.argtypes = (address, size)
        self._mincore.argtypes = (address, size, address)
        self._uid = os.geteuid()
        self.owns_all = has_capability(CAP_FOWNER)
        self._supported = mmap.PAGESIZE == PAGE_BYTES

    def may_probe(self, status: os.stat_result, path: str) -> bool:
        """Whether the kernel tells this process the truth about a file."""
        if not self._supported:
            return False
        if self.owns_all or status.st_uid == self._uid:
            return True
        try:
            return os.access(path, os.W_OK, effective_ids=True)
        except (OSError, NotImplementedError):
            return False

    def resident(self, fd: int, size_bytes: int) -> list[Extent]:
        """The pages of an open file that are in the page cache; the last one counts whole.

        Raises OSError where the file cannot be mapped.
        """
        out: list[Extent] = []
        for at in range(0, size_bytes, _STEP_BYTES):
            for extent in self._step(fd, at, min(_STEP_BYTES, size_bytes - at)):
                if out and out[-1].end == extent.offset:
                    out[-1] = Extent(out[-1].offset, out[-1].length + extent.length)
                else:
                    out.append(extent)
        return out

    def _step(self, fd: int, offset: int, length: int) -> list[Extent]:
        address = self._mmap(None, length, _PROT_READ, _MAP_PRIVATE, fd, offset)
        if address == _MAP_FAILED:
            raise last_error()
        try:
            pages = bytearray(-(-length // PAGE_BYTES))
            into = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
            if self._mincore(address, length, ctypes.addressof(into)):
                raise last_error()
            del into
        finally:
            self._munmap(address, length)
        return page_runs(bytes(pages).translate(_ODD), offset)


def page_runs(marks: bytes, offset: int) -> list[Extent]:
    """The extents of pages marked 1 instead of 0; the first mark is of the page at `offset`."""
    out = []
    at = marks.find(1)
    while at >= 0:
        end = marks.find(0, at)
        end = len(marks) if end < 0 else end
        out.append(Extent(offset + at * PAGE_BYTES, (end - at) * PAGE_BYTES))
        at = marks.find(1, end)
    return out


class FileState(NamedTuple):
    """A file at one moment: its identity, and which of its pages are in memory.

    `pages` is None where the kernel does not tell this process."""

    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    pages: tuple[Extent, ...] | None


def probe_file(probe: ResidencyProbe, path: str, *, evict: bool = False) -> FileState | None:
    """The state of a regular file; None for any other, an empty, or an unreadable one.

    With `evict` the kernel is first asked to drop its pages; it keeps those in use.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_size == 0:
            return None
        if evict:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = None
        if probe.may_probe(status, path):
            try:
                pages = tuple(probe.resident(fd, status.st_size))
            except OSError:
                pages = None
    finally:
        os.close(fd)
    return FileState(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, pages)
