"""What the fetcher gives its callers to hold: bytes in memory, and prefetches under way."""

from __future__ import annotations

from bootseer.blocks.fetch.records import Block, Group
from bootseer.blocks.fetch.workers import Engine


class Held:
    """Bytes in the pool's memory as `views`, readable until `release` is called (once)."""

    __slots__ = ("_blocks", "_engine", "views")

    def __init__(self, engine: Engine, blocks: list[Block], views: list[memoryview]) -> None:
        self._engine = engine
        self._blocks = blocks
        self.views = views

    def release(self) -> None:
        """Let the memory be used again; twice is safe."""
        engine, blocks = self._engine, self._blocks
        if not blocks:
            return
        with engine.lock:
            self._blocks = []
            for block in blocks:
                engine.board.unpin(block)
            effects = engine.effects()
        engine.act(effects)


class Ticket:
    """A prefetch under way."""

    __slots__ = ("_engine", "_group")

    def __init__(self, engine: Engine, group: Group) -> None:
        self._engine = engine
        self._group = group

    def cancel(self) -> None:
        """Give up what did not start; blocks that others wait for are fetched all the same."""
        engine = self._engine
        with engine.lock:
            engine.board.withdraw(self._group)
            effects = engine.effects()
        engine.act(effects)
        self._group.event.set()

    @property
    def done(self) -> bool:
        """Whether it ended: all blocks arrived, or it failed, or was cancelled."""
        return self._group.finished

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; True when every block arrived."""
        self._group.event.wait(timeout_s)
        group = self._group
        return group.finished and not group.closed and group.error is None
