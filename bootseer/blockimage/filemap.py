"""Which file's bytes lie where in an image's data.

Mounting an image never needs it; it serves features that deal with files instead of bytes. Packs
name the files to be warmed, `show` commands name the files that a start read, and a trace is
carried over to the next version of an image by path and content. docs/block-image-format.md has the
bytes.
"""

from __future__ import annotations

import array
import bisect
import hashlib
import itertools
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import zstandard

from bootseer.blockimage.tree_entries import FileExtent
from bootseer.blocks.extents import Extent
from bootseer.blocks.trace.trace_file import FilePlace
from bootseer.blocks.zstd_frames import unpack_frame
from bootseer.errors import CorruptDataError

MAGIC = b"BSFILES\x01"
_HEADER = struct.Struct("<8sQQQQ")
_DIGEST_BYTES = 32
_MAX_OFFSET = (1 << 63) - 1
_WINDOW_BYTES = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a file map may claim."""

    packed_bytes: int = 256 << 20
    raw_bytes: int = 1 << 30
    files: int = 1 << 23
    extents: int = 1 << 24


LIMITS = Limits()


class Range(NamedTuple):
    """Bytes `[offset, offset + length)` of the file at `path`."""

    path: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class File:
    """One inode with content. `path` is the first of its names; `extents` leave holes out.

    `digest` is the sha256 of the content (of content with holes, see docs/block-image-format.md).
    """

    path: bytes
    size_bytes: int
    digest: bytes
    extents: tuple[FileExtent, ...]


class FileMap:
    """All files of an image, by rising path, over data of `data_bytes`."""

    def __init__(self, files: Sequence[File], data_bytes: int) -> None:
        self.files = files
        self.data_bytes = data_bytes
        self._starts: list[int] | None = None
        self._held: list[tuple[FileExtent, list[int]]] = []

    def ranges(self, extents: Iterable[tuple[int, int]]) -> list[Range]:
        """The files that these extents of the data belong to, in order; padding is of no file.

        Files of equal content share their bytes, and each has a page cache of its own: every one
        of them is named.
        """
        starts = self._index()
        out = []
        for offset, length in extents:
            end = offset + length
            at = max(0, bisect.bisect_right(starts, offset) - 1)
            while at < len(starts) and starts[at] < end:
                held, numbers = self._held[at]
                first = max(offset, held.data_offset)
                last = min(end, held.data_offset + held.length)
                if first < last:
                    within = held.file_offset + first - held.data_offset
                    out += [Range(self.files[n].path, within, last - first) for n in numbers]
                at += 1
        return out

    def places(self) -> dict[str, FilePlace]:
        """Each file's digest and data extents, as `trace_file.moves` compares two versions."""
        return {
            file.path.decode("utf-8", "surrogateescape"): FilePlace(
                f"{file.digest.hex()}:{file.size_bytes}",
                tuple(Extent(e.data_offset, e.length) for e in file.extents),
            )
            for file in self.files
        }

    def _index(self) -> list[int]:
        """Where each distinct extent starts; files of equal content have theirs in common."""
        if self._starts is None:
            owners: dict[FileExtent, list[int]] = {}
            for number, file in enumerate(self.files):
                for extent in file.extents:
                    owners.setdefault(extent, []).append(number)
            self._held = sorted(owners.items(), key=lambda item: item[0].data_offset)
            self._starts = [extent.data_offset for extent, _ in self._held]
        return self._starts

    def serialise(self) -> bytes:
        """The map as one zstd frame; the same map gives the same bytes (of one zstd version)."""
        paths = b"".join(file.path for file in self.files)
        extents = [extent for file in self.files for extent in file.extents]
        header = _HEADER.pack(MAGIC, len(self.files), len(extents), len(paths), self.data_bytes)
        columns = [
            array.array("I", [len(file.path) for file in self.files]),
            array.array("I", [len(file.extents) for file in self.files]),
            array.array("Q", [file.size_bytes for file in self.files]),
            array.array("Q", [extent.file_offset for extent in extents]),
            array.array("Q", [extent.data_offset for extent in extents]),
            array.array("Q", [extent.length for extent in extents]),
        ]
        digests = b"".join(file.digest for file in self.files)
        body = b"".join([header, *map(_little, columns), digests, paths])
        whole = body + hashlib.sha256(body).digest()
        return zstandard.ZstdCompressor(level=9).compress(whole)


