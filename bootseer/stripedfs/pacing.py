"""Whether a copy moves, for a caller with another way to the same bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from bootseer.blocks.cutting import Range
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.settings import Priority

LEAST_BYTES = 64 << 10
"""A store that gives less in the time that it is allowed stands still, or as good as that."""


class PacedFetcher(Fetcher):
    """Knows whether somebody waits for its bytes."""

    waiting = 0
    _counting = threading.Lock()

    def read_many(
        self,
        jobs: Sequence[Range],
        *,
        priority: Priority = Priority.DEMAND,
        deadline_s: float | None = None,
    ) -> list[int]:
        """See `Fetcher.read_many`."""
        with self._counting:
            self.waiting += 1
        try:
            return super().read_many(jobs, priority=priority, deadline_s=deadline_s)
        finally:
            with self._counting:
                self.waiting -= 1


class Pace:
    """The `Progress` of a copy that is given up once its store brings next to nothing.

    That is less than LEAST_BYTES in `limit_s`, while the copy waits for it. What takes its time
    on this machine, such as a slow disk, is not the store's fault.
    """

    def __init__(self, fetcher: PacedFetcher, limit_s: float) -> None:
        self._fetcher, self._limit_s = fetcher, limit_s
        self._looked_up = False
        self._since_s, self._had = time.monotonic(), 0

    def expect(self, size_bytes: int) -> None:
        """It is known what is to be copied: from now on only the fetcher asks the store."""
        self._looked_up = True

    def advance(self, size_bytes: int) -> None: ...

    def end_s(self) -> float:
        """When to give up, on the monotonic clock, as things are now."""
        now_s, had = time.monotonic(), self._fetcher.received_bytes
        waits = not self._looked_up or self._fetcher.waiting > 0
        if not waits or had - self._had >= LEAST_BYTES:
            self._since_s, self._had = now_s, had
        return self._since_s + self._limit_s
