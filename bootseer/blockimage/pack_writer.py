"""Making the pack of a hot set: what starts touched, read from the image and packed in order."""

from __future__ import annotations

import hashlib
import posixpath
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Protocol

import zstandard

from bootseer.blockimage.filemap import File, FileMap
from bootseer.blockimage.pack_format import (
    FRAME_BYTES,
    LEVEL,
    Frame,
    Index,
    Warm,
    serialise_boot,
)
from bootseer.blocks.extents import PAGE_BYTES, Extent
from bootseer.blocks.trace.replay import plan_replay
from bootseer.blocks.trace.trace_file import Trace
from bootseer.errors import UsageError

WHOLE_SHARE = 0.8  # a hot set of so much of its image is fetched as the image, block by block
_AHEAD = 4  # frames under way a thread
ReadRaw = Callable[[int, memoryview], None]


class FileRanges(Protocol):
    """What packing asks of a file map."""

    def ranges(self, data_extents: Iterable[Extent]) -> Sequence[tuple[bytes, int, int]]:
        """Which files' ranges (path, offset, length) lie in these extents of the data, in order."""


@dataclass(frozen=True, slots=True)
class PackInfo:
    """A pack that was written. Digests are `sha256:…`; `hot_bytes` are raw."""

    size_bytes: int
    digest: str
    boot_length: int
    boot_digest: str
    frames: int
    hot_bytes: int
    fetch_bytes: int


def owners(files: FileMap, extents: Sequence[tuple[int, int]], most: int = 3) -> FileMap:
    """The files that were probably read, where several have the content that was touched.

    Each file has a page cache of its own, and the data does not show which of them a start read.
    Those next to other touched files are likelier: `most` of these are kept, else the first file.
    """
    groups: dict[tuple[bytes, int], list[File]] = {}
    for file in files.files:
        groups.setdefault((file.digest, file.size_bytes), []).append(file)
    single = [group[0] for group in groups.values() if len(group) == 1]
    lone = FileMap(single, files.data_bytes)
    warm = {posixpath.dirname(one.path) for one in lone.ranges(extents)}
    kept = list(single)
    for group in groups.values():
        if len(group) > 1:
            near = [file for file in group if posixpath.dirname(file.path) in warm]
            kept += near[:most] or group[:1]
    return FileMap(sorted(kept, key=lambda file: file.path), files.data_bytes)


def plan_frames(
    extents: Iterable[tuple[int, int]], *, frame_bytes: int = FRAME_BYTES
) -> list[tuple[Extent, ...]]:
    """Share out extents to frames of at most `frame_bytes`, in their order; neighbours join."""
    frames: list[tuple[Extent, ...]] = []
    current: list[Extent] = []
    room = frame_bytes
    for extent in extents:
        at, left = extent
        while left:
            part = min(left, room)
            if current and current[-1].end == at:
                current[-1] = Extent(current[-1].offset, current[-1].length + part)
            else:
                current.append(Extent(at, part))
            at, left, room = at + part, left - part, room - part
            if not room:
                frames.append(tuple(current))
                current, room = [], frame_bytes
    return [*frames, tuple(current)] if current else frames


def build_pack(
    trace: Trace,
    *,
    meta: bytes,
    table: bytes,
    key: str,
    block_bytes: int,
    files: FileRanges,
    read_raw: ReadRaw,
    out: IO[bytes],
    threads: int = 2,
    whole_share: float = WHOLE_SHARE,
    level: int = LEVEL,
    spool_dir: str | None = None,
) -> PackInfo:
    """Write the pack of a trace (with what too few starts touched already dropped) to `out`.

    `key` is the source's key of the image's data, `meta` and `table` are as the image has them.
    `read_raw(offset, buffer)` fills a buffer from the data, verified; it is called from one thread,
    in the order of the frames. Frames are kept in `spool_dir` until all are known. The same input
    always gives the same bytes. Raises UsageError when the trace is of another object, and what
    `read_raw` raises.
    """
    if trace.object != key:
        raise UsageError(
            f"the trace is of {trace.object}, not of this image ({key}); carry it over first"
        )
    if trace.page_bytes % PAGE_BYTES:
        raise UsageError(f"a trace of pages of {trace.page_bytes} bytes fits no pack")
    if trace.size_bytes and trace.touched_bytes() >= whole_share * trace.size_bytes:
        index = Index((), (), tuple(plan_replay(trace, block_bytes)))
        return _write(meta, table, trace.size_bytes, index, None, out, level)
    plan = plan_frames((extent.offset, extent.length) for extent in trace.extents)
    paths: dict[bytes, int] = {}
    with tempfile.TemporaryFile(prefix="bootseer-pack-", dir=spool_dir) as spool:
        frames: list[Frame] = []
        offset = 0
        for extents, stored in zip(plan, _pack_frames(plan, read_raw, threads, level), strict=True):
            warm = warm_of(files.ranges(extents), paths)
            digest = hashlib.sha256(stored).digest()
            frames.append(Frame(offset, len(stored), digest, extents, warm))
            spool.write(stored)
            offset += len(stored)
        spool.seek(0)
        index = Index(tuple(frames), tuple(paths))
        return _write(meta, table, trace.size_bytes, index, spool, out, level)


def _pack_frames(
    plan: Sequence[tuple[Extent, ...]], read_raw: ReadRaw, threads: int, level: int
) -> Iterator[bytes]:
    """The frames' stored bytes in order: read by the caller's thread, compressed by others."""
    flying: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        for extents in plan:
            raw = memoryview(bytearray(sum(extent.length for extent in extents)))
            at = 0
            for extent in extents:
                read_raw(extent.offset, raw[at : at + extent.length])
                at += extent.length
            flying.append(pool.submit(_compress_frame, raw, level))
            if len(flying) >= threads * _AHEAD:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


def _compress_frame(raw: memoryview, level: int) -> bytes:
    # A compressor belongs to one thread at a time; a new one costs nothing compared with a frame.
    return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(raw)


def warm_of(ranges: Iterable[tuple[bytes, int, int]], paths: dict[bytes, int]) -> tuple[Warm, ...]:
    """Name files by number; ranges that follow one another in a file join."""
    out: list[Warm] = []
    for path, offset, length in ranges:
        number = paths.setdefault(path.lstrip(b"/"), len(paths))
        if out and out[-1].path == number and out[-1].offset + out[-1].length == offset:
            out[-1] = Warm(number, out[-1].offset, out[-1].length + length)
        elif length:
            out.append(Warm(number, offset, length))
    return tuple(out)


class _Hashing:
    """Writes on, counting and hashing what passes."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes, /) -> int:
        self._out.write(data)
        self._hash.update(data)
        self.size_bytes += len(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _write(
    meta: bytes,
    table: bytes,
    data_bytes: int,
    index: Index,
    frames: IO[bytes] | None,
    out: IO[bytes],
    level: int,
) -> PackInfo:
    hashing = _Hashing(out)
    hashing.write(serialise_boot(meta, table, data_bytes, index, level=level))
    boot_length, boot_digest = hashing.size_bytes, hashing.digest
    if frames is not None:
        shutil.copyfileobj(frames, hashing, 1 << 20)
    return PackInfo(
        hashing.size_bytes,
        hashing.digest,
        boot_length,
        boot_digest,
        len(index.frames),
        sum(frame.raw_bytes for frame in index.frames),
        sum(extent.length for extent in index.fetch),
    )
