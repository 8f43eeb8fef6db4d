"""What the fetcher gives its callers: bytes held in memory, and prefetches under way."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from bootseer.blocks.fetch.records import Block, Waiter
from bootseer.blocks.fetch.scheduler import Scheduler


class HeldBytes:
    """Bytes in the fetcher's memory as `views`, readable until `release` is called."""

    __slots__ = ("_blocks", "_decision", "views")

    def __init__(
        self,
        decision: AbstractContextManager[Scheduler],
        blocks: list[Block],
        views: list[memoryview],
    ) -> None:
        self._decision, self._blocks, self.views = decision, blocks, views

    @classmethod
    def of(
        cls,
        decision: AbstractContextManager[Scheduler],
        blocks: list[Block],
        offset: int,
        length: int,
        block_bytes: int,
    ) -> HeldBytes:
        """A range of pinned blocks, which are its to unpin."""
        views = []
        for block in sorted(blocks, key=lambda b: b.index):
            begin = block.index * block_bytes
            start, stop = max(0, offset - begin), min(block.length, offset + length - begin)
            if block.slot is None:
                raise AssertionError("a pinned block lost its memory")
            views.append(block.slot.view[start:stop])
        return cls(decision, blocks, views)

    def release(self) -> None:
        """Let the memory be used again; twice is safe."""
        if not self._blocks:
            return
        with self._decision as scheduler:
            blocks, self._blocks = self._blocks, []
            for block in blocks:
                scheduler.memory.unpin(block)


class Ticket:
    """A prefetch under way."""

    __slots__ = ("_decision", "_ended", "_waiter")

    def __init__(
        self,
        decision: AbstractContextManager[Scheduler],
        waiter: Waiter,
        ended: threading.Event,
    ) -> None:
        self._decision, self._waiter, self._ended = decision, waiter, ended

    def cancel(self) -> None:
        """Give up what did not start; blocks that others wait for are fetched all the same."""
        with self._decision as scheduler:
            scheduler.waiters.withdraw(self._waiter)

    @property
    def done(self) -> bool:
        """Whether it ended: all blocks arrived, or it failed, or was cancelled."""
        return self._waiter.finished

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; True when every block arrived."""
        self._ended.wait(timeout_s)
        waiter = self._waiter
        return waiter.finished and not waiter.closed and waiter.error is None
