"""A hot set that is most of its image: its blocks fetched whole, in order and in parallel.

That is the quickest way as long as programs follow the order. For a program that does not, the link
and the processors would be busy with blocks that it does not need: as long as its reads differ from
what comes next, fetching pauses.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from bootseer.blocks.extents import Extent
from bootseer.blocks.source import BlockSource
from bootseer.blocks.trace.replay import Prefetcher, Replay
from bootseer.blocks.trace.trace_file import Touched, Trace

WINDOW_BYTES = 16 << 20
NEAR_BYTES = 64 << 20  # a read no further ahead than this follows the order
PAUSE_S = 0.25
_POLL_S = 0.005


class WholeFetch:
    """Fetches extents (whole blocks) ahead, in their order; `most_bytes` as `Replay` has it."""

    def __init__(
        self,
        fetcher: Prefetcher,
        source: BlockSource,
        extents: Sequence[Extent],
        *,
        most_bytes: int | None = None,
        near_bytes: int = NEAR_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        touched = tuple(Touched(e.offset, e.length, n, 1) for n, e in enumerate(extents))
        trace = Trace(source.key, source.size_bytes, "", 0, touched)
        self._replay = Replay(
            trace, fetcher, source, window_bytes=WINDOW_BYTES, most_bytes=most_bytes
        )
        before = itertools.accumulate((e.length for e in extents), initial=0)
        self._rows = sorted(
            (e.offset, e.length, at) for e, at in zip(extents, before, strict=False)
        )
        self._starts = [row[0] for row in self._rows]
        self._clock, self._near_bytes = clock, near_bytes
        self._strayed_s = float("-inf")
        self._closing = threading.Event()
        self._running = threading.Lock()

    @property
    def failed(self) -> str:
        """Why it ended early; "" when it did not."""
        return self._replay.failed

    def note_miss(self, offset: int) -> None:
        """Note that a program waits for this byte; quick, from any thread."""
        at = bisect.bisect_right(self._starts, offset) - 1
        if at >= 0:
            start, length, before = self._rows[at]
            ahead = before + offset - start - self._replay.replayed_bytes
            if offset < start + length and 0 <= ahead < self._near_bytes:
                return
        self._strayed_s = self._clock()

    @property
    def holds(self) -> bool:
        """Whether programs have just read something other than what comes next."""
        return self._clock() - self._strayed_s < PAUSE_S

    def run(self) -> None:
        """Fetch to the end, a fault, or `close`; from a thread of its own, once."""
        held = False
        with self._running:
            if self._closing.is_set():
                return
            with self._replay as replay:
                while not self._closing.is_set() and not replay.wait(_POLL_S):
                    if held != self.holds:
                        held = not held
                        (replay.pause if held else replay.resume)()

    def close(self) -> None:
        """End `run`, and wait until it has ended; twice is safe."""
        self._closing.set()
        with self._running:
            pass
