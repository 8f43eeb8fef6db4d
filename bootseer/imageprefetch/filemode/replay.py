"""Replay: read recorded ranges of files ahead, in parallel, in the order of first touch."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from bootseer.blocks.extents import Extent
from bootseer.imageprefetch.filemode.file_trace import FileRange, FileTrace
from bootseer.imageprefetch.filemode.roots import DEFAULT_ROOTS, FileOpener

THREADS = 16
SHARE = 0.25
STEP_BYTES = 128 << 10
"""The kernel cuts one call short at a file system's read-ahead size, which is this or more."""
_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """`most_bytes` limits what is read; None: half of the free memory."""

    roots: tuple[str, ...] = DEFAULT_ROOTS
    share: float = SHARE
    threads: int = THREADS
    most_bytes: int | None = None


@dataclasses.dataclass(slots=True)
class FileReplayResult:
    """What a replay read. `skipped` counts files by the reason why they were not read."""

    files: int = 0
    size_bytes: int = 0
    duration_s: float = 0.0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    ranges: dict[str, list[Extent]] = dataclasses.field(default_factory=dict)


def plan(trace: FileTrace, share: float, most_bytes: int) -> list[list[FileRange]]:
    """The work as lists of successive ranges of one file, in the order of first touch.

    Ranges are cut at `STEP_BYTES`, the whole at `most_bytes`. Pure.
    """
    turns: list[list[FileRange]] = []
    left = most_bytes
    for range_ in trace.ranges(share):
        at, end = range_.offset, range_.offset + range_.length
        while at < end and left > 0:
            length = min(STEP_BYTES, end - at, left)
            piece = FileRange(range_.file, at, length)
            if turns and turns[-1][0].file == range_.file and len(turns[-1]) < 64:
                turns[-1].append(piece)
            else:
                turns.append([piece])
            at += length
            left -= length
    return turns


def replay(
    trace: FileTrace,
    settings: ReplaySettings | None = None,
    *,
    stop: Callable[[int], bool] = lambda _: False,
) -> FileReplayResult:
    """Have the kernel read a trace's ranges; returns when all have been requested.

    A file that is missing, has changed, or is no regular file below the roots is skipped. Ends
    early when `stop`, given the number of requested bytes, answers true.
    """
    settings = settings or ReplaySettings()
    most = free_bytes() // 2 if settings.most_bytes is None else settings.most_bytes
    begun_s = time.monotonic()
    with FileOpener(settings.roots) as opener:
        work = _Work(trace, opener, plan(trace, settings.share, most), stop)
        count = max(1, min(settings.threads, len(work.turns)))
        threads = [threading.Thread(target=work.run, daemon=True) for _ in range(count - 1)]
        for thread in threads:
            thread.start()
        try:
            work.run()
        finally:
            for thread in threads:
                thread.join()
    work.done.duration_s = time.monotonic() - begun_s
    return work.done


class _Work:
    """The lists of ranges, which several threads take one by one."""

    def __init__(
        self,
        trace: FileTrace,
        opener: FileOpener,
        turns: Sequence[list[FileRange]],
        stop: Callable[[int], bool],
    ) -> None:
        self.turns = turns
        self.done = FileReplayResult()
        self._trace, self._opener, self._stop = trace, opener, stop
        self._next = iter(turns)
        self._lock = threading.Lock()
        self._failed: set[int] = set()
        self._counted: set[int] = set()

    def run(self) -> None:
        while not self._stop(self.done.size_bytes):
            with self._lock:
                turn = next(self._next, None)
                if turn is None:
                    return
                if turn[0].file in self._failed:
                    continue
            self._read_ahead(turn)

    def _read_ahead(self, turn: list[FileRange]) -> None:
        file = self._trace.files[turn[0].file]
        reason = ""
        try:
            fd, status = self._opener.open(file.path)
            try:
                if file.is_same(status.st_size, status.st_mtime_ns):
                    for piece in turn:
                        os.posix_fadvise(fd, piece.offset, piece.length, os.POSIX_FADV_WILLNEED)
                else:
                    reason = "changed"
            finally:
                os.close(fd)
        except OSError as error:
            reason = _why_skipped(error)
        with self._lock:
            self._note(turn, file.path, reason)

    def _note(self, turn: list[FileRange], path: str, reason: str) -> None:
        number = turn[0].file
        if reason:
            if number not in self._failed:
                self._failed.add(number)
                self.done.skipped[reason] = self.done.skipped.get(reason, 0) + 1
            return
        if number not in self._counted:
            self._counted.add(number)
            self.done.files += 1
        self.done.size_bytes += sum(piece.length for piece in turn)
        self.done.ranges.setdefault(path, []).extend(_extents(turn))


def _extents(turn: Iterable[FileRange]) -> Iterable[Extent]:
    return (Extent(piece.offset, piece.length) for piece in turn)


def _why_skipped(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "gone"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not readable"
    if error.errno in (errno.ELOOP, errno.EXDEV, errno.EINVAL):
        return "not a file below the directories named"
    return os.strerror(error.errno or errno.EIO).lower()


def free_bytes() -> int:
    """The memory that can still be filled: the machine's, or the control group's if less."""
    free = [_available_bytes()]
    for limit_file, used_file in _CGROUP_LIMITS:
        try:
            with open(limit_file, encoding="ascii") as file:
                limit = int(file.read())
            with open(used_file, encoding="ascii") as file:
                free.append(max(0, limit - int(file.read())))
        except (OSError, ValueError):
            continue  # no limit ("max"), or none of this version of cgroups
    return min(free)


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 4
