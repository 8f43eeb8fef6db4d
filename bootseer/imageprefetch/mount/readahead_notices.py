"""Notices to a server behind a loop device about what other processes read ahead of its image.

Such a server sees the loop device's thread instead of the reader. So a process that reads ahead
first appends the ranges of the data to the file `ahead` in the server's folder: an offset and a
length of eight bytes each, little-endian.
"""

from __future__ import annotations

import contextlib
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable

from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.server_registry import ServerRecord

_ROW = struct.Struct("<QQ")


def announce_readahead(server: ServerRecord, ranges: Iterable[tuple[int, int]]) -> None:
    """Note that `(offset, length)` ranges of a server's data are read ahead from now on.

    A server without a loop device sees its readers and needs no notice. Nothing raises: at worst
    the reads count as touches.
    """
    if not server.loop or server.sealed:
        return
    rows = b"".join(_ROW.pack(start, end - start) for start, end in _join(ranges))
    path = os.path.join(server.state, server_registry.AHEAD)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "wb", 0) as file:
        file.write(rows)


class ReadaheadNotices:
    """The notices in a server's folder, read as they come."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, server_registry.AHEAD)
        self._size_bytes = 0
        self._joined: tuple[list[int], list[int]] = ([], [])

    def covers(self, offset: int, length: int) -> bool:
        """Whether a notice covers all of a range; from any thread."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_size != self._size_bytes:
                self._load()
        starts, ends = self._joined
        at = bisect_right(starts, offset) - 1
        return at >= 0 and offset + length <= ends[at]

    def _load(self) -> None:
        with open(self._path, "rb") as file:
            data = file.read()
        whole = data[: len(data) // _ROW.size * _ROW.size]  # the last row may be incomplete
        joined = _join(_ROW.iter_unpack(whole))
        self._joined = ([start for start, _ in joined], [end for _, end in joined])
        self._size_bytes = len(data)


def _join(ranges: Iterable[tuple[int, ...]]) -> list[tuple[int, int]]:
    """`(start, end)` of all ranges `(offset, length)`, sorted, adjacent ones joined."""
    out: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if out and offset <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], offset + length))
        else:
            out.append((offset, offset + length))
    return out
