"""The block table: where each block of an object is stored, how, and what it must be.

docs/blocks.md has the bytes. A table is parsed under limits and checked as a whole. Its blocks are
checked one by one against their digests, which are those of the raw bytes, so that a block is
verified end to end, however it was stored or packed.
"""

from __future__ import annotations

import array
import bisect
import hashlib
import itertools
import struct
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import xxhash
import zstandard

from bootseer.blocks.cache.present_index import Identity, identity_for
from bootseer.blocks.extents import BLOCK_BYTES
from bootseer.blocks.source import BlockSource, Location
from bootseer.errors import CorruptDataError, UsageError
from bootseer.light_dataclasses import dataclass

if TYPE_CHECKING:
    from bootseer.storage.store import BlockLocation, Store

MAGIC = b"BSTABLE\x01"
_HEADER = struct.Struct("<8sBB2xIQQQ")
MAX_WINDOW_BYTES = 128 << 20  # memory that a frame may make the decoder take
_SCATTERED = 1
_SHA256_BYTES = 32


class Codec(IntEnum):
    """How a block's bytes are stored."""

    NONE = 0
    ZSTD = 1


class DigestKind(IntEnum):
    """What names a block's raw bytes: SHA-256 where they might be forged, else xxh3-128."""

    SHA256 = 1
    XXH3_128 = 2

    @property
    def length(self) -> int:
        """Bytes of one digest."""
        return _SHA256_BYTES if self is DigestKind.SHA256 else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a table may claim; the defaults hold an object of 4 TiB in 256 KiB blocks."""

    blocks: int = 1 << 24
    block_bytes: int = 64 << 20
    table_bytes: int = 1 << 30


LIMITS = Limits()


class Stored(NamedTuple):
    """One block as it is stored: bytes `[offset, offset + length)`, and its raw bytes' digest."""

    offset: int
    length: int
    codec: Codec
    digest: bytes


def digest_of(kind: DigestKind, raw: memoryview | bytes) -> bytes:
    """The digest of a block's raw bytes."""
    if kind is DigestKind.SHA256:
        return hashlib.sha256(raw).digest()
    return xxhash.xxh3_128_digest(raw)


def key_of(table_digest: str) -> str:
    """The key of an object that a table describes; `table_digest`: the table's sha256 (hex)."""
    return f"table {table_digest}"


def identity_of_table(table_digest: str, data: bytes) -> Identity:
    """The node cache's identity of a table's object, without reading the whole table.

    Raises CorruptDataError where it is no table.
    """
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise CorruptDataError("these bytes are no block table")
    _, _, _, block_bytes, size_bytes, _, _ = _HEADER.unpack_from(data)
    return identity_for(key_of(table_digest), size_bytes, block_bytes)


class Table:
    """The blocks of one object of `size_bytes`, each of `block_bytes` (the last shorter)."""

    def __init__(
        self,
        size_bytes: int,
        block_bytes: int,
        kind: DigestKind,
        stored_bytes: int,
        columns: tuple[Sequence[int], Sequence[int], bytes, bytes],
    ) -> None:
        self.size_bytes = size_bytes
        self.block_bytes = block_bytes
        self.kind = kind
        self.stored_bytes = stored_bytes
        self._offsets, self._lengths, self._codecs, self._digests = columns

    @classmethod
    def of(
        cls,
        size_bytes: int,
        blocks: Iterable[Stored],
        *,
        block_bytes: int = BLOCK_BYTES,
        kind: DigestKind = DigestKind.SHA256,
    ) -> Table:
        """The table of blocks given in order. Raises UsageError when they are not that object's."""
        offsets, lengths = array.array("Q"), array.array("I")
        codecs, digests = bytearray(), bytearray()
        for block in blocks:
            offsets.append(block.offset)
            lengths.append(block.length)
            codecs.append(block.codec)
            digests += block.digest
        stored_bytes = max(map(int.__add__, offsets, lengths), default=0)
        columns = (offsets, lengths, bytes(codecs), bytes(digests))
        table = cls(size_bytes, block_bytes, kind, stored_bytes, columns)
        if len(digests) != table.blocks * kind.length or len(lengths) != table.blocks:
            raise UsageError(f"{len(lengths)} blocks do not make an object of {size_bytes} bytes")
        return table

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.size_bytes // self.block_bytes)

    @property
    def in_place(self) -> bool:
        """Whether every block is stored as it is."""
        return not self._codecs.strip(b"\0")

    def __getitem__(self, index: int) -> Stored:
        if not 0 <= index < self.blocks:
            raise IndexError(index)
        size = self.kind.length
        digest = self._digests[index * size : (index + 1) * size]
        codec = Codec(self._codecs[index])
        return Stored(self._offsets[index], self._lengths[index], codec, digest)

    def serialise(self) -> bytes:
        """The table as bytes; the same table always gives the same bytes."""
        running = itertools.accumulate(self._lengths, initial=0)
        scattered = any(map(int.__ne__, self._offsets, running))
        header = _HEADER.pack(
            MAGIC,
            self.kind,
            _SCATTERED if scattered else 0,
            self.block_bytes,
            self.size_bytes,
            self.blocks,
            self.stored_bytes,
        )
        body = [header, _little(array.array("I", self._lengths)), self._codecs]
        if scattered:
            body.append(_little(array.array("Q", self._offsets)))
        whole = b"".join([*body, self._digests])
        return whole + hashlib.sha256(whole).digest()


