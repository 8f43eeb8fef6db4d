"""Working so little at a time that a job that starts beside us does not notice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

SLICE_S = 0.01
DISK_GRACE_S, DISK_LEAST_BYTES = 0.1, 256 << 10
BESIDE = 0.04
"""Of the time that a start has taken, what may be worked beside it before it is over."""
# The container's own; the machine's root group has no such file, or `release_agent` beside it.
_STATS = (("/sys/fs/cgroup", b"file "), ("/sys/fs/cgroup/memory", b"total_cache "))


def cache_bytes() -> int | None:
    """What our control group holds of files in memory; None where that cannot be told apart from
    what the whole machine holds."""
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
    """Tells whether what this process has had read ahead comes from a disk of this machine.

    A lazily loading file system unpacks what is asked for on the processors that the job starts
    on: there, reading ahead what is not needed at once makes the start slower.
    """

    def __init__(self, *, grace_s: float = DISK_GRACE_S) -> None:
        self._grace_s, self._until_s = grace_s, 0.0
        self._before, self._seen = _own_read_bytes(), False
        self.none = False

    def none_read(self, asked_bytes: int) -> bool:
        """Whether next to nothing was read from disks in the time that was given.

        It begins with the first call that tells of something asked for.
        """
        if self._seen or self._before is None or not asked_bytes:
            return False
        if not self._until_s:
            self._until_s = time.monotonic() + self._grace_s
        if time.monotonic() < self._until_s:
            return False
        now = _own_read_bytes()
        self._seen = now is None or now - self._before >= DISK_LEAST_BYTES
        self.none = not self._seen
        return self.none


def _own_read_bytes() -> int | None:
    try:
        with open("/proc/self/io", "rb", buffering=0) as file:
            return int(file.read(4096).partition(b"\nread_bytes: ")[2].split(b"\n")[0])
    except (OSError, ValueError):
        return None


class Pace:
    """Rests as long as it has worked, a little at a time, until `over` answers true."""

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


class Paced:
    """Work in small steps, no more of it than `BESIDE` of the time that has gone by."""

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps
        self._worked_s = 0.0

    def go_on(self, gone_by_s: float) -> None:
        """Do what may be done by now."""
        begun_s = time.monotonic()
        budget_s = BESIDE * gone_by_s - self._worked_s
        while time.monotonic() - begun_s < budget_s and next(self._steps, self) is None:
            pass
        self._worked_s += time.monotonic() - begun_s
