"""Reading whole files from end to end: large batches through the fetcher, several at once.

A batch fills one buffer: a stretch of a large file, or many small files together, so that neither
is read one request after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import NotFoundError
from bootseer.storage.store import Store
from bootseer.stripedfs.format.stripe_layout import MAX_CHUNK_BYTES
from bootseer.stripedfs.read.sources import INCOMPLETE, DigestedSource, FileSource, as_damage
from bootseer.stripedfs.workers import Task, WorkerPool

MIN_BATCH_BYTES = MAX_CHUNK_BYTES
MAX_BATCH_BYTES = 128 << 20
WORKERS = 2
MAX_SEGMENTS = 256
DEADLINE_S = 3600.0
"""For one batch: an unreachable store fails long before, by the fetcher's own retries."""


class Segment(NamedTuple):
    """Bytes `[offset, offset + length)` of one file, named `path` by the caller."""

    path: str
    source: FileSource
    offset: int
    length: int


Batch = list[Segment]


def batch_bytes(store: Store) -> int:
    """The size of a batch that keeps all of a store's streams busy with long requests."""
    preferred = store.preferred
    wanted = preferred.range_bytes * preferred.streams
    return min(max(wanted, MIN_BATCH_BYTES), MAX_BATCH_BYTES)


def pack_batches(files: Iterable[tuple[str, FileSource]], limit_bytes: int) -> Iterator[Batch]:
    """Pack files into batches, in order, cut at blocks. An empty file has a segment, too.

    No block may be larger than `limit_bytes`.
    """
    batch: Batch = []
    room = limit_bytes
    for path, source in files:
        offset = 0
        while True:
            length = min(source.size_bytes - offset, room)
            if offset + length < source.size_bytes:
                length -= length % source.block_bytes
                if not length and room == limit_bytes:
                    raise ValueError(f"a block of {source.block_bytes} bytes exceeds a batch")
            if length or not source.size_bytes:
                batch.append(Segment(path, source, offset, length))
                offset += length
                room -= length
            if offset < source.size_bytes or len(batch) >= MAX_SEGMENTS:
                yield batch
                batch, room = [], limit_bytes
            if offset >= source.size_bytes:
                break
    if batch:
        yield batch


def split_buffer(batch: Sequence[Segment], buffer: memoryview) -> list[memoryview]:
    """The part of a buffer for each segment of a batch."""
    views, start = [], 0
    for segment in batch:
        views.append(buffer[start : start + segment.length])
        start += segment.length
    return views


def fetch_segments(fetcher: Fetcher, segments: Sequence[tuple[Segment, memoryview]]) -> None:
    """Fill every segment's memory with verified bytes."""
    reads = [(each.source, each.offset, view) for each, view in segments if each.length]
    if not reads:
        return
    try:
        fetcher.read_many(reads, deadline_s=DEADLINE_S)
    except NotFoundError as error:
        listed = [each.source for each, _ in segments if isinstance(each.source, DigestedSource)]
        if not listed:
            raise
        raise as_damage(error, listed[0], INCOMPLETE) from error
    for each, _ in segments:
        if each.length and each.source.doubtful(each.offset, each.length):
            each.source.confirm()


def run_batches(
    files: Iterable[tuple[str, FileSource]],
    handle: Callable[[Batch, list[memoryview], WorkerPool], None],
    *,
    limit_bytes: int,
    workers: int = WORKERS,
) -> None:
    """Call `handle` for every batch with memory for it, from several threads.

    The first error stops the rest and is raised.
    """
    pool = WorkerPool(workers, limit_bytes)

    def tasks() -> Iterator[Task]:
        for batch in pack_batches(files, limit_bytes):

            def task(buffer: memoryview, batch: Batch = batch) -> None:
                handle(batch, split_buffer(batch, buffer), pool)

            yield task

    pool.run(tasks())
