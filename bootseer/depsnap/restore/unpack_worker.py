"""A worker of an unpacking: takes frame numbers from a pipe, verifies, decodes, creates files.

It is a forked child (see `unpack`), so it may set the umask and ends with `os._exit`.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

from bootseer.depsnap.format.frames import read_frame
from bootseer.depsnap.format.index_records import Frame, Index
from bootseer.depsnap.format.unit_layout import BLOCK, Unit
from bootseer.depsnap.types import XAttrs
from bootseer.errors import BootseerError
from bootseer.system.regular_files import write_fully

TICKET = struct.Struct("<I")
"""The number of a frame to unpack, or STOP."""
STOP = 0xFFFFFFFF

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_EXISTING = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ZEROS = memoryview(bytes(4096))
_MOST_BUFFERS = 1000
"""Buffers in one call: Linux takes 1024 (IOV_MAX)."""
_UNSUPPORTED = (errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The file that all contents of a packed tree are written into.

    `places` has the offset of each entry's content, `length` is the file's.
    """

    descriptor: int
    places: list[int]
    length: int


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker needs.

    `roots` are descriptors, `root_of` has each entry's root. `mode`, `owner` and `xattrs` are to
    be set (owner None: leave). `split` are the files of several units: their parent makes them.
    With `packed` no files are made: all contents go into that one. `beat` is a pipe that gets a
    byte for each frame that was read, -1 for none.
    """

    archive: int
    index: Index
    roots: tuple[int, ...]
    root_of: list[int]
    mode: list[int]
    owner: list[tuple[int, int] | None]
    xattrs: dict[int, XAttrs]
    split: frozenset[int]
    now_ns: int
    packed: PackedFile | None = None
    beat: int = -1


def set_metadata(job: Job, number: int, descriptor: int) -> int:
    """Set owner, special mode bits, attributes and times of an open file.

    Returns how many attributes were lost. The access time is later than the mtime, so that
    `relatime` writes nothing at a first read.
    """
    lost = 0
    owner = job.owner[number]
    mode = job.mode[number]
    if owner is not None:
        os.fchown(descriptor, *owner)
    if number in job.split or mode & 0o7000:
        os.fchmod(descriptor, mode)
    if number in job.xattrs:
        lost = set_xattrs(descriptor, job.xattrs[number])
    os.utime(descriptor, ns=(job.now_ns, job.index.mtime_ns[number]))
    return lost


def set_xattrs(descriptor: int, xattrs: XAttrs) -> int:
    """Set extended attributes; returns how many the file system or lacking privileges refused."""
    lost = 0
    for name, value in xattrs:
        try:
            os.setxattr(descriptor, name, value)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            lost += 1
    return lost


def _write_buffers(descriptor: int, buffers: list[memoryview], offset: int) -> None:
    """Write buffers back to back at an offset of a file."""
    left = sum(map(len, buffers))
    while True:
        done = os.pwritev(descriptor, buffers, offset)
        left -= done
        if not left:
            return
        offset += done
        while done >= len(buffers[0]):
            done -= len(buffers.pop(0))
        buffers[0] = buffers[0][done:]


def work(job: Job, tickets: int, results: int, failed: mmap.mmap) -> None:
    """The whole life of a forked worker; never returns.

    Its report is a line of JSON in `results`; `failed` is shared with all workers, and one that
    fails sets it so that the others stop.
    """
    code = 1
    report: dict[str, object] = {}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.umask(0)
        report["lost"] = _Worker(job).run(tickets, failed)
        code = 0
    except OSError as error:
        report = {"errno": error.errno, "text": error.strerror, "file": str(error.filename or "")}
    except BootseerError as error:
        report = {"corrupt": str(error)}
    except BaseException as error:  # the parent raises whatever is reported
        report = {"crash": repr(error)[:500]}
    finally:
        if code:
            failed[0] = 1
        try:
            os.write(results, json.dumps(report).encode() + b"\n")
        finally:
            os._exit(code)


class _Worker:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = -1
        self._folder_fd = -1
        self._split = -1
        self._split_units: dict[int, Unit] = {}

    def run(self, tickets: int, failed: mmap.mmap) -> int:
        """Unpack frame after frame; returns how many attributes were lost.

        An end of the pipe without STOP means that the parent has ended: then nothing more may be
        written.
        """
        job = self._job
        decoder = zstandard.ZstdDecompressor()
        lost = 0
        while not failed[0]:
            ticket = os.read(tickets, TICKET.size)
            if len(ticket) != TICKET.size:
                raise ChildProcessError(errno.ECHILD, "the restoring process ended")
            (number,) = TICKET.unpack(ticket)
            if number == STOP:
                break
            frame = job.index.frames[number]
            data = memoryview(read_frame(job.archive, frame, decoder))
            if job.beat >= 0:
                os.write(job.beat, b".")
            if job.packed is not None:
                self._write_packed(job.packed, frame, data)
                continue
            flat = iter(frame.units)
            for entry in flat:
                block, at = next(flat), next(flat)
                if entry in job.split:
                    self._fill_block(entry, block, data[at:])
                else:
                    lost += self._create_file(entry, data, at)
        return lost

    def _write_packed(self, packed: PackedFile, frame: Frame, data: memoryview) -> None:
        """Write a frame's contents to their places, neighbours in one call."""
        buffers: list[memoryview] = []
        start = end = 0
        for place, part in self._contents(packed, frame, data):
            gap = place - end
            if buffers and (not 0 <= gap < len(_ZEROS) or len(buffers) > _MOST_BUFFERS):
                _write_buffers(packed.descriptor, buffers, start)
                buffers = []
            if not buffers:
                start = place
            elif gap:
                buffers.append(_ZEROS[:gap])
            buffers.append(part)
            end = place + len(part)
        if buffers:
            _write_buffers(packed.descriptor, buffers, start)

    def _contents(
        self, packed: PackedFile, frame: Frame, data: memoryview
    ) -> Iterator[tuple[int, memoryview]]:
        """A frame's contents: the place of each, and its bytes."""
        index = self._job.index
        flat = iter(frame.units)
        for entry in flat:
            block, at = next(flat), next(flat)
            size = index.size[entry]
            segments = index.segments.get(entry)
            if not size:
                continue
            place = packed.places[entry]
            if segments is None:
                start = block * BLOCK
                length = min(BLOCK, size - start)
                yield place + start, data[at : at + length]
                continue
            for offset, length in self._unit(entry, block).segments:
                yield place + offset, data[at : at + length]
                at += length

    def _unit(self, entry: int, block: int) -> Unit:
        """A unit of a split file; those of the last one are remembered."""
        if entry != self._split:
            self._split_units = {u.block: u for u in self._job.index.units_of(entry)}
            self._split = entry
        return self._split_units[block]

    def _create_file(self, entry: int, data: memoryview, at: int) -> int:
        """Create a file of one unit; returns how many attributes were lost."""
        job = self._job
        index = job.index
        parent = index.parent[entry]
        if parent != self._folder:
            self._enter(parent, job.roots[job.root_of[entry]])
        mode = job.mode[entry] & 0o777
        descriptor = os.open(index.name[entry], _NEW, mode, dir_fd=self._folder_fd)
        try:
            size = index.size[entry]
            if size:
                segments = index.segments.get(entry)
                if segments is None:
                    write_fully(descriptor, data[at : at + size])
                else:
                    os.ftruncate(descriptor, size)
                    _write_segments(descriptor, segments, data[at:])
            return set_metadata(job, entry, descriptor)
        finally:
            os.close(descriptor)

    def _fill_block(self, entry: int, block: int, data: memoryview) -> None:
        """Fill one block of a file that the parent has made."""
        job = self._job
        root = job.roots[job.root_of[entry]]
        descriptor = os.open(job.index.path[entry], _EXISTING, dir_fd=root)
        try:
            _write_segments(descriptor, self._unit(entry, block).segments, data)
        finally:
            os.close(descriptor)

    def _enter(self, folder: int, root: int) -> None:
        """Open the directory that the next files are created in."""
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1
        # No link can be on this path: links are made after all files, in a private directory.
        path = self._job.index.path[folder] or "."
        self._folder_fd = os.open(path, _FOLDER, dir_fd=root)
        self._folder = folder


def _write_segments(
    descriptor: int, segments: tuple[tuple[int, int], ...], data: memoryview
) -> None:
    at = 0
    for offset, length in segments:
        os.lseek(descriptor, offset, os.SEEK_SET)
        write_fully(descriptor, data[at : at + length])
        at += length
