"""File traces: which ranges of which files starts touched. Pure.

A file trace is a list of files and a trace (`blocks.trace.trace_file`) of one virtual object, in
which these files follow one another, each from the start of a page. The object's name is the digest
of the list, so traces are merged and carried over as those of any object. A file is unchanged as
long as path, size and modification time are.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import zstandard

from bootseer.blocks.extents import PAGE_BYTES, Extent
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.recorder import Recorder
from bootseer.blocks.trace.trace_file import FilePlace, Touched, Trace
from bootseer.blocks.zstd_frames import unpack_frame
from bootseer.errors import CorruptDataError, UsageError

MAGIC = b"BSFILES\x01"
VERSION = 1
MAX_FILES = 1 << 18
MAX_PATH_BYTES = 4095
MAX_FILE_BYTES = 1 << 48
MAX_LIST_BYTES = 128 << 20
MAX_RECORDINGS = 1 << 20
MAX_BYTES = len(MAGIC) + 4 + (32 << 20) + traces.LIMITS.packed_bytes
_LENGTH = struct.Struct("<I")
_SECOND_NS = 1_000_000_000


class TracedFile(NamedTuple):
    """One file as it was when it was recorded. `path` is absolute and without symlinks."""

    path: str
    size_bytes: int
    mtime_ns: int

    def is_same(self, size_bytes: int, mtime_ns: int) -> bool:
        """Whether a file of this size and time probably has the same bytes.

        Some layers keep only whole seconds, so a time without a fraction equals any within it.
        """
        if size_bytes != self.size_bytes:
            return False
        is_coarse = 0 in (mtime_ns % _SECOND_NS, self.mtime_ns % _SECOND_NS)
        if is_coarse:
            return mtime_ns // _SECOND_NS == self.mtime_ns // _SECOND_NS
        return mtime_ns == self.mtime_ns


class Touch(NamedTuple):
    """Bytes `[offset, offset + length)` of a file, first read so long after the start's begin."""

    path: str
    offset: int
    length: int
    first_touch_ms: int


class FileRange(NamedTuple):
    """Bytes `[offset, offset + length)` of file number `file` of a trace."""

    file: int
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class FileTrace:
    """What starts of one workload touched.

    `recordings` counts all that were merged, `trace.starts` only the full ones.
    """

    files: tuple[TracedFile, ...]
    trace: Trace
    recordings: int = 1

    @property
    def workload(self) -> str:
        """The workload of the starts."""
        return self.trace.workload

    def ranges(self, share: float = 0.0) -> list[FileRange]:
        """What at least that share of the starts touched, in the order of first touch."""
        begins = offsets(self.files)[:-1]
        out: list[FileRange] = []
        for extent in self.trace.select_hot(share).extents:
            out += _split(extent, begins, self.files)
        return out


