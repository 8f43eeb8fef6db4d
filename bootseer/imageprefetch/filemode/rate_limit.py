"""Working without slowing down a job that starts meanwhile: lowest priority, and pauses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

SLICE_S = 0.01
DISK_GRACE_S, DISK_LEAST_BYTES = 0.1, 256 << 10
SHARE_OF_START = 0.04
"""The part of a start's time so far that may be worked before the start is over."""
# The container's own; the machine's root group has no such file, or one named `release_agent`.
_STATS = (("/sys/fs/cgroup", b"file "), ("/sys/fs/cgroup/memory", b"total_cache "))


def cache_bytes() -> int | None:
    """The page cache of our control group; None where only the whole machine's is known."""
    for folder, key in _STATS:
        if os.path.exists(f"{folder}/release_agent") or not _exists_any(folder):
            continue
        try:
            with open(f"{folder}/memory.stat", "rb", buffering=0) as file:
                for line in file.read(1 << 16).splitlines():
                    if line.startswith(key):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return None


def _exists_any(folder: str) -> bool:
    return any(
        os.path.exists(f"{folder}/{name}") for name in ("memory.current", "memory.usage_in_bytes")
    )


class DiskWatch:
    """Whether what this process reads ahead comes from a disk of this machine.

    A lazily loading file system unpacks what is read on the processors on which the job starts:
    there, reading ahead what is not needed at once slows the start down. `before_bytes` is what
    this process has read from disks so far, None where that is unknown.
    """

    def __init__(self, before_bytes: int | None, *, grace_s: float = DISK_GRACE_S) -> None:
        self._before_bytes, self._grace_s, self._until_s = before_bytes, grace_s, 0.0
        self._is_disk_read = False
        self.none = False

    @classmethod
    def begin(cls, *, grace_s: float = DISK_GRACE_S) -> DiskWatch:
        """Watch what is read from now on."""
        return cls(_own_read_bytes(), grace_s=grace_s)

    def none_read(self, requested_bytes: int) -> bool:
        """Whether next to nothing was read from disks within `grace_s`.

        That begins with the first call with `requested_bytes`.
        """
        if self._is_disk_read or self._before_bytes is None or not requested_bytes:
            return False
        if not self._until_s:
            self._until_s = time.monotonic() + self._grace_s
        if time.monotonic() < self._until_s:
            return False
        now = _own_read_bytes()
        self._is_disk_read = now is None or now - self._before_bytes >= DISK_LEAST_BYTES
        self.none = not self._is_disk_read
        return self.none


def _own_read_bytes() -> int | None:
    try:
        with open("/proc/self/io", "rb", buffering=0) as file:
            return int(file.read(4096).partition(b"\nread_bytes: ")[2].split(b"\n")[0])
    except (OSError, ValueError):
        return None


class Pace:
    """Sleeps as long as it has worked, in short intervals, until `over` answers true."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._since_s = time.monotonic()

    def rest(self) -> None:
        """Call it often; sleeps now and then."""
        worked_s = time.monotonic() - self._since_s
        if worked_s >= SLICE_S:
            if not self._over():
                time.sleep(worked_s)
            self._since_s = time.monotonic()


class LimitedWork:
    """Work in small steps, for no more than `SHARE_OF_START` of the time that has passed."""

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps
        self._worked_s = 0.0

    def go_on(self, passed_s: float) -> None:
        """Do as many steps as are allowed by now."""
        begun_s = time.monotonic()
        budget_s = SHARE_OF_START * passed_s - self._worked_s
        while time.monotonic() - begun_s < budget_s and next(self._steps, self) is None:
            pass
        self._worked_s += time.monotonic() - begun_s
