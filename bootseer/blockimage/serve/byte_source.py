"""Where the bytes of an image's data file come from, and what its reads cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from bootseer.blockimage.serve.frames import Frames
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import BlockSource
from bootseer.light_dataclasses import dataclass

if TYPE_CHECKING:
    from bootseer.blocks.cache.direct_reads import DirectReads
    from bootseer.blocks.fetch.fetcher import Deliver, Fetcher, HeldBytes
    from bootseer.blocks.fetch.readahead import ReadAhead


FITTING_MISSES = 16
"""Reads beside a hot set, those that wait for their blocks counted twice; one of another start has
more."""


class Touches(Protocol):
    """Who wants to know what programs read."""

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


class Bytes:
    """Where the data's bytes come from, once it is known: `frames` first, then `fetcher`.

    `opening` gives the fetcher and its source when they are first needed: the hot set may be
    under way before anybody has parsed the block table. With `read_ahead`, blocks behind those
    that are read one after the other are fetched ahead; it begins by itself when programs want
    much that the hot set lacks.
    """

    def __init__(
        self, data_bytes: int, frames: Frames, opening: Callable[[], tuple[Fetcher, BlockSource]]
    ) -> None:
        self.data_bytes = data_bytes
        self.frames = frames
        self._opening = opening
        self._opened: tuple[Fetcher, BlockSource] | None = None
        self.read_ahead = False
        self.straight: DirectReads | None = None  # of the node cache, once it is open
        self._ahead: ReadAhead | None = None
        self._missed = 0

    def hold(
        self, offset: int, length: int, deliver: Deliver, priority: Priority
    ) -> HeldBytes | None:
        """`Fetcher.hold` of the data, and what is best fetched with it."""
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

    def kept(self, offset: int, length: int) -> memoryview | None:
        """Bytes that are verified in the node cache; they hold until this thread asks again."""
        straight = self.straight
        view = straight.read(offset, length) if straight is not None else None
        if view is not None and self.read_ahead and straight and not straight.marks.whole:
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
