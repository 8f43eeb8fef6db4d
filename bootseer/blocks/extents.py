"""Ranges of bytes and sets of them: pure arithmetic.

An `Extent` is `[offset, offset + length)` in bytes. The functions take extents in any order,
overlapping or empty, and return a *set*: extents in rising order, none empty, no two that overlap
or touch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PAGE_BYTES = 4096  # the grain of a trace: what a page fault touches
BLOCK_BYTES = 256 << 10  # the grain of fetching and verifying, unless a format says otherwise


class Extent(NamedTuple):
    """Bytes `[offset, offset + length)`."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.length


def union(extents: Iterable[tuple[int, int]]) -> list[Extent]:
    """Every byte that is in one of them, as a set."""
    merged: list[Extent] = []
    start = end = -1
    for offset, length in sorted(extents):
        if length <= 0:
            continue
        if offset <= end:
            end = max(end, offset + length)
            continue
        if end > start:
            merged.append(Extent(start, end - start))
        start, end = offset, offset + length
    if end > start:
        merged.append(Extent(start, end - start))
    return merged


def subtract(some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[Extent]:
    """Every byte that is in the first and not in the second, as a set."""
    remaining: list[Extent] = []
    holes = union(others)
    first = 0
    for extent in union(some):
        start = extent.offset
        while first < len(holes) and holes[first].end <= start:
            first += 1
        at = first
        while at < len(holes) and holes[at].offset < extent.end:
            if holes[at].offset > start:
                remaining.append(Extent(start, holes[at].offset - start))
            start = max(start, holes[at].end)
            at += 1
        if start < extent.end:
            remaining.append(Extent(start, extent.end - start))
    return remaining


def covered_bytes(extents: Iterable[tuple[int, int]]) -> int:
    """How many bytes are in at least one of them."""
    return sum(extent.length for extent in union(extents))


def align(
    extents: Iterable[tuple[int, int]], size_bytes: int, grain_bytes: int = PAGE_BYTES
) -> list[Extent]:
    """The whole grains (pages, blocks) that they touch, cut off at the object's size, as a set."""
    grown = []
    for offset, length in extents:
        if length > 0 and offset < size_bytes:
            start = offset // grain_bytes * grain_bytes
            end = min(size_bytes, -(-(offset + length) // grain_bytes) * grain_bytes)
            grown.append((start, end - start))
    return union(grown)
