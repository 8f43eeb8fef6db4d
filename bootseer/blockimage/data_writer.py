"""Writes an image's data: files one behind the other, in blocks that are packed as they fill.

Raw data are pages of 4 KiB; each file begins on a page, and so do the bytes after a hole. Long runs
of zeros become holes: a file is looked at in *chunks* (256 KiB, larger for files of more than
1 GiB, so that a file has 4,096 chunks at most), and a chunk of zeros is stored nowhere. Equal
content is stored once, and so are equal blocks.

The digest of content is its sha256. Of content with holes it is the sha256 of a text that names
the size, the chunks that hold data, and the sha256 of those chunks: then five sparse gigabytes
need not be hashed.
"""

from __future__ import annotations

import array
import hashlib
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from types import TracebackType
from typing import NamedTuple, Self

import zstandard

from bootseer.blockimage.tree_entries import Content, FileExtent, Stored
from bootseer.blocks.extents import BLOCK_BYTES, PAGE_BYTES
from bootseer.blocks.table import Codec, Table
from bootseer.blocks.table import Stored as StoredBlock
from bootseer.errors import CorruptDataError, from_os_error

LEVEL = 3
LEAST_CHUNK_BYTES = 256 << 10
MOST_CHUNK_BYTES = 1 << 30
CHUNKS_A_FILE = 4096
MAX_FILE_BYTES = MOST_CHUNK_BYTES * CHUNKS_A_FILE
MAX_DATA_BYTES = 128 << 30
_PIECE_BYTES = 256 << 10
_WHOLE_BYTES = 1 << 20  # content up to this size is known before any of it is stored
_SAVES = 0.95  # a block is compressed where that saves a twentieth at least
_ZEROS = bytes(_PIECE_BYTES)


class _Mark(NamedTuple):
    """A place in the data to which it can be cut back."""

    raw_bytes: int
    begun: bytes  # what of the block under way was there


class _Packed(NamedTuple):
    digest: bytes
    codec: Codec
    stored: bytes | bytearray


