"""Where `get` writes: temporary names beside the destination, and a note of what has arrived.

Beside `DST` lie `.DST.bootseer-part` (a file or a folder) and `.DST.bootseer-get` (the note,
locked while a get is under way). Only the last step gives the destination its name. The note is
of use only for the very file or folder that it was written for, at its full size.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
import time
from typing import Any, NamedTuple

from bootseer.context_managers import Closing
from bootseer.errors import BusyError, NoSpaceError, UsageError, from_os_error
from bootseer.system import file_lock
from bootseer.system.atomic import sync_folder
from bootseer.system.file_lock import FileLock
from bootseer.system.processes import boot_id

SAVE_S = 1.0
NOTE_LIMIT_BYTES = 256 << 20


class Arrived(NamedTuple):
    """Bytes `[start, end)` of a file that were written; `digest` where nothing else checks them."""

    start: int
    end: int
    digest: str = ""


class Landing(Closing):
    """One destination being filled; a context manager that closes, and removes when it is told to.

    Raises BusyError when another get fills the same destination, UsageError for one that cannot
    be filled.
    """

    def __init__(self, destination: str, key: str, *, size_bytes: int | None, resume: bool) -> None:
        """`size_bytes` is a single file's; None means a folder."""
        self.destination = destination
        is_folder = size_bytes is None
        folder, base = os.path.split(destination)
        if not base or not os.path.isdir(folder):
            raise UsageError(f"{destination} lies in no folder that is there; make it first")
        _check_kind(destination)
        if is_folder and os.path.lexists(destination) and _is_full(destination):
            raise UsageError(f"{destination} is there already; remove it, or name another place")
        if not is_folder and os.path.isdir(destination):
            raise UsageError(f"{destination} is a folder; name a file")
        self.part = f"{folder}/.{base}.bootseer-part"
        self._note = f"{folder}/.{base}.bootseer-get"
        self._is_folder = is_folder
        self._lock = threading.Lock()
        self._saved_s = 0.0
        self._head: dict[str, Any] = {"key": key, "boot": _boot_id()}
        self._file = self._lock_note()
        try:
            self._done: dict[str, list[Arrived]] = self._earlier(key) if resume else {}
            if self._done:
                _unlock(self.part)
            else:
                _remove(self.part)
            if is_folder:
                os.makedirs(self.part, mode=0o700, exist_ok=True)
            else:
                self.make("", size_bytes or 0)
            self._head["part"] = _identity(self.part)
            self.save()
        except OSError as error:
            self.close()
            raise from_os_error(error, f"write {self.part}") from error
        except BaseException:  # else the lock stays until this process ends
            self.close()
            raise

    def path(self, inside: str) -> str:
        """Where a file of the checkpoint is being written; "" is the single file."""
        return f"{self.part}/{inside}" if inside else self.part

    def make(self, inside: str, size_bytes: int) -> None:
        """Make a file of its final length, or take the one an earlier get left."""
        path = self.path(inside)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o644)
            try:
                os.ftruncate(fd, size_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, f"write {path}") from error

    def arrived(self, inside: str, offset: int, length: int) -> str | None:
        """The digest noted with these bytes, "" where there is none; None: they never came.

        That they are still there must be checked, by the digest or otherwise.
        """
        end = offset + length
        with self._lock:
            ranges = tuple(self._done.get(inside, ()))
        for found in ranges:
            is_whole = (found.start, found.end) == (offset, end)
            if is_whole or (not found.digest and found.start <= offset and end <= found.end):
                return found.digest
        return None

    def note(self, arrived: list[tuple[str, Arrived]]) -> None:
        """Remember what has been written; saved now and then."""
        with self._lock:
            for inside, found in arrived:
                _add(self._done.setdefault(inside, []), found)
            if time.monotonic() - self._saved_s < SAVE_S:
                return
            self._saved_s = time.monotonic()
            data = self._encoded()
            self._save(data)

    def save(self) -> None:
        """Write the note now."""
        with self._lock:
            self._save(self._encoded())

    def check_room(self, wanted_bytes: int) -> None:
        """Raise NoSpaceError before anything is fetched that cannot be kept."""
        found = os.statvfs(os.path.dirname(self.part))
        have = found.f_bavail * found.f_frsize
        here = sum(found.end - found.start for ranges in self._done.values() for found in ranges)
        if wanted_bytes - here > have:
            raise NoSpaceError(
                f"{self.destination} needs {wanted_bytes - here} bytes and its file system has "
                f"{have}; free space or choose another file system"
            )

    def publish(self) -> None:
        """Give what was written the destination's name."""
        try:
            if self._is_folder and os.path.isdir(self.destination):
                os.rmdir(self.destination)  # empty, or this fails
            os.rename(self.part, self.destination)
            sync_folder(os.path.dirname(self.destination))
        except OSError as error:
            raise from_os_error(error, f"name {self.destination}") from error
        os.unlink(self._note)

    def discard(self) -> None:
        """Remove everything that was written."""
        _remove(self.part)
        if os.path.lexists(self._note):
            os.unlink(self._note)

    def close(self) -> None:
        """Let others fill the destination; twice is safe."""
        self._file.close()

    def _lock_note(self) -> FileLock:
        try:
            while True:
                lock = file_lock.acquire(self._note, flags=os.O_NOFOLLOW, limit_s=0)
                if lock.is_named(self._note):
                    return lock
                lock.close()  # its owner ended and removed it between our two steps
        except BlockingIOError as error:
            raise BusyError(
                f"another get is filling {self.destination}; wait for its end"
            ) from error
        except OSError as error:
            raise from_os_error(error, f"write {self._note}") from error

    def _earlier(self, key: str) -> dict[str, list[Arrived]]:
        """What an earlier get of the same bytes left; {} when it is of no use."""
        try:
            fd = self._file.descriptor
            size = os.fstat(fd).st_size
            note = json.loads(os.pread(fd, min(size, NOTE_LIMIT_BYTES), 0) or b"{}")
            boot = _boot_id()
            if note.get("key") != key or not key or note.get("boot") != boot or not boot:
                return {}
            part = _identity(self.part)
            if not part or note.get("part") != part:
                return {}
            return {
                inside: [Arrived(int(start), int(end), str(digest)) for start, end, digest in all_]
                for inside, all_ in note["done"].items()
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}

    def _encoded(self) -> bytes:
        return json.dumps({**self._head, "done": self._done}).encode()

    def _save(self, data: bytes) -> None:
        """Rewritten in place, since the lock is on this very file."""
        try:
            fd = self._file.descriptor
            length = os.fstat(fd).st_size
            os.pwrite(fd, data.ljust(length), 0)  # one write, so that no kill tears it
        except OSError as error:
            raise from_os_error(error, f"write {self._note}") from error


