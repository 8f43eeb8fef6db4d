"""The pack of a hot set: all that mounting needs, then the hot pages in the order of first touch.

docs/images.md has the bytes. A pack is `boot` and behind it `frames`, so that one request for the
blob brings a mount up and goes on with the pages that the start will ask for. The manifest that
names the pack has the boot's length and digest; the boot has those of every frame.

Frames arrive in order, one after the other. For a page whose frame is still far down the stream, it
is quicker to fetch that page's block by a request of its own than to wait.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import re
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import zstandard

from bootseer.blocks.extents import PAGE_BYTES, Extent
from bootseer.blocks.table import Unpacker
from bootseer.blocks.zstd_frames import unpack_frame
from bootseer.errors import CorruptDataError, UsageError
from bootseer.light_dataclasses import dataclass

MAGIC = b"BSPACK\0\x01"
FRAME_BYTES = 1 << 20  # raw bytes of a frame at most: what is decoded and answered at a time
LEVEL = 9
BOOT_LENGTH = "dev.bootseer.boot.length"  # annotations of the pack's descriptor
BOOT_DIGEST = "dev.bootseer.boot.digest"
_HEADER = struct.Struct("<8sIIQQQQ")  # magic, page, zero, data size, meta, table, index bytes
_COUNTS = struct.Struct("<IIIIII")  # frames, extents, warm ranges, paths, paths' bytes, fetches
_DIGEST_BYTES = 32
_LEADS_OUT = re.compile(rb"(?:\A|[/\0])\.{0,2}(?=[/\0]|\Z)")  # a part "", "." or ".." of a path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a pack may claim."""

    boot_bytes: int = 512 << 20  # packed
    raw_boot_bytes: int = 2 << 30
    frame_bytes: int = 16 << 20
    frames: int = 1 << 20
    extents: int = 1 << 22
    paths: int = 1 << 20
    path_bytes: int = 4096
    window_bytes: int = 128 << 20


LIMITS = Limits()


