"""A download that is not complete: what has arrived of it, under names of its own.

Next to `DST` lie `.DST.bootseer-part` (a file or a folder) and `.DST.bootseer-get` (a note of what
has arrived, locked while a get is running). Only the last step gives the destination its name. The
note counts only for the very file or folder that it was written for, at its full size.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from bootseer.context_managers import Closing
from bootseer.errors import BusyError, NoSpaceError, OsAction, UsageError, from_os_error
from bootseer.system import file_lock
from bootseer.system.atomic import sync_folder
from bootseer.system.file_lock import FileLock
from bootseer.system.processes import boot_id

SAVE_S = 1.0
NOTE_LIMIT_BYTES = 256 << 20


class ArrivedRange(NamedTuple):
    """Bytes `[start, end)` of a file that were written; `digest` where nothing else checks them."""

    start: int
    end: int
    digest: str = ""


class PartialDownload(Closing):
    """One destination that is being filled; as a context manager it is closed at the end."""

    def __init__(self, destination: str, key: str, *, size_bytes: int | None) -> None:
        """`key` names the bytes; `size_bytes` is a single file's, None means a folder."""
        folder, base = os.path.split(destination)
        self.destination = destination
        self.part = f"{folder}/.{base}.bootseer-part"
        self._key, self._size_bytes = key, size_bytes
        self._note = f"{folder}/.{base}.bootseer-get"
        self._lock = threading.Lock()
        self._saved_s = 0.0
        self._head: dict[str, Any] = {}
        self._note_lock: FileLock | None = None
        self._arrived: dict[str, list[ArrivedRange]] = {}

    @classmethod
    def open(
        cls, destination: str, key: str, *, size_bytes: int | None, resume: bool
    ) -> PartialDownload:
        """Begin to fill a destination, with `resume` from what an interrupted get left.

        Raises BusyError when another get fills the same destination, UsageError for one that
        cannot be filled.
        """
        _check_destination(destination, is_folder=size_bytes is None)
        download = cls(destination, key, size_bytes=size_bytes)
        download._lock_note()
        try:
            with OsAction(f"write {download.part}"):
                download._make_part(resume=resume)
        except BaseException:  # else the lock stays until this process ends
            download.close()
            raise
        return download

    def _make_part(self, *, resume: bool) -> None:
        if resume:
            self._arrived = self._read_note()
        if self._arrived:
            _make_writable(self.part)
        else:
            _remove(self.part)
        if self._size_bytes is None:
            os.makedirs(self.part, mode=0o700, exist_ok=True)
        else:
            self.make("", self._size_bytes)
        self._head = {"key": self._key, "boot": _boot_id(), "part": _identity(self.part)}
        self.save()

    def path(self, inside: str) -> str:
        """Where a file of the checkpoint is being written; "" is the single file."""
        return f"{self.part}/{inside}" if inside else self.part

    def make(self, inside: str, size_bytes: int) -> None:
        """Make a file of its final length, or use the one that an interrupted get left."""
        path = self.path(inside)
        with OsAction(f"write {path}"), open_fd(path, os.O_RDWR | os.O_CREAT) as fd:
            os.ftruncate(fd, size_bytes)

    def find_digest(self, inside: str, offset: int, length: int) -> str | None:
        """The digest noted with these bytes, "" where there is none; None: they never arrived.

        That they are still there must be checked, by the digest or otherwise.
        """
        end = offset + length
        with self._lock:
            ranges = tuple(self._arrived.get(inside, ()))
        for arrived in ranges:
            is_whole = (arrived.start, arrived.end) == (offset, end)
            if is_whole or (not arrived.digest and arrived.start <= offset and end <= arrived.end):
                return arrived.digest
        return None

    def add(self, arrived: list[tuple[str, ArrivedRange]]) -> None:
        """Note what has been written; the note is saved now and then."""
        with self._lock:
            for inside, new in arrived:
                _add_range(self._arrived.setdefault(inside, []), new)
            if time.monotonic() - self._saved_s >= SAVE_S:
                self._saved_s = time.monotonic()
                self._write_note()

    def save(self) -> None:
        """Save the note now."""
        with self._lock:
            self._write_note()

    def check_room(self, wanted_bytes: int) -> None:
        """Raise NoSpaceError before anything is fetched that cannot be kept."""
        room = os.statvfs(os.path.dirname(self.part))
        free_bytes = room.f_bavail * room.f_frsize
        arrived_bytes = sum(r.end - r.start for ranges in self._arrived.values() for r in ranges)
        if wanted_bytes - arrived_bytes > free_bytes:
            raise NoSpaceError(
                f"{self.destination} needs {wanted_bytes - arrived_bytes} bytes and its file "
                f"system has {free_bytes}; free space or choose another file system"
            )

    def publish(self) -> None:
        """Give what was written the destination's name."""
        with OsAction(f"name {self.destination}"):
            if self._size_bytes is None and os.path.isdir(self.destination):
                os.rmdir(self.destination)  # empty, or this fails
            os.rename(self.part, self.destination)
            sync_folder(os.path.dirname(self.destination))
        os.unlink(self._note)

    def discard(self) -> None:
        """Remove everything that was written."""
        _remove(self.part)
        if os.path.lexists(self._note):
            os.unlink(self._note)

    def close(self) -> None:
        """Unlock the destination; twice is safe."""
        if self._note_lock is not None:
            self._note_lock.close()

    def _note_descriptor(self) -> int:
        return -1 if self._note_lock is None else self._note_lock.descriptor

    def _lock_note(self) -> None:
        try:
            while True:
                lock = file_lock.acquire(self._note, flags=os.O_NOFOLLOW, limit_s=0)
                if lock.is_named(self._note):
                    self._note_lock = lock
                    return
                lock.close()  # its owner ended and removed it between our two steps
        except BlockingIOError as error:
            raise BusyError(
                f"another get is filling {self.destination}; wait for its end"
            ) from error
        except OSError as error:
            raise from_os_error(error, f"write {self._note}") from error

    def _read_note(self) -> dict[str, list[ArrivedRange]]:
        """What an interrupted get of the same bytes left; {} when that is of no use."""
        try:
            fd = self._note_descriptor()
            size = os.fstat(fd).st_size
            note = json.loads(os.pread(fd, min(size, NOTE_LIMIT_BYTES), 0) or b"{}")
            key, boot = self._key, _boot_id()
            if not key or note.get("key") != key or not boot or note.get("boot") != boot:
                return {}
            part = _identity(self.part)
            if not part or note.get("part") != part:
                return {}
            return {
                inside: [ArrivedRange(int(r[0]), int(r[1]), str(r[2])) for r in ranges]
                for inside, ranges in note["done"].items()
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}

    def _write_note(self) -> None:
        """Rewritten in place, since the lock is on this very file."""
        data = json.dumps({**self._head, "done": self._arrived}).encode()
        with OsAction(f"write {self._note}"):
            fd = self._note_descriptor()
            length = os.fstat(fd).st_size
            os.pwrite(fd, data.ljust(length), 0)  # one write, so that no kill tears it