def offsets(files: Sequence[TracedFile]) -> list[int]:
    """The offset of each file in the virtual object, and then the object's size."""
    out: list[int] = []
    at = 0
    for file in files:
        out.append(at)
        at += -(-file.size_bytes // PAGE_BYTES) * PAGE_BYTES
    return [*out, at]


def _split(
    extent: Touched, begins: Sequence[int], files: Sequence[TracedFile]
) -> Iterable[FileRange]:
    """The ranges of files in an extent, which may reach over several files."""
    at, end = extent.offset, extent.offset + extent.length
    number = bisect.bisect_right(begins, at) - 1
    while at < end and number < len(files):
        file_end = begins[number] + files[number].size_bytes
        if at < file_end:
            yield FileRange(number, at - begins[number], min(end, file_end) - at)
        number += 1
        at = begins[number] if number < len(files) else end


def trace_of_touches(
    files: Mapping[str, TracedFile], touches: Iterable[Touch], workload: str, *, full: bool
) -> FileTrace:
    """The trace of one start. Touches of files that are not listed are ignored."""
    known = [touch for touch in touches if touch.path in files and touch.length > 0]
    names = sorted({touch.path for touch in known})[:MAX_FILES]
    listed = tuple(files[name] for name in names)
    begins = offsets(listed)
    begin_of = dict(zip(names, begins, strict=False))
    name, size = object_name(listed), begins[-1]
    clock = _Clock()
    recorder = Recorder(name, size, workload, window_s=float("inf"), clock=clock)
    for touch in sorted(known, key=lambda touch: touch.first_touch_ms):
        if touch.path in begin_of:
            length = min(touch.length, files[touch.path].size_bytes - touch.offset)
            clock.now_s = touch.first_touch_ms / 1000
            recorder.touch(begin_of[touch.path] + touch.offset, length)
    return prune(FileTrace(listed, recorder.trace(full=full)))


class _Clock:
    """A recorder's clock that is set to the time of each touch."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def object_name(files: Sequence[TracedFile]) -> str:
    """The virtual object's name: the digest of its list of files."""
    return "sha256:" + hashlib.sha256(_list_bytes(files)).hexdigest()


def _list_bytes(files: Sequence[TracedFile]) -> bytes:
    return json.dumps(files, separators=(",", ":")).encode("ascii")


def merge(several: Sequence[FileTrace]) -> FileTrace:
    """One trace of all; for a file that changed, only the later traces count.

    Raises UsageError for no trace, or for traces of different workloads.
    """
    if not several:
        raise UsageError("there is no trace to merge")
    if len({one.workload for one in several}) > 1:
        raise UsageError("the traces are of different workloads; merge those of one")
    newest: dict[str, TracedFile] = {}
    for one in several:
        for file in one.files:
            known = newest.get(file.path)
            # An unchanged file keeps its first time, which may be finer or coarser.
            if known is None or not known.is_same(file.size_bytes, file.mtime_ns):
                newest[file.path] = file
    files = tuple(newest[path] for path in sorted(newest))[:MAX_FILES]
    begins = offsets(files)
    name, size = object_name(files), begins[-1]
    new = {f.path: (f, at) for f, at in zip(files, begins, strict=False)}
    carried = [traces.carry_over(o.trace, _moves(o.files, new), name, size) for o in several]
    recordings = min(sum(one.recordings for one in several), MAX_RECORDINGS)
    return prune(FileTrace(files, traces.merge(carried), recordings))


def _moves(
    old: Sequence[TracedFile], new: Mapping[str, tuple[TracedFile, int]]
) -> list[traces.Move]:
    old_places: dict[str, FilePlace] = {}
    new_places: dict[str, FilePlace] = {}
    for file, old_offset in zip(old, offsets(old), strict=False):
        new_file, new_offset = new.get(file.path, (None, 0))
        if new_file is not None and new_file.is_same(file.size_bytes, file.mtime_ns):
            length = -(-file.size_bytes // PAGE_BYTES) * PAGE_BYTES
            old_places[file.path] = FilePlace(file.path, (Extent(old_offset, length),))
            new_places[file.path] = FilePlace(file.path, (Extent(new_offset, length),))
    return traces.moves(old_places, new_places)


def prune(one: FileTrace, share: float = 0.0) -> FileTrace:
    """The trace without extents of a smaller share, and without files that have none."""
    hot = one.trace.select_hot(share)
    begins = offsets(one.files)
    kept_numbers = sorted({r.file for e in hot.extents for r in _split(e, begins[:-1], one.files)})
    kept = tuple(one.files[number] for number in kept_numbers)
    if len(kept) == len(one.files):
        return dataclasses.replace(one, trace=hot)
    new = {f.path: (f, at) for f, at in zip(kept, offsets(kept), strict=False)}
    size = offsets(kept)[-1]
    trace = traces.carry_over(hot, _moves(one.files, new), object_name(kept), size)
    return FileTrace(kept, trace, one.recordings)


def serialise(one: FileTrace) -> bytes:
    """The trace in its file format."""
    document = {"version": VERSION, "recordings": one.recordings, "files": one.files}
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    listed = zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text)
    return MAGIC + _LENGTH.pack(len(listed)) + listed + traces.serialise(one.trace)


def parse(data: bytes, *, name: str = "the trace") -> FileTrace:
    """Read a trace's file format. Raises CorruptDataError for anything implausible."""
    head = len(MAGIC) + _LENGTH.size
    if len(data) > MAX_BYTES or data[: len(MAGIC)] != MAGIC or len(data) < head:
        raise CorruptDataError(f"{name} is no trace of files that is known here")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if length > len(data) - head:
        raise CorruptDataError(f"{name} is cut short")
    document = _document(data[head : head + length], name)
    try:
        files = tuple(_checked_file(row) for row in document["files"])
        recordings = document["recordings"]
        if type(recordings) is not int or not 1 <= recordings <= MAX_RECORDINGS:
            raise ValueError("a count of recordings that is none")
        if len(files) > MAX_FILES or len({file.path for file in files}) != len(files):
            raise ValueError("too many files, or one of them twice")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{name} is damaged or forged: {error}") from error
    trace = traces.parse(data[head + length :], name=name)
    if (trace.object, trace.size_bytes, trace.page_bytes) != (
        object_name(files),
        offsets(files)[-1],
        PAGE_BYTES,
    ):
        raise CorruptDataError(f"{name} is damaged or forged: its ranges are of other files")
    return FileTrace(files, trace, recordings)


def _document(packed: bytes, name: str) -> dict[str, Any]:
    window_bytes = traces.LIMITS.window_bytes
    raw = unpack_frame(packed, most_bytes=MAX_LIST_BYTES, window_bytes=window_bytes, name=name)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise CorruptDataError(f"{name} is none of a version that is known here")
    return document


def _checked_file(row: object) -> TracedFile:
    if not isinstance(row, list) or len(row) != 3:
        raise ValueError("a file that is none")
    path, size_bytes, mtime_ns = row
    if not isinstance(path, str) or not is_plain_path(path):
        raise ValueError(f"{str(path)[:80]!r} is no absolute path without detours")
    if type(size_bytes) is not int or not 1 <= size_bytes <= MAX_FILE_BYTES:
        raise ValueError(f"{path[:80]!r} has an impossible size")
    if type(mtime_ns) is not int or abs(mtime_ns) >= 1 << 63:
        raise ValueError(f"{path[:80]!r} has an impossible time")
    return TracedFile(path, size_bytes, mtime_ns)


def is_plain_path(path: str) -> bool:
    """Whether a path is absolute and has no empty, `.` or `..` parts and no NUL."""
    if "\0" in path or not path.startswith("/") or path == "/":
        return False
    try:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            return False
    except UnicodeEncodeError:
        return False
    return all(part not in ("", ".", "..") for part in path[1:].split("/"))
