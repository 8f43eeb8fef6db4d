"""Recording which ranges of files a start touches, by the best means that this process has.

- *tracefs*: the kernel tells each page as it enters the page cache: exact, in order; needs root.
- *residency*: which pages are in memory afterwards that were not before; files in the order in
  which they were opened. For files that one owns or may write to.
- *opens*: of other people's files only openings are heard; small ones count whole, of large ones
  what the processes have mapped and touched.

All three see what was not in memory yet, and the kernel's own read-ahead with it. Where the start
runs already when its files are first looked at, all that is in memory afterwards counts, if by
the reads of its own processes it was a cold one.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from bootseer.blocks.extent import Extent, covered_bytes, subtract
from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.filemode import format as filetraces
from bootseer.imageprefetch.filemode import places
from bootseer.imageprefetch.filemode.format import FileTrace, Touch, TracedFile
from bootseer.imageprefetch.filemode.mapped import Mapped, read_bytes, tree
from bootseer.imageprefetch.filemode.opens import Opens
from bootseer.imageprefetch.filemode.residency import Asker, Seen, look
from bootseer.imageprefetch.filemode.tracefs import Added, Tracer

Method = Literal["auto", "tracefs", "residency", "opens"]
WINDOW_S = 120.0
WHOLE_BYTES = 1 << 20  # a file of which only the opening is known counts whole up to this size
MAX_FOLDERS = 1 << 17
MAX_LOOKED_AT = 1 << 19
NOTHING: Mapping[str, Sequence[Extent]] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """`roots` are the directories looked at, each without what is mounted below it."""

    roots: tuple[str, ...] = places.DEFAULT_ROOTS
    workload: str = ""
    method: Method = "auto"


class Recording:
    """One start being recorded; a context manager.

    `survey` looks at the files before the start (or while it begins: give `racing` then), `begin`
    sets the clock, `sample` may be called now and then, `finish` makes the trace. `method` and
    `why` say what was chosen. `pid` is a process of whose descendants alone the touches count,
    where the means can tell them apart. Raises NotSupportedError when the method asked for is not
    to be had.
    """

    def __init__(self, settings: RecordSettings, pid: int | None = None) -> None:
        self._settings = settings
        self._roots = places.resolved(settings.roots)
        self._asker = Asker()
        self._before: list[Seen] = []
        self._pid, self._mapped = pid, Mapped()
        self._racing = False
        self._own_bytes = 0
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

    def survey(
        self, *, racing: bool = False, evict: bool = False, stop: Iterable[bool] = ()
    ) -> None:
        """Look at every file, and listen to every directory.

        `racing`: the start runs already. `evict`: take the files out of memory first, as far as
        nobody uses them. The work is given up when `stop` yields true.
        """
        self._racing = racing
        asked = iter(stop)
        for count, (folder, entries) in enumerate(places.folders(self._roots)):
            for entry in entries:
                seen = self._look(entry, evict)
                if seen is not None:
                    self._before.append(seen)
            # Now, lest our own looking is heard.
            self._opens.add(folder)
            full = count >= MAX_FOLDERS or len(self._before) >= MAX_LOOKED_AT
            if full or next(asked, False):
                break
        if racing and self._pid is not None:
            self._own_bytes = read_bytes(tree(self._pid))

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

    def finish(
        self, *, full: bool, replayed: Mapping[str, Sequence[tuple[int, int]]] = NOTHING
    ) -> FileTrace:
        """The trace of this start.

        `full`: the start came to its end, its first step say, so that what it did not touch says
        something too; it is believed of a cold one alone. What was `replayed` is left out.
        """
        self.settle()
        files = {seen.path: seen for seen in self._before if self._is_old(seen)}
        traced = list(self._traced(files.values())) if self._tracer is not None else []
        if self._tracer is not None and not self._racing:
            found = traced
            self.cold = not self._tracer.lost and _is_cold(_there(files.values()), _sum(traced))
        else:
            found = [*traced, *_without(self._touched(files.values()), _by_path(traced))]
        touches = list(_without(found, replayed))
        listed = {
            path: TracedFile(path, files[path].size_bytes, files[path].mtime_ns)
            for path in {touch.path for touch in touches}
        }
        full = full and self.cold and not replayed
        return filetraces.made(listed, touches, self._settings.workload, full=full)

    def settle(self) -> None:
        """What is touched from now on is no part of the start any more; twice is safe."""
        self.close()
        if self._after is None:
            again = (seen for seen in self._before if seen.pages is not None)
            looks = self._tracer is None or self._racing
            found = (look(self._asker, seen.path) for seen in again if looks)
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

    def _ms(self, at_s: float) -> int:
        return max(0, int((at_s - self._begun_s) * 1000))

    # --- tracefs ------------------------------------------------------------------------------

    def _traced(self, files: Iterable[Seen]) -> Iterator[Touch]:
        assert self._tracer is not None
        added = [one for one in self._tracer.added if one.at_s >= self._begun_s]
        known = _by_inode(files, added)
        for one in added:
            seen = known.get((one.device, one.inode))
            if seen is not None and one.offset < seen.size_bytes:
                yield Touch(seen.path, one.offset, one.length, self._ms(one.at_s))

    # --- residency and opens --------------------------------------------------------------------

    def _touched(self, files: Iterable[Seen]) -> Iterator[Touch]:
        again: list[tuple[Seen, list[Extent], list[Extent]]] = []
        unknown = there = came = 0
        mapped = self._mapped.pages()
        for seen in files:
            if seen.pages is None:
                pages = self._opened(seen, mapped)
                unknown += bool(pages)
                again.append((seen, pages, pages))
                continue
            now = (self._after or {}).get(seen.path)
            if now is None or now.pages is None or not _same(seen, now):
                continue
            new = subtract(now.pages, seen.pages)
            there += covered_bytes(seen.pages)
            came += covered_bytes(new)
            again.append((seen, new, list(now.pages)))
        # In a race, what the start's processes had read by then is not what was there before.
        self.cold = not unknown and _is_cold(there - self._own_bytes, came + self._own_bytes)
        for seen, new, whole in again:
            # What the start itself brought in before we could look must not count as warm.
            for page in whole if self._racing and self.cold else new:
                at_s = self._opens.first_s.get(seen.path, self._begun_s)
                yield Touch(seen.path, page.offset, page.length, self._ms(at_s))

    def _opened(self, seen: Seen, mapped: Mapping[str, list[Extent]]) -> list[Extent]:
        if seen.size_bytes <= WHOLE_BYTES:
            heard = seen.path in self._opens.first_s or seen.path in mapped
            return [Extent(0, seen.size_bytes)] if heard else []
        return mapped.get(seen.path, [])


def _is_cold(there_bytes: int, came_bytes: int) -> bool:
    """Whether much more came in than had been there: else what is missing may just be warm."""
    return came_bytes > 2 * there_bytes


def _there(files: Iterable[Seen]) -> int:
    return sum(covered_bytes(seen.pages or ()) for seen in files)


def _sum(touches: Iterable[Touch]) -> int:
    return sum(touch.length for touch in touches)


def _by_path(touches: Iterable[Touch]) -> dict[str, list[tuple[int, int]]]:
    out: dict[str, list[tuple[int, int]]] = {}
    for touch in touches:
        out.setdefault(touch.path, []).append((touch.offset, touch.length))
    return out


def _same(one: Seen, other: Seen) -> bool:
    return (one.device, one.inode, one.size_bytes, one.mtime_ns) == (
        other.device,
        other.inode,
        other.size_bytes,
        other.mtime_ns,
    )


def _by_inode(files: Iterable[Seen], added: Sequence[Added]) -> dict[tuple[int, int], Seen]:
    """Files by the device and inode of their data, as the kernel's events name them.

    A file on overlayfs shows its data's inode number, but the overlay's own device. Which device
    lies beneath is told by the events: it is the one that most of the overlay's numbers are on.
    """
    by_device: dict[int, dict[int, Seen]] = {}
    for seen in files:
        by_device.setdefault(seen.device, {})[seen.inode] = seen
    pairs = {(one.device, one.inode): one.offset for one in added}
    out: dict[tuple[int, int], Seen] = {}
    for device, inodes in by_device.items():
        matches: dict[int, int] = {}
        for (event_device, inode), offset in pairs.items():
            if inode in inodes and offset < inodes[inode].size_bytes:
                matches[event_device] = matches.get(event_device, 0) + 1
        if device in matches:
            beneath = device
        elif matches:
            beneath = max(matches, key=lambda d: matches[d])
        else:
            continue
        for inode, seen in inodes.items():
            out.setdefault((beneath, inode), seen)
    return out


def _without(
    touches: Iterable[Touch], replayed: Mapping[str, Sequence[tuple[int, int]]]
) -> Iterator[Touch]:
    for touch in touches:
        ranges = replayed.get(touch.path)
        if not ranges:
            yield touch
            continue
        for left in subtract([(touch.offset, touch.length)], ranges):
            yield Touch(touch.path, left.offset, left.length, touch.first_touch_ms)
