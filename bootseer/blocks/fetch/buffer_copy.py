"""Where the bytes of a request land, and their way from there into readers' memory."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.blocks.fetch.records import Block, Copy, Flight
from bootseer.blocks.fetch.slabs import SMALL_COPY_BYTES, copy, looks_warm, populate

POPULATE_BYTES = 256 << 10


def raw_views(flight: Flight) -> list[memoryview]:
    """Where each block's raw bytes go; the pages are there afterwards."""
    out = []
    for (block, _), slot, target in zip(flight.items, flight.slots, flight.targets, strict=True):
        if target is not None:
            if len(target) >= POPULATE_BYTES and not looks_warm(target):
                populate(target)
            out.append(target)
        elif slot is not None:
            out.append(slot.view[: block.length])
        else:
            raise AssertionError("a block without memory was sent")
    return out


def copy_from(block: Block, copies: Sequence[Copy]) -> None:
    """Copy from a pinned block into readers' memory."""
    if block.slot is None:
        raise AssertionError("a pinned block lost its memory")
    memory = block.slot.view
    for item in copies:
        size = len(item.target)
        if size <= SMALL_COPY_BYTES:
            item.target[:] = memory[item.start : item.start + size]
        else:
            copy(item.target, memory[item.start : item.start + size])