class DataWriter:
    """Stores contents into the file at `path`; a context manager that creates it on entry.

    Leaving by a failure removes the file.
    """

    _file: FileIO

    def __init__(
        self,
        path: str,
        *,
        threads: int = 2,
        level: int = LEVEL,
        block_bytes: int = BLOCK_BYTES,
        limit_bytes: int = MAX_DATA_BYTES,
    ) -> None:
        self.path = path
        self.raw_bytes = 0
        self._block_bytes, self._level, self._limit_bytes = block_bytes, level, limit_bytes
        self._block = bytearray()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
        self._most_pending = 3 * threads
        self._local = threading.local()
        self._pending: deque[Future[_Packed]] = deque()
        self._offsets, self._lengths = array.array("Q"), array.array("I")
        self._codecs, self._digests = bytearray(), bytearray()
        self._stored_bytes = 0
        self._known_blocks: dict[bytes, int] = {}  # digest -> number
        self._known: dict[tuple[bytes, int, bool], Stored] = {}
        self._zero_block: _Packed | None = None

    def __enter__(self) -> Self:
        try:
            self._file = open(self.path, "w+b", buffering=0)
        except OSError as error:
            raise from_os_error(error, f"write {self.path}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        if kind is not None:
            try:
                os.unlink(self.path)
            except OSError:
                pass  # it is a leftover then, which the next build replaces

    def close(self) -> None:
        """Stop the threads and close the file; twice is safe."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def store(self, content: Content, size_bytes: int) -> Stored:
        """Add a file's content. Raises what reading it raises, and CorruptDataError at limits."""
        if size_bytes > MAX_FILE_BYTES:
            raise CorruptDataError(f"a file of {size_bytes} bytes is too large for an image")
        if content.segments is None and size_bytes <= _WHOLE_BYTES:
            return self._store_whole(b"".join(content.chunks(_WHOLE_BYTES)), size_bytes)
        return self._store_stream(content, size_bytes)

    def _store_whole(self, data: bytes, size_bytes: int) -> Stored:
        if len(data) != size_bytes:
            raise CorruptDataError(f"a file of {size_bytes} bytes ended after {len(data)}")
        if size_bytes > LEAST_CHUNK_BYTES and _ZEROS in data:
            return self._store_stream(_Whole(data), size_bytes)
        digest = hashlib.sha256(data).digest()
        key = (digest, size_bytes, False)
        if (known := self._known.get(key)) is not None:
            return known
        if not any(data):
            extents: tuple[FileExtent, ...] = ()
        else:
            extents = (FileExtent(0, self._page(), size_bytes),)
            self._append(data)
        made = Stored(digest, extents, whole_chunk_bytes(size_bytes))
        self._known[key] = made
        return made

    def _store_stream(self, content: Content, size_bytes: int) -> Stored:
        chunk_bytes = chunk_bytes_of(size_bytes)
        mark = _Mark(self._page(), bytes(self._block))
        check = hashlib.sha256()
        extents: list[FileExtent] = []
        reader = _Reader(content, size_bytes)
        offset = -chunk_bytes
        while (data_offset := reader.next_data(offset + chunk_bytes)) < size_bytes:
            offset = data_offset - data_offset % chunk_bytes
            length = min(chunk_bytes, size_bytes - offset)
            at = self.raw_bytes
            if self._store_chunk(reader, offset, length, check):
                _add_extent(extents, FileExtent(offset, at, length))
        whole = sum(extent.length for extent in extents) == size_bytes
        digest = check.digest()
        if not whole:
            digest = _sparse_digest(size_bytes, extents, digest)
            self._page()
        key = (digest, size_bytes, not whole)
        if (known := self._known.get(key)) is not None:
            self._cut(mark)
            return known
        made = Stored(
            digest, tuple(extents), whole_chunk_bytes(size_bytes) if whole else chunk_bytes
        )
        self._known[key] = made
        return made

    def _store_chunk(self, reader: _Reader, offset: int, length: int, check: hashlib._Hash) -> bool:
        """Store one chunk, unless it is zeros; its leading zeros wait until something follows."""
        zeros = 0
        for piece in reader.pieces(offset, length):
            if zeros >= 0:
                if _is_zero(piece):
                    zeros += len(piece)
                    continue
                for zero in _zeros(zeros):
                    check.update(zero)
                    self._append(zero)
                zeros = -1
            check.update(piece)
            self._append(piece)
        return zeros < 0

    def _page(self) -> int:
        """Go on at the next page, and say where that is."""
        if gap := -self.raw_bytes % PAGE_BYTES:
            self._append(_ZEROS[:gap])
        return self.raw_bytes

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        self.raw_bytes += len(data)
        if self.raw_bytes > self._limit_bytes:
            raise CorruptDataError(
                f"the image unpacks to more than {self._limit_bytes} bytes; raise the limit if it "
                "may be so large"
            )
        block, size = self._block, self._block_bytes
        if len(block) + len(data) < size:
            block += data
            return
        view = memoryview(data)
        while len(block) + len(view) >= size:
            room = size - len(block)
            block += view[:room]
            view = view[room:]
            self._flush(block)
            self._block = block = bytearray()
        block += view

    def _flush(self, block: bytearray) -> None:
        while len(self._pending) >= self._most_pending:
            self._take(self._pending.popleft().result())
        self._pending.append(self._pool.submit(self._pack, block))

    def _pack(self, block: bytearray) -> _Packed:
        if len(block) == self._block_bytes and _is_zero(block):
            if self._zero_block is None:
                self._zero_block = self._packed(block)
            return self._zero_block
        return self._packed(block)

    def _packed(self, block: bytearray) -> _Packed:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=False)
            self._local.compressor = compressor
        digest = hashlib.sha256(block).digest()
        packed = compressor.compress(block)
        if len(packed) <= len(block) * _SAVES:
            return _Packed(digest, Codec.ZSTD, packed)
        return _Packed(digest, Codec.NONE, block)

    def _take(self, packed: _Packed) -> None:
        """Write the next block, or point to an equal one."""
        number = self._known_blocks.setdefault(packed.digest, len(self._offsets))
        self._digests += packed.digest
        self._codecs.append(packed.codec)
        self._lengths.append(len(packed.stored))
        if number < len(self._offsets):
            self._offsets.append(self._offsets[number])
            return
        self._offsets.append(self._stored_bytes)
        try:
            self._write(memoryview(packed.stored))
        except OSError as error:
            raise from_os_error(error, f"write {self.path}") from error
        self._stored_bytes += len(packed.stored)

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[self._file.write(view) :]

    def _cut(self, mark: _Mark) -> None:
        """Take back everything behind a mark."""
        keep = mark.raw_bytes // self._block_bytes
        while self._pending:
            future = self._pending.popleft()
            if len(self._offsets) < keep:
                self._take(future.result())
            elif not future.cancel():
                future.result()
        for number in range(keep, len(self._offsets)):
            digest = bytes(self._digests[number * 32 : number * 32 + 32])
            if self._known_blocks.get(digest) == number:
                del self._known_blocks[digest]
        del self._offsets[keep:], self._lengths[keep:]
        del self._codecs[keep:], self._digests[keep * 32 :]
        ends = map(int.__add__, self._offsets, self._lengths)
        self._stored_bytes = max(ends, default=0)
        os.ftruncate(self._file.fileno(), self._stored_bytes)
        self._file.seek(self._stored_bytes)
        self._block = bytearray(mark.begun)
        self.raw_bytes = mark.raw_bytes

    def finish(self) -> Table:
        """Write what is left, sync, and give the table. There is a page of data at least."""
        if not self.raw_bytes:
            self._append(_ZEROS[:PAGE_BYTES])
        self._page()
        if self._block:
            self._flush(self._block)
            self._block = bytearray()
        while self._pending:
            self._take(self._pending.popleft().result())
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise from_os_error(error, f"write {self.path}") from error
        return Table.of(self.raw_bytes, self._blocks(), block_bytes=self._block_bytes)

    def _blocks(self) -> Iterator[StoredBlock]:
        for number, offset in enumerate(self._offsets):
            digest = bytes(self._digests[number * 32 : number * 32 + 32])
            yield StoredBlock(offset, self._lengths[number], Codec(self._codecs[number]), digest)


