"""Telling servers behind loop devices what of their image somebody reads ahead.

Such a server sees the loop device's thread, never whose read it is. So who reads ahead says first
which ranges of the data these are: `ahead` in the server's folder holds an offset and a length of
eight bytes each, little-endian, and grows with each replay.
"""

from __future__ import annotations

import contextlib
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable

from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.server_registry import Server

_ROW = struct.Struct("<QQ")


def announce(server: Server, ranges: Iterable[tuple[int, int]]) -> None:
    """Say that `(offset, length)` ranges of a server's data are read ahead from now on.

    One that sees its readers needs no word. Nothing raises: at worst the reads count as touches.
    """
    if not server.loop or server.sealed:
        return
    rows = b"".join(_ROW.pack(start, end - start) for start, end in _joined(ranges))
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(
            os.open(os.path.join(server.state, server_registry.AHEAD), flags, 0o600), "wb", 0
        ) as to:
            to.write(rows)


class Announced:
    """What was announced to the server with this folder, up to the moment of asking."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, server_registry.AHEAD)
        self._size_bytes = 0
        self._joined: tuple[list[int], list[int]] = ([], [])

    def covers(self, offset: int, length: int) -> bool:
        """Whether all of a range is read ahead; from any thread."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_size != self._size_bytes:
                self._load()
        starts, ends = self._joined
        at = bisect_right(starts, offset) - 1
        return at >= 0 and offset + length <= ends[at]

    def _load(self) -> None:
        with open(self._path, "rb") as file:
            data = file.read()
        whole = data[: len(data) // _ROW.size * _ROW.size]  # the last row may be half written
        joined = _joined(_ROW.iter_unpack(whole))
        self._joined = ([start for start, _ in joined], [end for _, end in joined])
        self._size_bytes = len(data)


def _joined(ranges: Iterable[tuple[int, ...]]) -> list[tuple[int, int]]:
    """`(start, end)` of all ranges `(offset, length)`, sorted, those that touch made one."""
    out: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if out and offset <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], offset + length))
        else:
            out.append((offset, offset + length))
    return out