@contextlib.contextmanager
def open_fd(path: str, flags: int) -> Iterator[int]:
    """A descriptor of a file that is part of a download, which is never a symbolic link."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _add_range(ranges: list[ArrivedRange], new: ArrivedRange) -> None:
    """Add to sorted ranges, joining those that touch; one with a digest stays as it is."""
    if new.digest:
        ranges[:] = [r for r in ranges if r.end <= new.start or new.end <= r.start]
    merged: list[ArrivedRange] = []
    for each in sorted([*ranges, new]):
        last = merged[-1] if merged else None
        if last and each.start <= last.end and not (each.digest or last.digest):
            merged[-1] = ArrivedRange(last.start, max(each.end, last.end))
        else:
            merged.append(each)
    ranges[:] = merged


def _identity(path: str) -> list[int]:
    """Distinguishes parts of the same name; [] where neither a file nor a folder is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return []
    if stat.S_ISDIR(status.st_mode):
        return [status.st_dev, status.st_ino]
    if stat.S_ISREG(status.st_mode):
        return [status.st_dev, status.st_ino, status.st_size]
    return []


def _check_destination(path: str, *, is_folder: bool) -> None:
    """Raise UsageError for a place that cannot be filled."""
    folder, base = os.path.split(path)
    if not base or not os.path.isdir(folder):
        raise UsageError(f"{path} lies in no folder that is there; make it first")
    _check_kind(path)
    if is_folder and os.path.lexists(path) and _is_full(path):
        raise UsageError(f"{path} is there already; remove it, or name another place")
    if not is_folder and os.path.isdir(path):
        raise UsageError(f"{path} is a folder; name a file")


def _check_kind(path: str) -> None:
    """Raise UsageError for what a rename must not replace: a device, a pipe, a socket."""
    try:
        kind = os.stat(path).st_mode
    except OSError:
        return  # nothing is there, or a link that leads nowhere
    # /dev/stdout leads to an ordinary file where the shell sends it to one.
    is_stream = os.path.islink(path) and os.readlink(path).startswith("/proc/")
    if is_stream or not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise UsageError(
            f"{path} is no ordinary file, and a get would replace it; name a file, or write to "
            "standard output by `bootseer stripe cat`"
        )


def _boot_id() -> str:
    """Identifies this boot: after another one, unsynced bytes may be missing. "": unknown."""
    try:
        return boot_id()
    except OSError:
        return ""


def _is_full(path: str) -> bool:
    if os.path.islink(path) or not os.path.isdir(path):
        return True
    with OsAction(f"list {path}"):
        return bool(os.listdir(path))


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        _make_writable(path)
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _make_writable(path: str) -> None:
    """Let its owner write a part: an interrupted get may have set the checkpoint's modes."""
    status = os.lstat(path)
    is_folder = stat.S_ISDIR(status.st_mode)
    wanted = 0o700 if is_folder else 0o600
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & wanted != wanted:
        os.chmod(path, stat.S_IMODE(status.st_mode) | wanted)
    if is_folder:
        for inside in os.listdir(path):
            _make_writable(f"{path}/{inside}")
