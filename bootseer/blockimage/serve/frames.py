"""Hot pages in memory: frames that arrive one behind the other, and who waits for them.

A frame is *coming* until it arrives, then *here*, and *gone* when it was dropped, or will never
come. What is gone is read as any other block of the image. All methods may be called from any
thread; those who waited are answered outside the lock.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bootseer.blockimage.pack_format import Index

FAR_BYTES = 8 << 20
"""A frame that lies further down the stream is not waited for: a request of its own is quicker."""

Resume = Callable[[], None]


class Hot(NamedTuple):
    """Bytes that are here."""

    view: memoryview


class Coming(NamedTuple):
    """Bytes that will be here soon, with this frame."""

    frame: int


class Cold(NamedTuple):
    """Bytes `[offset, offset + length)` that no frame has."""

    offset: int
    length: int


class Frames:
    """The frames of one pack. `memory_bytes` bounds what is here and not dropped yet."""

    def __init__(self, index: Index, *, memory_bytes: int, far_bytes: int = FAR_BYTES) -> None:
        rows = []
        for number, frame in enumerate(index.frames):
            at = 0
            for offset, length in frame.extents:
                rows.append((offset, offset + length, number, at))
                at += length
        rows.sort()
        self._starts = [row[0] for row in rows]
        self._rows = rows
        self._behind = [frame.offset + frame.stored_length for frame in index.frames]
        self._data: list[memoryview | None] = [None] * len(index.frames)
        self._coming = bytearray(b"\1" * len(index.frames))
        self._waiting: dict[int, list[Resume]] = {}
        self._warmed: deque[int] = deque()
        self._changed = threading.Condition()
        self._memory_bytes, self._far_bytes = memory_bytes, far_bytes
        self._held_bytes = 0
        self._received_bytes = 0
        self._stands_still = self._closed = False

    def covers(self, offset: int, length: int) -> bool:
        """Whether all of a range is hot, here or not."""
        end = offset + length
        while offset < end:
            at = bisect_right(self._starts, offset) - 1
            if at < 0 or self._rows[at][1] <= offset:
                return False
            offset = self._rows[at][1]
        return True

    def pieces(self, offset: int, length: int) -> list[Hot | Cold] | Coming:
        """What a range is made of; or the first frame that is to be waited for."""
        out: list[Hot | Cold] = []
        starts, rows, end = self._starts, self._rows, offset + length
        while offset < end:
            at = bisect_right(starts, offset) - 1
            stop, number = end, -1
            if at >= 0 and offset < rows[at][1]:
                start, behind, number, base = rows[at]
                stop = min(end, behind)
                data = self._data[number]
                if data is not None:
                    base += offset - start
                    out.append(Hot(data[base : base + stop - offset]))
                    offset = stop
                    continue
                if self._coming[number] and not (self._stands_still or self._far(number)):
                    return Coming(number)
            elif at + 1 < len(starts):
                stop = min(end, starts[at + 1])
            last = out[-1] if out else None
            if isinstance(last, Cold):  # neighbours in two frames that are gone
                out[-1] = Cold(last.offset, stop - last.offset)
            else:
                out.append(Cold(offset, stop - offset))
            offset = stop
        return out

    def _far(self, number: int) -> bool:
        return self._behind[number] - self._received_bytes > self._far_bytes

    def wait(self, number: int, resume: Resume) -> bool:
        """Have `resume` called when a frame is here or gone; False when it is so already."""
        with self._changed:
            if not self._coming[number]:
                return False
            self._waiting.setdefault(number, []).append(resume)
            return True

    def arrived(self, number: int, data: bytes | memoryview) -> None:
        """A frame's raw bytes, verified. Answers who waited, in this thread."""
        with self._changed:
            if not self._coming[number]:
                return
            self._data[number] = memoryview(data)
            self._held_bytes += len(data)
            self._received_bytes = self._behind[number]
            self._stands_still = False
        self._settle(number)

    def stand_still(self) -> None:
        """Nothing arrives at present: until something does, no read should wait for it."""
        with self._changed:
            self._stands_still = True
            waiting = [one for some in self._waiting.values() for one in some]
            self._waiting.clear()
        for resume in waiting:
            resume()

    def drop(self, number: int) -> None:
        """Free a frame's memory: its bytes are in the page cache, or will never come."""
        with self._changed:
            data, self._data[number] = self._data[number], None
            if data is not None:
                self._held_bytes -= len(data)
            self._changed.notify_all()
        self._settle(number)

    def warmed(self, number: int) -> None:
        """The kernel was asked to read a frame's pages ahead: it may go when memory is wanted.

        Those reads come later than the telling returns, so a frame stays as long as there is room.
        """
        with self._changed:
            self._warmed.append(number)
            spare = []
            held_bytes = self._held_bytes
            while self._warmed and held_bytes > self._memory_bytes // 2:
                oldest = self._warmed.popleft()
                data = self._data[oldest]
                held_bytes -= len(data) if data is not None else 0
                spare.append(oldest)
        for one in spare:
            self.drop(one)

    def drop_warmed(self) -> None:
        """Free every warmed frame's memory."""
        with self._changed:
            spare = list(self._warmed)
            self._warmed.clear()
        for one in spare:
            self.drop(one)

    def _settle(self, number: int) -> None:
        with self._changed:
            self._coming[number] = 0
            waiting = self._waiting.pop(number, ())
        for resume in waiting:
            resume()

    def has_room(self, timeout_s: float) -> bool:
        """Wait until there is memory for another frame; False when the time is over, or closed."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or self._held_bytes < self._memory_bytes, timeout_s
            )

    def give_up(self) -> None:
        """No further frame will come; twice is safe."""
        for number, coming in enumerate(bytes(self._coming)):
            if coming:
                self.drop(number)

    def close(self) -> None:
        """Nobody waits for anything any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.give_up()