def parse(data: bytes, *, limits: Limits = LIMITS, name: str = "the block table") -> Table:
    """Read a table. Raises CorruptDataError for anything that is not a whole, plausible one."""
    if len(data) > limits.table_bytes:
        raise CorruptDataError(f"{name} has {len(data)} bytes, more than {limits.table_bytes}")
    if len(data) < _HEADER.size + _SHA256_BYTES or not data.startswith(MAGIC):
        raise CorruptDataError(f"{name} is none of a version that is known here")
    body = memoryview(data)[:-_SHA256_BYTES]
    _, kind_number, flags, block_bytes, size_bytes, blocks, stored = _HEADER.unpack_from(data)
    known = kind_number in tuple(DigestKind) and flags in (0, _SCATTERED)
    if not known or not 0 < block_bytes <= limits.block_bytes or blocks > limits.blocks:
        raise CorruptDataError(f"{name} asks for more than is allowed, or for unknown things")
    kind = DigestKind(kind_number)
    wide = 4 + 1 + (8 if flags else 0) + kind.length
    lies = blocks != -(-size_bytes // block_bytes) or len(body) != _HEADER.size + blocks * wide
    if lies or hashlib.sha256(body).digest() != data[-_SHA256_BYTES:]:
        raise CorruptDataError(f"{name} is truncated or damaged; fetch or build it again")
    columns = _columns(body[_HEADER.size :], blocks, bool(flags))
    _check(columns, block_bytes, stored, name)
    return Table(size_bytes, block_bytes, kind, stored, columns)


def _columns(
    body: memoryview, blocks: int, scattered: bool
) -> tuple[Sequence[int], Sequence[int], bytes, bytes]:
    lengths = array.array("I", bytes(body[: 4 * blocks]))
    codecs = bytes(body[4 * blocks : 5 * blocks])
    at = 5 * blocks
    if sys.byteorder == "big":
        lengths.byteswap()
    if scattered:
        offsets = array.array("Q", bytes(body[at : at + 8 * blocks]))
        at += 8 * blocks
        if sys.byteorder == "big":
            offsets.byteswap()
    else:
        offsets = array.array("Q", itertools.accumulate(lengths, initial=0))
        offsets.pop()
    return offsets, lengths, codecs, bytes(body[at:])


def _check(
    columns: tuple[Sequence[int], Sequence[int], bytes, bytes],
    block_bytes: int,
    stored_bytes: int,
    name: str,
) -> None:
    """What holds for all blocks together; each one's own claims are checked when it is read."""
    offsets, lengths, codecs, _ = columns
    end = max(map(int.__add__, offsets, lengths), default=0)
    longest = max(lengths, default=1)
    if end != stored_bytes or stored_bytes >= 1 << 63 or min(lengths, default=1) == 0:
        raise CorruptDataError(f"{name} lists blocks outside the object that stores them")
    if longest > most_stored_bytes(block_bytes) or codecs.strip(bytes(Codec)):
        raise CorruptDataError(f"{name} has a block stored in a way that none can be")


def most_stored_bytes(raw_bytes: int) -> int:
    """No sensible packer stores a block of `raw_bytes` in more (zstd's own bound is lower)."""
    return raw_bytes + (raw_bytes >> 7) + 1024


def _little(column: array.array[int]) -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


class Unpacker:
    """Decodes zstd frames into memory that is there already; for any number of threads."""

    def __init__(self) -> None:
        self._idle: deque[zstandard.ZstdDecompressor] = deque(maxlen=64)

    def unpack(self, stored: memoryview, raw: memoryview, what: str) -> None:
        """Decode one frame that must fill `raw` exactly; nothing beyond `raw` is ever made.

        Raises CorruptDataError, naming `what`, when it is no frame, or a shorter or longer one.
        """
        try:
            decompressor = self._idle.pop()  # one thread at a time may use one
        except IndexError:
            decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        done = 0
        try:
            with decompressor.stream_reader(stored, closefd=False) as reader:
                while done < len(raw) and (count := reader.readinto(raw[done:])):
                    done += count
                longer = done == len(raw) and bool(reader.read(1))
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"{what} is no intact zstd frame: {error}") from error
        if done != len(raw) or longer:
            size = "more" if longer else str(done)
            raise CorruptDataError(f"{what} unpacks to {size} bytes instead of {len(raw)}")
        self._idle.append(decompressor)


