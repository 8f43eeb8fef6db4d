"""Ranges cut at the borders of blocks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from bootseer.blocks.fetch.block_memory import memory_key
from bootseer.blocks.fetch.records import Copy
from bootseer.blocks.fetch.scheduler import Want
from bootseer.blocks.fetch.slabs import writable
from bootseer.blocks.source import BlockSource, block_length
from bootseer.errors import UsageError

Range = tuple[BlockSource, int, memoryview]
"""A source, an offset in bytes, and the memory that the bytes from there on shall fill."""


def wants_of(ranges: Sequence[Range]) -> tuple[list[int], list[tuple[BlockSource, list[Want]]]]:
    """Cut ranges at block borders: the bytes of each range, and what is wanted of each source."""
    counts: list[int] = []
    copies: dict[str | int, tuple[BlockSource, dict[int, list[Copy]]]] = {}
    for source, given, buffer in ranges:
        offset = operator.index(given)
        if offset < 0:
            raise UsageError(f"a read cannot begin at byte {offset}; offsets start at 0")
        view = writable(buffer)
        length = max(0, min(len(view), source.size_bytes - offset))
        counts.append(length)
        by_index = copies.setdefault(memory_key(source), (source, {}))[1]
        for index, copy in _cut(view[:length], offset, source.block_bytes):
            by_index.setdefault(index, []).append(copy)
    wants = [(source, list(_wants(source, by_index))) for source, by_index in copies.values()]
    return counts, wants


def _cut(view: memoryview, offset: int, block_bytes: int) -> Iterable[tuple[int, Copy]]:
    done = 0
    while done < len(view):
        index, start = divmod(offset + done, block_bytes)
        size = min(block_bytes - start, len(view) - done)
        yield index, Copy(start, view[done : done + size])
        done += size


def _wants(source: BlockSource, by_index: dict[int, list[Copy]]) -> Iterable[Want]:
    for index, copies in by_index.items():
        is_whole = len(copies) == 1 and len(copies[0].target) == block_length(source, index)
        yield Want(index, (), copies[0].target) if is_whole else Want(index, copies)
