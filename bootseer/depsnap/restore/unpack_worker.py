"""One restoring process: takes frame numbers from a pipe, verifies, decodes, creates files.

Runs in a forked child (see `unpack`), so it may set the umask and ends with `os._exit`.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import struct
import time
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
STOP = 0xFFFFFFFF

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ZEROS = memoryview(bytes(4096))
_MOST_PIECES = 1000
"""Buffers in one call: Linux takes 1024 (IOV_MAX)."""
_UNSUPPORTED = (errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Packed:
    """Where contents go that become one file: its descriptor, and each entry's place in it."""

    descriptor: int
    places: list[int]


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker needs. `mode` and `owner` are as they shall be set (owner None: leave).

    With `packed` no files are made: all contents go into one. `beat` is a pipe that gets a byte
    for each frame that was read, -1 for none.
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
    packed: Packed | None = None
    beat: int = -1


def set_metadata(job: Job, number: int, descriptor: int) -> int:
    """Owner, special mode bits, attributes and times of an open file; attributes lost.

    The access time is later than the mtime, so that `relatime` writes nothing at a first read.
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
    """Set extended attributes; how many this file system or privilege refuses is returned."""
    lost = 0
    for name, value in xattrs:
        try:
            os.setxattr(descriptor, name, value)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            lost += 1
    return lost


def _write_row(descriptor: int, row: list[memoryview], offset: int) -> None:
    """Write buffers back to back at a place of a file."""
    left = sum(map(len, row))
    while True:
        done = os.pwritev(descriptor, row, offset)
        left -= done
        if not left:
            return
        offset += done
        while done >= len(row[0]):
            done -= len(row.pop(0))
        row[0] = row[0][done:]


def child(job: Job, tickets: int, results: int, failed: mmap.mmap) -> None:
    """The whole life of a forked worker; never returns."""
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
    except BaseException as error:  # the parent must hear of any end; it raises what it is told
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
        self._large = -1
        self._large_units: dict[int, Unit] = {}

    def run(self, tickets: int, failed: mmap.mmap) -> int:
        """Restore frame after frame; attributes lost. An end of the pipe without STOP means that
        the parent is gone: then nothing more may be written."""
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
                self._pack(job.packed, frame, data)
                continue
            flat = iter(frame.units)
            for entry in flat:
                block, at = next(flat), next(flat)
                if entry in job.split:
                    self._part(entry, block, data[at:])
                else:
                    lost += self._whole(entry, data, at)
        return lost

    def _pack(self, packed: Packed, frame: Frame, data: memoryview) -> None:
        """Write a frame's contents to their places, neighbours in one call."""
        row: list[memoryview] = []
        start = end = 0
        for place, part in self._pieces(packed, frame, data):
            gap = place - end
            if row and (not 0 <= gap < len(_ZEROS) or len(row) > _MOST_PIECES):
                _write_row(packed.descriptor, row, start)
                row = []
            if not row:
                start = place
            elif gap:
                row.append(_ZEROS[:gap])
            row.append(part)
            end = place + len(part)
        if row:
            _write_row(packed.descriptor, row, start)

    def _pieces(
        self, packed: Packed, frame: Frame, data: memoryview
    ) -> Iterator[tuple[int, memoryview]]:
        """A frame's contents: where each goes, and its bytes."""
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
            if entry != self._large:
                self._large_units = {u.block: u for u in index.units_of(entry)}
                self._large = entry
            for offset, length in self._large_units[block].segments:
                yield place + offset, data[at : at + length]
                at += length

    def _whole(self, entry: int, data: memoryview, at: int) -> int:
        """Create a file of one unit."""
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
                    self._segments(descriptor, segments, data[at:])
            return set_metadata(job, entry, descriptor)
        finally:
            os.close(descriptor)

    def _part(self, entry: int, block: int, data: memoryview) -> None:
        """Fill one block of a file that the parent has made."""
        job = self._job
        if entry != self._large:
            self._large_units = {u.block: u for u in job.index.units_of(entry)}
            self._large = entry
        root = job.roots[job.root_of[entry]]
        descriptor = os.open(job.index.path[entry], _OLD, dir_fd=root)
        try:
            self._segments(descriptor, self._large_units[block].segments, data)
        finally:
            os.close(descriptor)

    @staticmethod
    def _segments(descriptor: int, segments: tuple[tuple[int, int], ...], data: memoryview) -> None:
        at = 0
        for offset, length in segments:
            os.lseek(descriptor, offset, os.SEEK_SET)
            write_fully(descriptor, data[at : at + length])
            at += length

    def _enter(self, folder: int, root: int) -> None:
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1
        # No link can stand in the way: links are made after all files, in a private directory.
        path = self._job.index.path[folder] or "."
        self._folder_fd = os.open(path, _FOLDER, dir_fd=root)
        self._folder = folder


def now_ns() -> int:
    return time.time_ns()