def pack(raw: memoryview | bytes, level: int = 3) -> tuple[Codec, bytes]:
    """A block as it is best stored: compressed where that saves a twentieth at least."""
    packed = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(raw)
    if len(packed) <= len(raw) * 0.95:
        return Codec.ZSTD, packed
    return Codec.NONE, bytes(raw)


class TableSource(BlockSource):
    """An object that a table describes and one object of a store holds.

    `stretches` say where that object's bytes lie (`Store.places`), in order, if the caller asked.
    """

    has_raw_digests = True

    def __init__(
        self,
        table: Table,
        store: Store,
        part: str,
        *,
        source_class: str = "plain",
        stretches: Sequence[BlockLocation] = (),
    ) -> None:
        self.table = table
        self.key = key_of(hashlib.sha256(table.serialise()).hexdigest())
        self.size_bytes, self.block_bytes = table.size_bytes, table.block_bytes
        self.store = store
        self.in_place = table.in_place
        self.source_class = source_class
        self._part = part
        self._stretches = stretches
        self._starts = [stretch.offset for stretch in stretches]
        self._unpacker = Unpacker()

    def locate(self, index: int) -> Location:
        block = self.table[index]
        return Location(self._part, block.offset, block.length)

    def _stretch(self, offset: int) -> BlockLocation | None:
        at = bisect.bisect_right(self._starts, offset) - 1
        return self._stretches[at] if at >= 0 else None

    def ends_stretch(self, part: str, offset: int) -> int:
        stretch = self._stretch(offset)
        return stretch.offset + stretch.length if stretch else self.table.stored_bytes

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        stretch = self._stretch(offset)
        return stretch.replicas if stretch else ()

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        block = self.table[index]
        what = f"block {index} of {self._part} in {self.store.url}"
        if block.codec is Codec.ZSTD:
            self._unpacker.unpack(stored, raw, what)
        elif len(stored) != len(raw):
            raise CorruptDataError(f"{what} has {len(stored)} bytes instead of {len(raw)}")
        elif not self.in_place:
            raw[:] = stored
        if digest_of(self.table.kind, raw) != block.digest:
            raise CorruptDataError(f"{what} does not match its digest; the stored copy is damaged")

    def check_raw(self, index: int, raw: memoryview) -> None:
        """Raise CorruptDataError unless these are the raw bytes of block `index`."""
        if digest_of(self.table.kind, raw) != self.table[index].digest:
            raise CorruptDataError(f"block {index} of a copy of {self._part} is damaged")
