"""Where the bytes of a request go, and their way from there into readers' memory."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.blocks.fetch.records import Block, Copy, Request
from bootseer.blocks.fetch.slabs import SMALL_COPY_BYTES, copy, looks_warm, populate

POPULATE_BYTES = 256 << 10


def raw_views(request: Request) -> list[memoryview]:
    """Where each block's raw bytes go; the memory's pages are there afterwards."""
    views = []
    columns = zip(request.items, request.slots, request.targets, strict=True)
    for (block, _), slot, target in columns:
        if target is not None:
            if len(target) >= POPULATE_BYTES and not looks_warm(target):
                populate(target)
            views.append(target)
        elif slot is not None:
            views.append(slot.view[: block.length])
        else:
            raise AssertionError("a block without memory was sent")
    return views


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