class _Whole:
    """Content that is in memory."""

    segments = None

    def __init__(self, data: bytes) -> None:
        self._data = data

    def chunks(self, size_bytes: int) -> Iterator[memoryview]:
        view = memoryview(self._data)
        for at in range(0, len(view), size_bytes):
            yield view[at : at + size_bytes]


class _Reader:
    """Content by chunks: reads forward only, and gives zeros between segments."""

    def __init__(self, content: Content, size_bytes: int) -> None:
        segments = content.segments
        self._segments = deque([(0, size_bytes)] if segments is None else segments)
        self._chunks = iter(content.chunks(_PIECE_BYTES))
        self._left = memoryview(b"")

    def next_data(self, offset: int) -> int:
        """Where, from `offset` on, data may lie next; far behind every file where nowhere."""
        self.is_hole(offset, 1)
        return max(offset, self._segments[0][0]) if self._segments else 1 << 63

    def is_hole(self, offset: int, length: int) -> bool:
        """Whether no segment reaches into these bytes; earlier ones are done with."""
        segments = self._segments
        while segments and segments[0][0] + segments[0][1] <= offset:
            segments.popleft()
        return not segments or segments[0][0] >= offset + length

    def pieces(self, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """All bytes of a range, in pieces of at most 256 KiB."""
        end = offset + length
        while offset < end:
            count = min(_PIECE_BYTES, end - offset)
            yield self._piece(offset, count)
            offset += count

    def _piece(self, offset: int, length: int) -> bytes | memoryview:
        if self.is_hole(offset, length):
            return memoryview(_ZEROS)[:length]
        start, extent = self._segments[0]
        if start <= offset and start + extent >= offset + length:
            return self._take(length)
        piece = bytearray(length)
        for start, extent in self._segments:
            first, last = max(start, offset), min(start + extent, offset + length)
            if first >= last:
                break
            piece[first - offset : last - offset] = self._take(last - first)
        return bytes(piece)

    def _take(self, length: int) -> bytes | memoryview:
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        if len(self._left) >= length:
            taken, self._left = self._left[:length], self._left[length:]
            return taken
        out = bytearray(self._left)
        while len(out) < length:
            self._left = memoryview(next(self._chunks, b""))
            if not self._left:
                raise CorruptDataError(f"a file's content ends {length - len(out)} bytes early")
            taken = self._left[: length - len(out)]
            self._left = self._left[len(taken) :]
            out += taken
        return bytes(out)


def _add_extent(extents: list[FileExtent], new: FileExtent) -> None:
    """Put an extent behind the others, as part of the last one where it goes on there."""
    if extents:
        offset, at, length = extents[-1]
        if (offset + length, at + length) == (new.file_offset, new.data_offset):
            extents[-1] = FileExtent(offset, at, length + new.length)
            return
    extents.append(new)


def chunk_bytes_of(size_bytes: int) -> int:
    """In what chunks a file of this size is looked at for holes."""
    wanted = -(-size_bytes // CHUNKS_A_FILE)
    return max(LEAST_CHUNK_BYTES, 1 << max(wanted - 1, 0).bit_length())


def whole_chunk_bytes(size_bytes: int) -> int:
    """The chunk size of a file that lies in one piece: as few chunks as the format allows."""
    return min(MOST_CHUNK_BYTES, max(PAGE_BYTES, 1 << max(size_bytes - 1, 0).bit_length()))


def _is_zero(data: bytes | bytearray | memoryview) -> bool:
    # bytes compare with memcmp and end at the first difference; memoryviews do not.
    if data[0] or data[-1]:
        return False
    return bytes(data) == _ZEROS[: len(data)]


def _zeros(length: int) -> Iterator[memoryview]:
    view = memoryview(_ZEROS)
    while length > 0:
        yield view[:length]
        length -= len(_ZEROS)


def _sparse_digest(size_bytes: int, extents: list[FileExtent], data: bytes) -> bytes:
    rows = b"".join(struct.pack("<QQ", e.file_offset, e.length) for e in extents)
    text = b"bootseer content with holes\n" + struct.pack("<Q", size_bytes) + rows + data
    return hashlib.sha256(text).digest()
