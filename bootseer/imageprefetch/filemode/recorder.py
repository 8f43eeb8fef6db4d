"""Recording which ranges of files a start touches, by the best means that this process has.

- *tracefs*: the kernel tells each page as it enters the page cache: exact, in order; needs root.
- *residency*: which pages are in memory afterwards that were not before; files in the order in
  which they were opened. For files that one owns or may write to.
- *opens*: of other people's files only openings are heard; small ones count whole, of large ones
  what the processes have mapped and touched.

All three see what was not in memory yet, and the kernel's own read-ahead with it. Here the files
are looked at before the start; `following` is for one that runs already.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from typing import Literal

from bootseer.blocks.extents import Extent, covered_bytes, subtract
from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode import roots as places
from bootseer.imageprefetch.filemode import touches
from bootseer.imageprefetch.filemode.file_trace import FileTrace, Touch, TracedFile
from bootseer.imageprefetch.filemode.inotify import Opens
from bootseer.imageprefetch.filemode.mincore import Asker, Seen, look
from bootseer.imageprefetch.filemode.pagemap import Mapped, tree
from bootseer.imageprefetch.filemode.tracefs import Tracer

Method = Literal["auto", "tracefs", "residency", "opens"]
WINDOW_S = 120.0
MAX_FOLDERS = 1 << 17
MAX_LOOKED_AT = 1 << 19


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """`roots` are the directories looked at, each without what is mounted below it."""

    roots: tuple[str, ...] = places.DEFAULT_ROOTS
    workload: str = ""
    method: Method = "auto"


class Recording:
    """One start being recorded; a context manager.

    `survey` looks at the files before the start, `begin` sets the clock, `sample` may be called now
    and then, `finish` makes the trace. `method` and `why` say what was chosen. `pid` is a process
    of whose descendants alone the touches count, where the means can tell them apart. Raises
    NotSupportedError when the method asked for is not to be had.
    """

    def __init__(self, settings: RecordSettings, pid: int | None = None) -> None:
        self._settings = settings
        self._roots = places.resolved(settings.roots)
        self._asker = Asker()
        self._before: list[Seen] = []
        self._pid, self._mapped = pid, Mapped()
        self._after: dict[str, Seen] | None = None
        self._begun_s, self._begun_wall_ns = time.monotonic(), time.time_ns()
        self.cold = False
        self._tracer: Tracer | None = None
        self.why = "asked for"
        if settings.method in ("auto", "tracefs"):
            self._try_tracefs(pid)
        self._opens = Opens()
        self.method: str = "tracefs" if self._tracer else settings.method
        if self.method == "auto":
            self.method = "residency"

    def _try_tracefs(self, pid: int | None) -> None:
        try:
            self._tracer = Tracer(pid)
            if self._settings.method == "auto":
                self.why = "the kernel's tracing is open to this process"
        except NotSupportedError as error:
            if self._settings.method == "tracefs":
                raise
            self.why = str(error)

    def survey(self, *, evict: bool = False) -> None:
        """Look at every file, and listen to every directory.

        `evict`: take the files out of memory first, as far as nobody uses them.
        """
        for count, (folder, entries) in enumerate(places.folders(self._roots)):
            for entry in entries:
                seen = self._look(entry, evict)
                if seen is not None:
                    self._before.append(seen)
            # Now, lest our own looking is heard.
            self._opens.add(folder)
            if count >= MAX_FOLDERS or len(self._before) >= MAX_LOOKED_AT:
                break

    def _look(self, entry: os.DirEntry[str], evict: bool) -> Seen | None:
        if self.method != "opens":
            return look(self._asker, entry.path, evict=evict)
        if evict:
            look(self._asker, entry.path, evict=True)
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return None
        about = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        return Seen(entry.path, *about, None) if status.st_size else None

    def begin(self) -> None:
        """The start begins now."""
        self._begun_s, self._begun_wall_ns = time.monotonic(), time.time_ns()

    def sample(self, pid: int | None = None) -> None:
        """Look at what the processes below `pid` have mapped; needed for other people's files."""
        if self.method != "tracefs":
            pid = self._pid if pid is None else pid
            self._mapped.look(tree(pid) if pid else [], time.monotonic())

    def finish(self, *, full: bool) -> FileTrace:
        """The trace of this start.

        `full`: the start came to its end, its first step say, so that what it did not touch says
        something too; it is believed of a cold one alone.
        """
        self.settle()
        files = {seen.path: seen for seen in self._before if self._is_old(seen)}
        if self._tracer is not None:
            found = list(touches.traced(files.values(), self._tracer.heard(), self._begun_s))
            self.cold = not self._tracer.lost and _is_cold(_there(files.values()), _sum(found))
        else:
            found = list(self._touched(files.values()))
        listed = {
            path: TracedFile(path, files[path].size_bytes, files[path].mtime_ns)
            for path in {touch.path for touch in found}
        }
        return filetraces.made(listed, found, self._settings.workload, full=full and self.cold)

    def settle(self) -> None:
        """What is touched from now on is no part of the start any more; twice is safe."""
        self.close()
        if self._after is None:
            looks = self._tracer is None
            again = (seen for seen in self._before if looks and seen.pages is not None)
            found = (look(self._asker, seen.path) for seen in again)
            self._after = {seen.path: seen for seen in found if seen is not None}

    def close(self) -> None:
        """Listen no more; twice is safe."""
        self._opens.close()
        if self._tracer is not None:
            self._tracer.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_old(self, seen: Seen) -> bool:
        """Files made by the start itself are none that the next one could read ahead."""
        return seen.mtime_ns < self._begun_wall_ns and filetraces.is_plain_path(seen.path)

    def _touched(self, files: Iterable[Seen]) -> Iterator[Touch]:
        new: list[tuple[Seen, list[Extent]]] = []
        unknown = there = came = 0
        heard, mapped = self._opens.first_s, self._mapped.pages()
        for seen in files:
            if seen.pages is None:
                pages = touches.opened(seen, heard, mapped)
                unknown += bool(pages)
                new.append((seen, pages))
                continue
            now = (self._after or {}).get(seen.path)
            if now is None or now.pages is None or not _same(seen, now):
                continue
            new.append((seen, subtract(now.pages, seen.pages)))
            there += covered_bytes(seen.pages)
            came += covered_bytes(new[-1][1])
        self.cold = not unknown and _is_cold(there, came)
        for seen, pages in new:
            at_s = heard.get(seen.path, self._begun_s)
            for page in pages:
                yield Touch(seen.path, page.offset, page.length, touches.ms(at_s - self._begun_s))


def _is_cold(there_bytes: int, came_bytes: int) -> bool:
    """Whether much more came in than had been there: else what is missing may just be warm."""
    return came_bytes > 2 * there_bytes


def _there(files: Iterable[Seen]) -> int:
    return sum(covered_bytes(seen.pages or ()) for seen in files)


def _sum(several: Iterable[Touch]) -> int:
    return sum(touch.length for touch in several)


def _same(one: Seen, other: Seen) -> bool:
    return (one.device, one.inode, one.size_bytes, one.mtime_ns) == (
        other.device,
        other.inode,
        other.size_bytes,
        other.mtime_ns,
    )
