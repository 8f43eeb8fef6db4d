"""Background fill: the rest of an image into the node cache, when nothing else wants the link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.blocks.cache import NodeCache
from bootseer.blocks.cached import CachedObject
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import BlockSource, block_count, block_length

STEP_BYTES = 4 << 20
FAULTS = 5  # steps in a row that failed, before it rests
REST_S = 30.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSettings:
    """`rate_bytes_s` bounds the fill (0 = as fast as it can); it waits `quiet_s` after a read."""

    rate_bytes_s: int = 0
    quiet_s: float = 2.0


class Fill:
    """Fetches what the cache lacks, from front to back; `busy` counts programs' reads."""

    def __init__(
        self,
        fetcher: Fetcher,
        source: BlockSource,
        cache: NodeCache,
        settings: FillSettings,
        *,
        busy: Callable[[], int],
    ) -> None:
        self._fetcher, self._source, self._cache = fetcher, source, cache
        self._settings, self._busy = settings, busy
        self._closing = threading.Event()
        self._seen = -1  # reads, as of the last look
        self.done = threading.Event()
        self.filled_bytes = 0

    def run(self, say: Callable[[str], None]) -> None:
        """Until all blocks are there, the cache takes no more, or `close`; tells why it rests."""
        with self._cache.open(self._source) as cached:
            room = max(1, STEP_BYTES // self._source.block_bytes)
            first, faults, refused = 0, 0, 0
            before: list[int] = []
            count = block_count(self._source)
            while first < count and not self._closing.is_set():
                # What is fetched and finds no place would be fetched for nothing.
                kept = len(cached.missing(before[0], len(before))) < len(before) if before else True
                refused = 0 if kept else refused + 1
                if not cached.storing or refused == FAULTS:
                    say("filling the cache ends: it takes no more of this image")
                    return
                before = []
                missing = cached.missing(first, min(1024, count - first))
                if not missing:
                    first += 1024
                    continue
                first = missing[0]
                run = _run_of(missing, room)
                if not self.quiet():
                    return
                if self._step(run):
                    first, faults, before = run[-1] + 1, 0, run
                    continue
                faults += 1
                if faults == FAULTS:
                    say(f"filling the cache rests: {FAULTS} requests in a row failed")
                if self._closing.wait(REST_S if faults >= FAULTS else POLL_S * faults):
                    return
            # What came last is stored a moment after it came.
            if not self._closing.wait(POLL_S) and not _missing(cached, count):
                self.done.set()

    def quiet(self) -> bool:
        """Wait until programs have read nothing for a while; False when closed."""
        while (seen := self._busy()) != self._seen:
            self._seen = seen
            if self._closing.wait(self._settings.quiet_s):
                return False
        return not self._closing.is_set()

    def _step(self, blocks: list[int]) -> bool:
        source = self._source
        offset = blocks[0] * source.block_bytes
        length = sum(block_length(source, index) for index in blocks)
        began_s = time.monotonic()
        ticket = self._fetcher.prefetch(source, offset, length, Priority.BACKGROUND)
        while not ticket.done:
            ticket.wait(POLL_S)
            if self._closing.is_set():
                ticket.cancel()
                return False
        if not ticket.wait(0):
            return False
        self.filled_bytes += length
        if self._settings.rate_bytes_s:
            due_s = began_s + length / self._settings.rate_bytes_s
            self._closing.wait(max(0.0, due_s - time.monotonic()))
        return True

    def close(self) -> None:
        """End soon; twice is safe."""
        self._closing.set()


def _missing(cached: CachedObject, count: int) -> bool:
    return any(cached.missing(at, min(1024, count - at)) for at in range(0, count, 1024))


def _run_of(missing: list[int], room: int) -> list[int]:
    """The first blocks that stand side by side, `room` at most."""
    run = missing[:1]
    for index in missing[1:room]:
        if index != run[-1] + 1:
            break
        run.append(index)
    return run