def parse(data: bytes, *, limits: Limits = LIMITS, name: str = "the file map") -> FileMap:
    """Read a file map. Raises CorruptDataError for whatever is not a plausible one."""
    if len(data) > limits.packed_bytes:
        raise CorruptDataError(f"{name} has {len(data)} bytes, more than {limits.packed_bytes}")
    raw = unpack_frame(data, most_bytes=limits.raw_bytes, window_bytes=_WINDOW_BYTES, name=name)
    if len(raw) < _HEADER.size + _DIGEST_BYTES or not raw.startswith(MAGIC):
        raise CorruptDataError(f"{name} is none of a version that is known here")
    _, files, extents, paths_bytes, data_bytes = _HEADER.unpack_from(raw)
    wide = files * (4 + 4 + 8 + _DIGEST_BYTES) + extents * 24 + paths_bytes
    fits = _HEADER.size + wide + _DIGEST_BYTES == len(raw)
    if files > limits.files or extents > limits.extents or not fits:
        raise CorruptDataError(f"{name} is truncated, or has more files than are allowed")
    if hashlib.sha256(memoryview(raw)[:-_DIGEST_BYTES]).digest() != raw[-_DIGEST_BYTES:]:
        raise CorruptDataError(f"{name} is damaged; fetch or build it again")
    try:
        return FileMap(_files(raw, files, extents, paths_bytes, data_bytes), data_bytes)
    except ValueError as error:
        raise CorruptDataError(f"{name} is damaged or forged: {error}") from error


def _files(raw: bytes, files: int, extents: int, paths_bytes: int, data_bytes: int) -> list[File]:
    at = _HEADER.size
    columns = []
    for code, count in (("I", files), ("I", files), ("Q", files), *[("Q", extents)] * 3):
        column = array.array(code)
        column.frombytes(raw[at : at + count * column.itemsize])
        at += count * column.itemsize
        columns.append(_native(column))
    path_lengths, extent_counts, sizes, *rows = columns
    digests = raw[at : at + files * _DIGEST_BYTES]
    paths = raw[at + files * _DIGEST_BYTES : -_DIGEST_BYTES]
    if sum(path_lengths) != paths_bytes or sum(extent_counts) != extents:
        raise ValueError("its columns do not fit together")
    all_extents = list(map(FileExtent, *rows))
    out = []
    path_at = extent_at = 0
    for number, size in enumerate(sizes):
        path = paths[path_at : path_at + path_lengths[number]]
        path_at += path_lengths[number]
        own = tuple(all_extents[extent_at : extent_at + extent_counts[number]])
        extent_at += extent_counts[number]
        _check(path, size, own, data_bytes)
        digest = digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]
        out.append(File(path, size, digest, own))
    if any(a.path >= b.path for a, b in itertools.pairwise(out)):
        raise ValueError("its paths are not in order")
    return out


def _check(path: bytes, size: int, extents: tuple[FileExtent, ...], data_bytes: int) -> None:
    parts = path.split(b"/")
    if b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        raise ValueError(f"{path[:80]!r} is no path within an image")
    end = 0
    for extent in extents:
        if extent.file_offset < end or not extent.length:
            raise ValueError(f"extents of {path[:80]!r} are out of order")
        end = extent.file_offset + extent.length
        if extent.data_offset + extent.length > data_bytes:
            raise ValueError(f"an extent of {path[:80]!r} lies outside the data")
    if end > size or size > _MAX_OFFSET:
        raise ValueError(f"{path[:80]!r} is shorter than its extents")


def _little(column: array.array[int]) -> bytes:
    return _native(column).tobytes()


def _native(column: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column
