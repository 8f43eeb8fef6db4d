"""Where the bytes of an image's data file come from, and what its reads cost.

`Frames` holds the hot pages in memory: frames, which arrive one after the other, and the reads that
wait for them. A frame is *coming* until it arrives, then *here*, and *dropped* once its memory was
freed or it is known that it will never arrive. Bytes of a dropped frame are read like any other
block of the image; `Bytes` combines both ways.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bootseer.blockimage.pack_format import Index
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import BlockSource
from bootseer.light_dataclasses import dataclass

if TYPE_CHECKING:
    from bootseer.blocks.cache.direct_reads import DirectReads
    from bootseer.blocks.fetch.fetcher import Deliver, Fetcher, HeldBytes
    from bootseer.blocks.fetch.readahead import ReadAhead


FAR_BYTES = 8 << 20
"""A frame that lies further down the stream is not waited for: a request of its own is quicker."""
FITTING_MISSES = 16
"""Reads outside of a hot set, each that waits for its block counted twice. More of them show that
this start differs from those that the hot set was made of."""

Resume = Callable[[], None]


class Touches(Protocol):
    """Receives what programs read."""

    def touch(self, offset: int, length: int) -> None:
        """A program read these bytes of the data."""


@dataclass(slots=True)
class Reads:
    """What reads of the data file cost so far.

    `reads` of `bytes` are programs' own; `waits` of them found their bytes missing and waited
    `blocked_ns` together; `warm_reads` and `warm_bytes` are those of warming. `failed` got EIO.
    """

    reads: int = 0
    bytes: int = 0
    waits: int = 0
    blocked_ns: int = 0
    warm_reads: int = 0
    warm_bytes: int = 0
    failed: int = 0


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
    """The frames of one pack. `memory_bytes` bounds what is here and not dropped yet.

    All methods may be called from any thread; waiting reads are resumed outside the lock.
    """

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
            if isinstance(last, Cold):  # neighbours in two frames that were dropped
                out[-1] = Cold(last.offset, stop - last.offset)
            else:
                out.append(Cold(offset, stop - offset))
            offset = stop
        return out

    def _far(self, number: int) -> bool:
        return self._behind[number] - self._received_bytes > self._far_bytes

    def wait(self, number: int, resume: Resume) -> bool:
        """Have `resume` called when a frame is here or dropped; False when it is so already."""
        with self._changed:
            if not self._coming[number]:
                return False
            self._waiting.setdefault(number, []).append(resume)
            return True

    def add_frame(self, number: int, data: bytes | memoryview) -> None:
        """Take a frame's verified raw bytes; resumes the reads that wait for it, in this thread."""
        with self._changed:
            if not self._coming[number]:
                return
            self._data[number] = memoryview(data)
            self._held_bytes += len(data)
            self._received_bytes = self._behind[number]
            self._stands_still = False
        self._settle(number)

    def stand_still(self) -> None:
        """Let no read wait for a frame until something arrives again."""
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

    def note_warmed(self, number: int) -> None:
        """Note that the kernel was asked to read a frame's pages; it may be dropped for memory.

        The kernel's reads come after its call has returned, so a frame stays while there is room.
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
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.give_up()


class Bytes:
    """Where the data's bytes come from, once it is known: `frames` first, then `fetcher`.

    `opening` gives the fetcher and its source when they are first needed: the hot set may be
    under way before the block table is parsed. With `read_ahead`, blocks that follow sequential
    reads are fetched ahead; this begins by itself when programs read much that the hot set lacks.
    """

    def __init__(
        self, data_bytes: int, frames: Frames, opening: Callable[[], tuple[Fetcher, BlockSource]]
    ) -> None:
        self.data_bytes = data_bytes
        self.frames = frames
        self._opening = opening
        self._opened: tuple[Fetcher, BlockSource] | None = None
        self.read_ahead = False
        self.direct_reads: DirectReads | None = None  # of the node cache, once it is open
        self._ahead: ReadAhead | None = None
        self._missed = 0

    def hold(
        self, offset: int, length: int, deliver: Deliver, priority: Priority
    ) -> HeldBytes | None:
        """As `Fetcher.hold` for the data; also fetches ahead where that pays."""
        fetcher, source = self._open()
        if not self.read_ahead and priority is Priority.DEMAND:
            self._missed += 1
            self.read_ahead = self._missed > FITTING_MISSES
        if self.read_ahead:
            self._fetch_ahead(offset, length)
        held = fetcher.hold(source, offset, length, deliver, priority)
        if held is None and priority is Priority.DEMAND:
            self._missed += 1
        return held

    def read_cached(self, offset: int, length: int) -> memoryview | None:
        """Bytes that are verified in the node cache; they hold until this thread asks again."""
        direct_reads = self.direct_reads
        view = direct_reads.read(offset, length) if direct_reads is not None else None
        if view is not None and self.read_ahead and direct_reads and not direct_reads.marks.whole:
            self._fetch_ahead(offset, length)
        return view

    def _open(self) -> tuple[Fetcher, BlockSource]:
        if self._opened is None:
            self._opened = self._opening()
        return self._opened

    def _fetch_ahead(self, offset: int, length: int) -> None:
        fetcher, source = self._open()
        ahead = self._ahead
        if ahead is None:
            ahead = self._ahead = fetcher.read_ahead(source)
        for first, count in ahead.note(offset, length):
            fetcher.prefetch(source, first, count, Priority.HOT)
