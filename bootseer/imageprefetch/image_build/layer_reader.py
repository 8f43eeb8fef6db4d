"""Reading a layer as a stream: decompression, and the members of its tar file with their content.

Nothing is written. Sizes, the number of members and their headers are limited, so that no layer
can fill memory; a member's content is read only where it is needed.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol

import zstandard

from bootseer.blocks.table import MAX_WINDOW_BYTES
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_build import tar_reader
from bootseer.imageprefetch.image_build.tar_reader import BLOCK, Member

_INPUT_BYTES = 256 << 10
_OUTPUT_BYTES = 1 << 20
_XZ_BYTES = MAX_WINDOW_BYTES + (1 << 20)  # the dictionary, and what else the decoder needs
_AHEAD = 8  # pieces that are decompressed in advance


class Readable(Protocol):
    """A source of a layer's stored bytes."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; empty at the end."""


def decompress(source: Readable) -> Iterator[bytes]:
    """A layer's tar bytes, from gzip, zstd, xz, bzip2 or no compression, by its first bytes."""
    head = source.read(_INPUT_BYTES)
    if head.startswith(b"\x1f\x8b"):
        return _gunzip(head, source)
    if head.startswith((b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")):
        return _unzstd(head, source)
    if head.startswith((b"\xfd7zXZ\x00", b"BZh")):
        return _decompress_by_module(head, source)
    return _read_plain(head, source)


def _read_plain(head: bytes, source: Readable) -> Iterator[bytes]:
    while head:
        yield head
        head = source.read(_INPUT_BYTES)


def _gunzip(data: bytes, source: Readable) -> Iterator[bytes]:
    """Any number of gzip members; stargz has one for each file."""
    while data:
        unpacker = zlib.decompressobj(31)
        while not unpacker.eof:
            try:
                out = unpacker.decompress(data, _OUTPUT_BYTES)
            except zlib.error as error:
                raise CorruptDataError(f"a layer is no intact gzip: {error}") from error
            if out:
                yield out
            if unpacker.eof:
                break
            data = unpacker.unconsumed_tail or source.read(_INPUT_BYTES)
            if not data and not out:
                raise CorruptDataError("a layer's gzip ends early")
        data = unpacker.unused_data or source.read(_INPUT_BYTES)


class _Chained:
    """A source between bytes that were read from it already and others that follow it."""

    def __init__(self, head: bytes, source: Readable, tail: bytes = b"") -> None:
        self._head, self._source, self._tail = head, source, tail

    def read(self, size: int = -1) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        if data := self._source.read(size):
            return data
        data, self._tail = self._tail[:size], self._tail[size:]
        return data


def _unzstd(head: bytes, source: Readable) -> Iterator[bytes]:
    """Any number of frames. The reader takes a cut frame for the end, so a marker is appended."""
    marker = os.urandom(16)
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    chained: BinaryIO = _Chained(head, source, zstandard.compress(marker))  # type: ignore[assignment]
    held = b""
    try:
        reader = decompressor.stream_reader(chained, read_across_frames=True)
        while piece := reader.read(_OUTPUT_BYTES):
            whole = held + piece
            held = whole[-len(marker) :]
            if len(whole) > len(marker):
                yield whole[: -len(marker)]
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"a layer is no intact zstd: {error}") from error
    if held != marker:
        raise CorruptDataError("a layer's zstd ends early")


def _decompress_by_module(head: bytes, source: Readable) -> Iterator[bytes]:
    """Any number of xz or bzip2 streams; xz's dictionaries have the limit of zstd's windows."""
    import bz2
    import lzma

    def unpacker() -> bz2.BZ2Decompressor | lzma.LZMADecompressor:
        if head.startswith(b"BZh"):
            return bz2.BZ2Decompressor()
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_BYTES)

    data, stream = head, unpacker()
    try:
        while data or not stream.needs_input:
            if out := stream.decompress(data, _OUTPUT_BYTES):
                yield out
            data = b""
            if stream.eof:
                # Streams of xz may be padded with zeros.
                data = stream.unused_data.lstrip(b"\0")
                while not data and (more := source.read(_INPUT_BYTES)):
                    data = more.lstrip(b"\0")
                if not data:
                    return
                stream = unpacker()
            elif stream.needs_input:
                data = source.read(_INPUT_BYTES)
    except (lzma.LZMAError, OSError, EOFError) as error:
        raise CorruptDataError(f"a layer is not intactly packed: {error}") from error
    raise CorruptDataError("a layer's xz or bzip2 ends early")


@contextmanager
def prefetch(
    pieces: Iterator[bytes], cancel: Callable[[], None] | None = None
) -> Iterator[Iterator[bytes]]:
    """Have a thread produce the pieces, a few in advance.

    `cancel` is called when the block is left by an exception, so that the thread does not wait any
    longer.
    """
    prefetcher = _Prefetcher(pieces)
    prefetcher.thread.start()
    try:
        yield prefetcher.take()
    except BaseException:  # the thread, which may wait, must end too
        if cancel is not None:
            cancel()
        raise
    finally:
        prefetcher.stopped.set()
        prefetcher.thread.join()


class _Prefetcher:
    """Hands pieces, or the error that ended them, from one thread to another."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="unpack", daemon=True)

    def take(self) -> Iterator[bytes]:
        """The pieces; raises what producing them raised."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        try:
            for piece in self._pieces:
                if not self._put(piece):
                    return
            self._put(None)
        except BaseException as error:  # it is raised again where the pieces are used
            self._put(error)

    def _put(self, item: bytes | BaseException | None) -> bool:
        while not self.stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False


