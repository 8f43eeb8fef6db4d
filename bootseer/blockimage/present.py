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
AHEAD_BLOCKS = 4


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
        out = []
        for index in range(first, last + 1):
            raw = self._block(index)
            if raw is None:
                return None
            start = index * size
            out.append(raw[max(0, offset - start) : offset + length - start])
        return out

    def _block(self, index: int) -> memoryview | None:
        blocks = self._kept.blocks
        kept = blocks.pop(index, None)
        if kept is None:
            if not self._cached.present(index):
                return None
            buffer = bytearray(self._source.block_bytes)
            if len(blocks) >= KEPT_BLOCKS:
                buffer = blocks.pop(next(iter(blocks))).obj  # type: ignore[assignment]
            kept = memoryview(buffer)[: block_length(self._source, index)]
            if self._recent[(index - 1) % RECENT_BLOCKS] == index - 1:  # read forward
                self._cached.expect(index + 1, AHEAD_BLOCKS)
            self._recent[index % RECENT_BLOCKS] = index
            if not self._cached.read(index, kept):
                return None
        blocks[index] = kept  # the youngest
        return kept
