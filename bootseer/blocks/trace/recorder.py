"""Recording a start's touches as they happen, at next to no cost for the reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from bootseer.blocks.extents import PAGE_BYTES
from bootseer.blocks.trace.trace_file import LIMITS, NEAR_MS, Touched, Trace

WINDOW_S = 120.0  # a start with a later first step is recorded up to here
_SEGMENT_PAGES = 4096


class Recorder:
    """First touches of one object, page by page, until `end` or until its window is over.

    The window lasts `window_s` from the first touch on, because a program may begin to read long
    after its recorder was made. `touch` is for a program's own reads, not for read-ahead, replay
    and filling. Memory is one byte a page around touched pages, and the touches themselves, of
    which `most_extents` are kept. A recorder that continues another, made `elapsed_s` ago, counts
    from the same moment.
    """

    def __init__(
        self,
        object_name: str,
        size_bytes: int,
        workload: str = "",
        *,
        window_s: float = WINDOW_S,
        page_bytes: int = PAGE_BYTES,
        most_extents: int = LIMITS.extents,
        clock: Callable[[], float] = time.monotonic,
        elapsed_s: float = 0.0,
    ) -> None:
        self._object_name, self._workload = object_name, workload
        self._page_bytes, self._size_bytes = page_bytes, size_bytes
        self._most_extents = most_extents
        self._clock = clock
        self._made_s = clock() - elapsed_s
        self._first_s: float | None = None
        self._window_s = window_s
        self.recording = True  # whether `touch` still does something
        self._begun_or_ended = threading.Event()
        self._lock = threading.Lock()
        self._segments: dict[int, bytearray] = {}
        self._touches: list[list[int]] = []  # first page, page count, milliseconds

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first touch, or for `end`; False when neither came."""
        return self._begun_or_ended.wait(timeout_s)

    def left_s(self) -> float:
        """How much of the window is left: all of it until something is touched."""
        first_s = self._first_s
        return self._window_s - (self._clock() - first_s if first_s is not None else 0.0)

    def touch(self, offset: int, length: int) -> None:
        """A program read these bytes; from any thread, often."""
        if not self.recording:
            return
        end = min(offset + length, self._size_bytes)
        if end <= offset or offset < 0:
            return
        first, last = offset // self._page_bytes, (end - 1) // self._page_bytes
        now_s = self._clock()
        with self._lock:
            if self._first_s is None:
                self._begin(now_s)
            over = self._first_s is not None and now_s - self._first_s > self._window_s
            if over or len(self._touches) >= self._most_extents:
                self.recording = False
            else:
                self._mark(first, last + 1, int((now_s - self._made_s) * 1000))

    def _begin(self, now_s: float) -> None:
        self._first_s = now_s
        self._begun_or_ended.set()

    def _mark(self, page: int, stop: int, at_ms: int) -> None:
        """Note those pages of `[page, stop)` that were not touched before."""
        while page < stop:
            number, start = divmod(page, _SEGMENT_PAGES)
            segment = self._segments.get(number)
            if segment is None:
                segment = self._segments[number] = bytearray(_SEGMENT_PAGES)
            limit = min(_SEGMENT_PAGES, start + stop - page)
            new = segment.find(0, start, limit)
            if new < 0:
                page += limit - start
                continue
            known = segment.find(1, new, limit)
            behind = limit if known < 0 else known
            segment[new:behind] = b"\x01" * (behind - new)
            self._add(number * _SEGMENT_PAGES + new, behind - new, at_ms)
            page += behind - start

    def _add(self, first: int, count: int, at_ms: int) -> None:
        if self._touches:
            last = self._touches[-1]
            if last[0] + last[1] == first and at_ms - last[2] <= NEAR_MS:
                last[1] += count
                return
        self._touches.append([first, count, at_ms])

    def since(self, number: int) -> list[tuple[int, int, int]]:
        """Touches from the `number`-th on: first page, pages, milliseconds. The last may grow."""
        with self._lock:
            return [(first, count, at_ms) for first, count, at_ms in self._touches[number:]]

    def restore(self, touches: Iterable[tuple[int, int, int]]) -> None:
        """Begin with touches from another recorder's `since`, without pages outside the object."""
        pages = -(-self._size_bytes // self._page_bytes)
        with self._lock:
            for first, count, at_ms in touches:
                if self._first_s is None:
                    self._begin(self._made_s + at_ms / 1000)
                if len(self._touches) < self._most_extents:
                    self._mark(first, min(first + count, pages), at_ms)

    def end(self) -> None:
        """Stop recording, for example at the first step; twice is safe."""
        self.recording = False
        self._begun_or_ended.set()

    def trace(self, *, full: bool) -> Trace:
        """What was touched so far.

        `full`: this start was a cold one to which nothing was replayed, so it shows also what a
        start does not touch.
        """
        page_bytes, size_bytes = self._page_bytes, self._size_bytes
        with self._lock:  # threads come a little out of order; a trace is sorted as a merged one
            touches = sorted((at_ms, first, count) for first, count, at_ms in self._touches)
        extents = []
        for at_ms, first, count in touches:
            offset = first * page_bytes
            length = min(count * page_bytes, size_bytes - offset)
            extents.append(Touched(offset, length, at_ms, int(full), int(not full)))
        counts = {"starts": int(full), "replays": int(not full)}
        return Trace(
            self._object_name,
            size_bytes,
            self._workload,
            extents=tuple(extents),
            page_bytes=page_bytes,
            **counts,
        )
