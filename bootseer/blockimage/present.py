"""Reads of blocks that this node has: straight from the node cache, past the fetcher.

The fetcher hands out memory that others may wait for, by way of locks and callbacks. Once most of
an image is in the cache that is all in vain, and it is what a read costs most.
"""

from __future__ import annotations

import threading

from bootseer.blocks.cached import CachedObject
from bootseer.blocks.source import BlockSource, block_length

KEPT_BLOCKS = 8
"""Blocks a thread keeps: one read's, at most 1 MiB, and those beside it."""

RECENT_BLOCKS = 64
AHEAD_BLOCKS = 16


class _Kept(threading.local):
    """One thread's buffers, the one that was asked for longest ago first."""

    def __init__(self) -> None:
        self.blocks: dict[int, memoryview] = {}


class Present:
    """Verified bytes of one object of the node cache, without waiting for anything."""

    def __init__(self, cached: CachedObject, source: BlockSource) -> None:
        self._cached, self._source = cached, source
        self._kept = _Kept()
        self._recent = [-1] * RECENT_BLOCKS  # of all threads

    def views(self, offset: int, length: int) -> list[memoryview] | None:
        """The bytes, or None when one of the blocks is not here (or damaged), or they are many.

        The views hold until this thread asks again.
        """
        size = self._source.block_bytes
        first, last = offset // size, (offset + length - 1) // size
        if last - first >= KEPT_BLOCKS:
            return None  # the last would take the first one's buffer
        blocks, wanted = self._kept.blocks, range(first, last + 1)
        missing = [index for index in wanted if index not in blocks]
        for index in wanted:
            if index in blocks:
                blocks[index] = blocks.pop(index)  # the youngest now
        if missing and not self._fetch(missing[0], missing[-1] + 1):
            return None
        return [
            blocks[index][max(0, offset - index * size) : offset + length - index * size]
            for index in wanted
        ]

    def _fetch(self, first: int, end: int) -> bool:
        """Read blocks `[first, end)` into this thread's buffers; False when one is not here."""
        blocks = self._kept.blocks
        raws: list[memoryview] = []
        for index in range(first, end):
            blocks.pop(index, None)  # one in the middle is read again
        for index in range(first, end):
            if len(blocks) + len(raws) < KEPT_BLOCKS:
                buffer = bytearray(self._source.block_bytes)
            else:  # never one of those that are wanted: they are fewer, and younger
                buffer = blocks.pop(next(iter(blocks))).obj  # type: ignore[assignment]
            raws.append(memoryview(buffer)[: block_length(self._source, index)])
        recent, forward = self._recent, self._recent[(first - 1) % RECENT_BLOCKS] == first - 1
        for index in range(first, end):
            recent[index % RECENT_BLOCKS] = index
        right = self._cached.read_run(first, raws, AHEAD_BLOCKS if forward else 0)
        blocks.update(zip(range(first, first + right), raws, strict=False))
        return first + right == end