def _add(ranges: list[Arrived], new: Arrived) -> None:
    """Add to sorted ranges, joining those that touch; one with a digest stays as it is."""
    if new.digest:
        ranges[:] = [r for r in ranges if r.end <= new.start or new.end <= r.start]
    merged: list[Arrived] = []
    for found in sorted([*ranges, new]):
        last = merged[-1] if merged else None
        if last and found.start <= last.end and not (found.digest or last.digest):
            merged[-1] = Arrived(last.start, max(found.end, last.end))
        else:
            merged.append(found)
    ranges[:] = merged


def _identity(path: str) -> list[int]:
    """Tells one part from another of its name; [] where nothing of use is there."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return []
    if stat.S_ISDIR(found.st_mode):
        return [found.st_dev, found.st_ino]
    if stat.S_ISREG(found.st_mode):
        return [found.st_dev, found.st_ino, found.st_size]
    return []


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
    """After a reboot nothing that was not synced can be trusted to be there; "": unknown."""
    try:
        return boot_id()
    except OSError:
        return ""


def _is_full(path: str) -> bool:
    if os.path.islink(path) or not os.path.isdir(path):
        return True
    try:
        return bool(os.listdir(path))
    except OSError as error:
        raise from_os_error(error, f"list {path}") from error


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        _unlock(path)
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _unlock(path: str) -> None:
    """Make a part its owner's to write: an earlier get may have set the checkpoint's modes."""
    found = os.lstat(path)
    is_folder = stat.S_ISDIR(found.st_mode)
    wanted = 0o700 if is_folder else 0o600
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & wanted != wanted:
        os.chmod(path, stat.S_IMODE(found.st_mode) | wanted)
    if is_folder:
        for inside in os.listdir(path):
            _unlock(f"{path}/{inside}")
