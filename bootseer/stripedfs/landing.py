"""Where `get` writes: temporary names beside the destination, and a note of what has arrived.

Beside `DST` lie `.DST.bootseer-part` (a file or a folder) and `.DST.bootseer-get` (the note,
locked while a get is under way). Only the last step gives the destination its name.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from typing import Any

from bootseer.atomic import sync_folder
from bootseer.contexts import Closing
from bootseer.errors import BusyError, NoSpaceError, UsageError, from_os_error

SAVE_S = 1.0
NOTE_LIMIT_BYTES = 256 << 20
Ranges = list[tuple[int, int]]


class Landing(Closing):
    """One destination being filled; a context manager that closes, and removes when it is told to.

    Raises BusyError when another get fills the same destination.
    """

    def __init__(self, destination: str, key: str, *, is_folder: bool, resume: bool) -> None:
        self.destination = destination
        folder, base = os.path.split(destination)
        if not base or not os.path.isdir(folder):
            raise UsageError(f"{destination} lies in no folder that is there; make it first")
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
        self._fd = self._locked()
        try:
            self._done: dict[str, Ranges] = self._earlier(key) if resume else {}
            if not self._done:
                _remove(self.part)
            if is_folder:
                os.makedirs(self.part, mode=0o700, exist_ok=True)
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

    def arrived(self, inside: str, offset: int, length: int) -> bool:
        """Whether an earlier get says that these bytes are there."""
        done = self._done.get(inside, ())
        return any(start <= offset and offset + length <= end for start, end in done)

    def note(self, arrived: list[tuple[str, int, int]]) -> None:
        """Remember what has been written; saved now and then."""
        with self._lock:
            for inside, offset, length in arrived:
                _add(self._done.setdefault(inside, []), offset, offset + length)
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
        here = sum(end - start for ranges in self._done.values() for start, end in ranges)
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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _locked(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            while True:
                fd = os.open(self._note, flags, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _same(fd, self._note):
                        return fd
                except BlockingIOError as error:
                    os.close(fd)
                    raise BusyError(
                        f"another get is filling {self.destination}; wait for its end"
                    ) from error
                os.close(fd)  # its owner ended and removed it between our two steps
        except OSError as error:
            raise from_os_error(error, f"write {self._note}") from error

    def _earlier(self, key: str) -> dict[str, Ranges]:
        """What an earlier get of the same bytes left; {} when it is of no use."""
        try:
            size = os.fstat(self._fd).st_size
            note = json.loads(os.pread(self._fd, min(size, NOTE_LIMIT_BYTES), 0) or b"{}")
            if note.get("key") != key or not key or note.get("boot") != _boot_id():
                return {}
            return {
                inside: [(int(start), int(end)) for start, end in ranges]
                for inside, ranges in note["done"].items()
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}

    def _encoded(self) -> bytes:
        return json.dumps({**self._head, "done": self._done}).encode()

    def _save(self, data: bytes) -> None:
        """Rewritten in place, since the lock is on this very file."""
        try:
            length = os.fstat(self._fd).st_size
            os.pwrite(self._fd, data.ljust(length), 0)  # one write, so that no kill tears it
        except OSError as error:
            raise from_os_error(error, f"write {self._note}") from error


def _add(ranges: Ranges, start: int, end: int) -> None:
    """Add `[start, end)` to sorted ranges, joining those that touch."""
    merged: Ranges = []
    for low, high in sorted([*ranges, (start, end)]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    ranges[:] = merged


def _boot_id() -> str:
    """After a reboot nothing that was not synced can be trusted to be there."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
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
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
