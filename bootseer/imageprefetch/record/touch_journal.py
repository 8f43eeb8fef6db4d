"""The touches of a start so far, saved in small steps for a worker that takes over.

A file in the server's folder: a header with the time when the recording began, by both clocks,
then a row for each touch. It exists as long as the recording runs. Touches of the last moment
before a crash are lost, and a torn row with them, so the start then counts as incomplete.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootseer.blocks.trace.recorder import Recorder

SAVE_S = 0.25
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"BSTOUCH\x01"
_ROW = struct.Struct("<QQI")
_MOST_BYTES = 64 << 20


class TouchJournal:
    """The file of one recording. Nothing raises: a full disk only ends the writing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._saved = 0
        self._last: tuple[int, int, int] | None = None
        self.begun_ns = self._begun_mono_ns = 0

    @property
    def elapsed_s(self) -> float:
        """How long ago the recording began."""
        return (time.monotonic_ns() - self._begun_mono_ns) / 1e9

    def create(self) -> None:
        """Begin a recording."""
        self.begun_ns, self._begun_mono_ns = time.time_ns(), time.monotonic_ns()
        with contextlib.suppress(OSError):
            self._fd = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
        self._write(_HEADER.pack(_MAGIC, self.begun_ns, self._begun_mono_ns))

    def resume(self) -> list[tuple[int, int, int]] | None:
        """Continue a recording; its touches as `Recorder.restore` takes them, None without any."""
        try:
            with open(self._path, "rb") as file:
                data = file.read(_MOST_BYTES)
            magic, self.begun_ns, self._begun_mono_ns = _HEADER.unpack_from(data)
            if magic != _MAGIC or self.elapsed_s < 0:
                return None
            end = len(data) - (len(data) - _HEADER.size) % _ROW.size
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
        except (OSError, struct.error):
            return None
        return list(_ROW.iter_unpack(data[_HEADER.size : end]))

    def save(self, recorder: Recorder) -> None:
        """Write the touches since the last time."""
        if self._fd < 0:
            return
        at = max(0, self._saved - 1)  # the last row may have grown; it may be written twice
        rows = recorder.since(at)
        if rows and (len(rows) > 1 or rows[0] != self._last):
            self._write(b"".join(_pack(rows)))
            self._saved, self._last = at + len(rows), rows[-1]

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            if os.write(self._fd, data) == len(data):
                return
        except OSError:
            pass
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """The recording is over; twice is safe."""
        self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def _pack(rows: list[tuple[int, int, int]]) -> Iterator[bytes]:
    for first, count, at_ms in rows:
        yield _ROW.pack(first, count, min(at_ms, 0xFFFFFFFF))
