"""Block sources over plain local files, for tests of the cache, the table and the replay."""

from __future__ import annotations

import random
from pathlib import Path

import xxhash

from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.source import BlockSource, Location, block_length
from bootseer.errors import CorruptDataError
from bootseer.storage.local import LocalStore


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class FileSource(BlockSource):
    """A local file cut into blocks; with `checked`, blocks are verified against the right bytes."""

    source_class = "plain"

    def __init__(
        self, path: Path, *, block_bytes: int = 4096, key: str | None = None, checked: bool = True
    ) -> None:
        self.store = LocalStore(str(path.parent))
        self.name = path.name
        raw = path.read_bytes()
        self.size_bytes = len(raw)
        self.block_bytes = block_bytes
        self.key = f"file {path}" if key is None else key
        self.in_place = True
        self.digests = [
            xxhash.xxh3_128_digest(raw[start : start + block_bytes])
            for start in range(0, len(raw), block_bytes)
            if checked
        ]

    def locate(self, index: int) -> Location:
        return Location(self.name, index * self.block_bytes, block_length(self, index))

    def ends_stretch(self, part: str, offset: int) -> int:
        return self.size_bytes

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        return ()

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        if self.digests and xxhash.xxh3_128_digest(raw) != self.digests[index]:
            raise CorruptDataError(f"block {index} of {self.name} is not what it should be")


def make_source(folder: Path, size: int, seed: int = 0, **options: object) -> FileSource:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"object-{seed}"
    path.write_bytes(some_bytes(size, seed))
    return FileSource(path, **options)  # type: ignore[arg-type]


def block_of(source: FileSource, index: int) -> bytes:
    place = source.locate(index)
    buffer = bytearray(place.length)
    source.store.read_range(place.part, place.offset, buffer)
    return bytes(buffer)


def fill(kept: CachedObject, source: FileSource, indexes: range) -> None:
    """Store blocks of a source in the node cache."""
    for index in indexes:
        kept.store(index, memoryview(block_of(source, index)))


def read(kept: CachedObject, source: FileSource, index: int) -> bytes | None:
    """What the node cache has of a block; None where it is absent."""
    raw = bytearray(source.locate(index).length)
    return bytes(raw) if kept.read(index, memoryview(raw)) else None
