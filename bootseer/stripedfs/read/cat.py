"""A file's bytes in order, read ahead of their use."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.stripedfs.read.batches import Segment, batch_bytes, fetch_segments
from bootseer.stripedfs.read.sources import FileSource


def cut_file(size_bytes: int, block_bytes: int, limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Where to cut a file, as (offset, length): one block first, so that bytes come soon."""
    offset, length = 0, block_bytes
    while offset < size_bytes:
        length = min(length, size_bytes - offset)
        yield offset, length
        offset += length
        length = max(block_bytes, min(4 * length, limit_bytes - limit_bytes % block_bytes))


def stream_file(source: FileSource, fetcher: Fetcher) -> Iterator[memoryview]:
    """Yield all bytes in order, verified; a view is valid until the next one is asked for.

    Of two buffers of at most 128 MiB, one is filled while the other is used. Raises the store's
    errors and CorruptDataError.
    """
    limit_bytes = max(batch_bytes(source.store), source.block_bytes)
    cuts = list(cut_file(source.size_bytes, source.block_bytes, limit_bytes))
    longest = max((length for _, length in cuts), default=1)
    memory = [memoryview(mmap.mmap(-1, longest)) for _ in range(2)]

    def fill(number: int) -> memoryview:
        offset, length = cuts[number]
        view = memory[number % 2][:length]
        fetch_segments(fetcher, [(Segment("", source, offset, length), view)])
        return view

    with ThreadPoolExecutor(1, "bootseer-cat") as pool:
        coming = pool.submit(fill, 0) if cuts else None
        for number in range(len(cuts)):
            assert coming is not None
            view = coming.result()
            # Its buffer is the one that was yielded last, and is no longer used.
            coming = pool.submit(fill, number + 1) if number + 1 < len(cuts) else None
            yield view
