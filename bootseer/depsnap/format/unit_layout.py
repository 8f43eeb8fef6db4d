"""Where a file's bytes are in an archive: blocks, units and frames. Pure.

A file is cut into *blocks* of `BLOCK` bytes at fixed offsets. The data of one block, without its
holes, is a *unit*: its segments, back to back. Units fill *frames*, each compressed on its own; a
file of at most one block is never split. An empty file, or one that is a single hole, is one unit
of no bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

BLOCK = 4 << 20
FRAME = 4 << 20
# Headers alone fill a frame of empty files; this keeps its unit list short.
FRAME_UNITS = 4096
_HEADERS_BYTES = 1536
"""What a member's headers usually take, for filling frames."""

Segment = tuple[int, int]
"""(offset, length) within a file."""


class Unit(NamedTuple):
    """The data of block `block` of entry `entry`; `size` is the segments' sum."""

    entry: int
    block: int
    segments: tuple[Segment, ...]
    size: int


def units(entry: int, size: int, data: Sequence[Segment] | None = None) -> list[Unit]:
    """All units of one file. `data` lists the segments of a sparse file, None means no holes."""
    if data is None:
        if size <= BLOCK:
            return [Unit(entry, 0, ((0, size),) if size else (), size)]
        data = ((0, size),)
    by_block: dict[int, list[Segment]] = {}
    for offset, length in data:
        at, end = offset, offset + length
        while at < end:
            block = at // BLOCK
            part = min(end, (block + 1) * BLOCK) - at
            by_block.setdefault(block, []).append((at, part))
            at += part
    if not by_block:
        return [Unit(entry, 0, (), 0)]
    return [
        Unit(entry, block, tuple(parts), sum(length for _, length in parts))
        for block, parts in by_block.items()
    ]


FramePlan = list[tuple[int, Unit | None]]
"""A frame's content: (entry, unit) in order. A member's header goes before its first unit; a unit
of None stands for a member that has headers only (directory, link)."""


def fill_frames(members: Iterable[tuple[int, list[Unit]]]) -> list[FramePlan]:
    """Distribute the members, each an entry's number and its units, over frames, in order."""
    out: list[FramePlan] = []
    current: FramePlan = []
    filled = 0
    for entry, parts in members:
        headers_only: list[Unit | None] = [None]
        for unit in parts or headers_only:
            need = _HEADERS_BYTES + (unit.size if unit else 0)
            if current and (filled + need > FRAME or len(current) >= FRAME_UNITS):
                out.append(current)
                current, filled = [], 0
            current.append((unit.entry if unit else entry, unit))
            filled += need
    if current:
        out.append(current)
    return out


@lru_cache(maxsize=1)
def _zero_block_digest() -> bytes:
    return hashlib.sha256(bytes(BLOCK)).digest()


def content_digest(size: int, block_digests: dict[int, bytes]) -> bytes:
    """The digest of a file's content from its blocks' sha256, holes read as zeros.

    Up to one block it is the sha256 of the content; above, the sha256 of all blocks' sha256.
    Blocks that are a single hole may be missing from `block_digests`.
    """
    if size <= BLOCK:
        only = block_digests.get(0)
        return hashlib.sha256(bytes(size)).digest() if only is None else only
    whole = hashlib.sha256()
    last = (size - 1) // BLOCK
    for block in range(last + 1):
        digest = block_digests.get(block)
        if digest is None:
            tail = size - last * BLOCK
            digest = (
                hashlib.sha256(bytes(tail)).digest()
                if block == last and tail != BLOCK
                else _zero_block_digest()
            )
        whole.update(digest)
    return whole.digest()


def block_digest(size: int, unit: Unit, data: memoryview | bytes) -> bytes:
    """The sha256 of one block, from the unit's bytes and zeros for its holes."""
    start = unit.block * BLOCK
    length = min(BLOCK, size - start)
    if len(data) == length:
        return hashlib.sha256(data).digest()
    whole = bytearray(length)
    at = 0
    for offset, part in unit.segments:
        whole[offset - start : offset - start + part] = data[at : at + part]
        at += part
    return hashlib.sha256(whole).digest()