class _ByteStream:
    """A stream of pieces, read in any lengths."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")
        self.taken_bytes = 0

    def exactly(self, length: int) -> bytes:
        """The next `length` bytes; fewer only at the end."""
        if len(self._left) >= length:
            out = bytes(self._left[:length])
            self._left = self._left[length:]
        else:
            out = b"".join(self.pieces(length, length, short=True))
        return out

    def pieces(self, length: int, most: int, *, short: bool = False) -> Iterator[memoryview]:
        """The next `length` bytes in pieces; raises CorruptDataError where they are missing."""
        while length:
            if not self._left:
                piece = next(self._pieces, b"")
                if not piece:
                    if short:
                        return
                    raise CorruptDataError("a layer ends in the middle of a file")
                self._left = memoryview(piece)
            count = min(length, most, len(self._left))
            taken, self._left = self._left[:count], self._left[count:]
            length -= count
            yield taken

    def skip(self, length: int) -> None:
        for _ in self.pieces(length, length):
            pass


class Members:
    """A tar stream's members one by one; the content of the last one can be read as `Content`.

    `on_bytes` is called with the number of bytes that were read, and may raise.
    """

    def __init__(self, pieces: Iterator[bytes], on_bytes: Callable[[int], None]) -> None:
        self._bytes = _ByteStream(pieces)
        self._on_bytes = on_bytes
        self._left = self._padding = 0
        self.segments: list[tuple[int, int]] | None = None

    def __iter__(self) -> Iterator[Member]:
        while (member := self._next()) is not None:
            yield member
            for _ in self.chunks(1 << 30):
                pass  # content that was not read
            self._bytes.exactly(self._padding)  # some programs omit the last member's

    def chunks(self, size_bytes: int) -> Iterator[memoryview]:
        """The current member's stored bytes that were not read yet."""
        while self._left:
            piece = next(self._bytes.pieces(self._left, size_bytes))
            self._left -= len(piece)
            yield piece

    def _header(self) -> bytes | None:
        """The next header block; None at the end of the archive."""
        block = self._bytes.exactly(BLOCK)
        if len(block) == BLOCK and tar_reader.is_end(block):
            if any(self._bytes.exactly(BLOCK)):  # programs that read on would see more members
                raise CorruptDataError("a layer has a block of zeros where a tar header should be")
            return None
        if not block:
            return None
        if len(block) != BLOCK:
            raise CorruptDataError("a layer ends in the middle of a tar header")
        tar_reader.check_sum(block)
        return block

    def _next(self) -> Member | None:
        pax = tar_reader.NO_PAX
        long_name = long_link = b""
        is_begun = False
        while (block := self._header()) is not None:
            flag = block[156:157]
            if flag not in (b"x", b"g", b"L", b"K"):
                member = tar_reader.parse_member(block, pax, long_name, long_link)
                self._begin(member)
                return member
            data = self._read_extension(block)
            is_begun = flag != b"g"
            if flag == b"x":
                pax = tar_reader.parse_pax(data)
            elif flag == b"L":
                long_name = tar_reader.text_of(data)
            elif flag == b"K":
                long_link = tar_reader.text_of(data)
            # A global pax header is not about one member; container programs ignore it too.
        if is_begun:
            raise CorruptDataError("a layer ends where a member should follow")
        return None

    def _read_extension(self, block: bytes) -> bytes:
        length = tar_reader.number(block[124:136], "a size")
        if not 0 <= length <= tar_reader.MAX_HEADER_BYTES:
            raise CorruptDataError(
                f"a tar header of {length} bytes is larger than {tar_reader.MAX_HEADER_BYTES}"
            )
        self._on_bytes(length + 2 * BLOCK)
        data = self._bytes.exactly(length)
        if len(data) != length:
            raise CorruptDataError("a layer ends in the middle of a tar header")
        self._bytes.skip(-length % BLOCK)
        return data

    def _begin(self, member: Member) -> None:
        self._on_bytes(BLOCK + member.stored_bytes)
        self._left = member.stored_bytes
        self._padding = -member.stored_bytes % BLOCK
        while member.sparse_goes_on:
            block = self._bytes.exactly(BLOCK)
            if len(block) != BLOCK:
                raise CorruptDataError("a layer ends in the middle of a tar header")
            tar_reader.add_old_segments(member, block[:504])
            member.sparse_goes_on = bool(block[504])
        if member.sparse_map_inside:
            self._read_map(member)
        if member.segments is not None:
            tar_reader.settle_segments(member, self._left)
        self.segments = member.segments

    def _read_map(self, member: Member) -> None:
        """Read the map of a sparse file: decimal lines, padded to a block, the count first."""
        text = bytearray()
        lines, wanted = 0, 1
        while lines < wanted:
            if self._left < BLOCK or len(text) > 40 * tar_reader.MAX_SEGMENTS:
                raise CorruptDataError("a sparse file's segments are damaged, or too many")
            block = b"".join(self._bytes.pieces(BLOCK, BLOCK))
            text += block
            lines += block.count(b"\n")
            self._left -= BLOCK
            if wanted == 1 and b"\n" in text:
                count = text.partition(b"\n")[0]
                if not count.isdigit() or len(count) > 9:
                    raise CorruptDataError("a sparse file's segments are damaged")
                wanted = 1 + 2 * int(count)
        member.segments = tar_reader.pairs(bytes(text).split(b"\n")[1:wanted])