class Warm(NamedTuple):
    """Bytes `[offset, offset + length)` of the file `paths[path]` of the tree."""

    path: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Some hot pages, stored as one zstd frame.

    Its stored bytes are `[offset, offset + stored_length)`, counted from the end of the boot, and
    `digest` is their SHA-256. Its raw bytes are those of `extents` of the data, one behind the
    other. `warm` are the files' ranges that these pages are, in the same order.
    """

    offset: int
    stored_length: int
    digest: bytes
    extents: tuple[Extent, ...]
    warm: tuple[Warm, ...]

    @property
    def raw_bytes(self) -> int:
        """How many bytes the frame unpacks to."""
        return sum(extent.length for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Index:
    """What lies where in a pack.

    `fetch` are whole blocks to be fetched from the data itself, in this order and in parallel. It
    is used for a hot set that is most of its image; there are no frames then.
    """

    frames: tuple[Frame, ...]
    paths: tuple[bytes, ...]
    fetch: tuple[Extent, ...] = ()

    @property
    def frames_bytes(self) -> int:
        """Stored bytes of all frames together."""
        return sum(frame.stored_length for frame in self.frames)


EMPTY = Index((), ())


@dataclass(frozen=True, slots=True)
class Boot:
    """A pack's boot: EROFS metadata and the block table of the data, as bytes; and the index.

    The index is read by `index()`, apart, because a mount can go on without it.
    """

    meta: memoryview
    table: memoryview
    data_bytes: int
    index_data: memoryview
    page_bytes: int = PAGE_BYTES

    def index(self, *, limits: Limits = LIMITS) -> Index:
        """Read the index. Raises CorruptDataError for anything but a complete, plausible one."""
        try:
            return _Columns(self.index_data, limits).index(self)
        except (ValueError, struct.error) as error:
            raise CorruptDataError(f"the pack's index is damaged or forged: {error}") from error


def serialise_boot(
    meta: bytes, table: bytes, data_bytes: int, index: Index, *, level: int = LEVEL
) -> bytes:
    """A boot as stored: one zstd frame. The same input always gives the same bytes."""
    columns = serialise_index(index)
    sizes = (data_bytes, len(meta), len(table), len(columns))
    raw = b"".join([_HEADER.pack(MAGIC, PAGE_BYTES, 0, *sizes), meta, table, columns])
    return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(raw)


def parse_boot(data: bytes | bytearray | memoryview, *, limits: Limits = LIMITS) -> Boot:
    """Read a boot whose digest was checked. Raises CorruptDataError when it is none."""
    if len(data) > limits.boot_bytes:
        raise CorruptDataError(f"the pack's boot has {len(data)} bytes: more than is allowed")
    most_bytes, window_bytes = limits.raw_boot_bytes, limits.window_bytes
    raw = memoryview(
        unpack_frame(data, most_bytes=most_bytes, window_bytes=window_bytes, name="the pack's boot")
    )
    try:
        magic, page, zero, data_bytes, *sizes = _HEADER.unpack_from(raw)
    except struct.error as error:
        raise CorruptDataError("the pack's boot is shorter than its header") from error
    if magic != MAGIC or page != PAGE_BYTES or zero:
        raise CorruptDataError("the pack is none of a version that is known here")
    if _HEADER.size + sum(sizes) != len(raw) or data_bytes >= 1 << 63:
        raise CorruptDataError("the pack's boot does not have the sizes that it claims")
    meta, table = _HEADER.size + sizes[0], _HEADER.size + sizes[0] + sizes[1]
    return Boot(raw[_HEADER.size : meta], raw[meta:table], data_bytes, raw[table:])


def open_frame(frame: Frame, stored: bytes | bytearray | memoryview, raw: memoryview) -> None:
    """Verify a frame's stored bytes and unpack them into `raw`, which is as long as they are.

    Raises CorruptDataError; `raw` may have been written to then.
    """
    what = f"the pack's frame at {frame.offset}"
    if len(stored) != frame.stored_length or hashlib.sha256(stored).digest() != frame.digest:
        raise CorruptDataError(f"{what} does not match its digest")
    try:
        if zstandard.frame_content_size(stored) != len(raw):
            raise CorruptDataError(f"{what} has another size")
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"{what} is no intact zstd frame: {error}") from error
    Unpacker().unpack(memoryview(stored), raw, what)


def serialise_index(index: Index) -> bytes:
    """The index as little-endian columns. Raises UsageError for what they cannot hold."""
    extents = [extent for frame in index.frames for extent in frame.extents]
    warm = [one for frame in index.frames for one in frame.warm]
    paths = b"".join(index.paths)
    counts = (len(index.frames), len(extents), len(warm), len(index.paths), len(paths))
    try:
        return b"".join(
            [
                _COUNTS.pack(*counts, len(index.fetch)),
                _column("I", (frame.stored_length for frame in index.frames)),
                _column("I", (len(frame.extents) for frame in index.frames)),
                _column("I", (len(frame.warm) for frame in index.frames)),
                b"".join(frame.digest for frame in index.frames),
                _column("Q", (extent.offset for extent in extents)),
                _column("I", (extent.length for extent in extents)),
                _column("I", (one.path for one in warm)),
                _column("Q", (one.offset for one in warm)),
                _column("I", (one.length for one in warm)),
                _column("I", (len(path) for path in index.paths)),
                paths,
                _column("Q", (extent.offset for extent in index.fetch)),
                _column("Q", (extent.length for extent in index.fetch)),
            ]
        )
    except (OverflowError, struct.error) as error:
        raise UsageError(f"a hot set of this size fits no pack: {error}") from error


def _column(kind: str, values: Iterable[int]) -> bytes:
    column = array.array(kind, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


class _Columns:
    """Reads an index's bytes from front to back; raises ValueError at what cannot be."""

    def __init__(self, data: memoryview, limits: Limits) -> None:
        self._data, self._limits = data, limits
        counts = _COUNTS.unpack_from(data)
        frames, extents, warm, paths, _, fetch = counts
        most = (limits.frames, limits.extents, limits.extents, limits.paths, limits.extents)
        if any(map(int.__gt__, (frames, extents, warm, paths, fetch), most)):
            raise ValueError("it asks for more than is allowed")
        self._counts = counts
        self._at = _COUNTS.size

    def _take(self, size: int) -> memoryview:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise ValueError("it is truncated")
        self._at += size
        return taken

    def _numbers(self, kind: str, count: int) -> Sequence[int]:
        column = array.array(kind)
        column.frombytes(self._take(count * column.itemsize))
        if sys.byteorder == "big":
            column.byteswap()
        return column

    def index(self, boot: Boot) -> Index:
        frames, extents, warm, paths, path_bytes, fetch = self._counts
        lengths = self._numbers("I", frames)
        cuts = self._numbers("I", frames), self._numbers("I", frames)
        digests = bytes(self._take(frames * _DIGEST_BYTES))
        pages = list(map(Extent, self._numbers("Q", extents), self._numbers("I", extents)))
        numbers, starts, sizes = (self._numbers(kind, warm) for kind in "IQI")
        ranges = list(map(Warm, numbers, starts, sizes))
        names = self._paths(paths, path_bytes)
        whole = list(map(Extent, self._numbers("Q", fetch), self._numbers("Q", fetch)))
        if self._at != len(self._data):
            raise ValueError("something follows it")
        if numbers and max(numbers) >= paths:
            raise ValueError("a range of a file that it does not name")
        if min(sizes, default=1) == 0 or max(starts, default=0) >= 1 << 62:
            raise ValueError("a range that no file has")
        _check_extents(pages, boot.data_bytes, boot.page_bytes)
        _check_extents(whole, boot.data_bytes, boot.page_bytes)
        made = self._frames(lengths, cuts, digests, pages, ranges)
        return Index(made, names, tuple(whole))

    def _paths(self, count: int, size: int) -> tuple[bytes, ...]:
        lengths = self._numbers("I", count)
        joined = bytes(self._take(size))
        ends = list(itertools.accumulate(lengths, initial=0))
        if ends[-1] != size or max(lengths, default=0) > self._limits.path_bytes:
            raise ValueError("paths of other lengths than it says")
        paths = tuple(joined[start:end] for start, end in itertools.pairwise(ends))
        if count and (joined.count(b"\0") or _LEADS_OUT.search(b"\0".join(paths))):
            raise ValueError("a path that could lead out of the tree")
        return paths

    def _frames(
        self,
        lengths: Sequence[int],
        cuts: tuple[Sequence[int], Sequence[int]],
        digests: bytes,
        pages: list[Extent],
        ranges: list[Warm],
    ) -> tuple[Frame, ...]:
        if sum(cuts[0]) != len(pages) or sum(cuts[1]) != len(ranges):
            raise ValueError("frames that do not share out what it lists")
        out = []
        offset = page = warm = 0
        for number, stored in enumerate(lengths):
            digest = digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]
            upto, behind = page + cuts[0][number], warm + cuts[1][number]
            frame = Frame(
                offset, stored, digest, tuple(pages[page:upto]), tuple(ranges[warm:behind])
            )
            raw_bytes = frame.raw_bytes
            if (
                not 0 < raw_bytes <= self._limits.frame_bytes
                or not 0 < stored <= 2 * raw_bytes + 64
            ):
                raise ValueError(f"a frame of {raw_bytes} bytes stored in {stored}")
            out.append(frame)
            offset, page, warm = offset + stored, upto, behind
        return tuple(out)


def _check_extents(extents: Sequence[Extent], size_bytes: int, page_bytes: int) -> None:
    """Whole pages inside the data, none of them twice."""
    end = 0
    for extent in sorted(extents):
        if extent.length == 0 or extent.offset < end:
            raise ValueError(f"the extent at {extent.offset} is empty, or overlaps another")
        end = extent.offset + extent.length
        if extent.offset % page_bytes or (end % page_bytes and end != size_bytes):
            raise ValueError(f"the extent at {extent.offset} does not have whole pages")
    if end > size_bytes:
        raise ValueError(f"an extent that ends at {end}, behind the data's end")
