"""Recording which ranges of files a command's start touches, by the best method available.

- *tracefs*: the kernel reports each page that enters the page cache: exact and in order, needs
  root.
- *residency*: the pages that are in memory afterwards and were not before, the files in the order
  in which they were opened. For files that one owns or may write to.
- *opens*: only the opening of files is seen, for files of other owners: small files count whole,
  of large ones the pages that processes have mapped and touched.

All three see what was not in memory yet, and the kernel's own read-ahead as well. The files are
examined before the start; `process_follower` is for a start that runs already.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Literal

from bootseer.blocks.extents import Extent, covered_bytes, subtract
from bootseer.context_managers import Closing
from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode import touches
from bootseer.imageprefetch.filemode.file_trace import FileTrace, Touch, TracedFile
from bootseer.imageprefetch.filemode.inotify import OpenWatcher
from bootseer.imageprefetch.filemode.mincore import FileState, ResidencyProbe, probe_file
from bootseer.imageprefetch.filemode.pagemap import MappedPages, process_tree
from bootseer.imageprefetch.filemode.roots import DEFAULT_ROOTS, folders, resolve_roots
from bootseer.imageprefetch.filemode.threads import start_without_signals
from bootseer.imageprefetch.filemode.tracefs import Tracer
from bootseer.imageprefetch.record.first_step import FirstStepWatch

Method = Literal["auto", "tracefs", "residency", "opens"]
WINDOW_S = 120.0
MAX_FOLDERS = 1 << 17
MAX_FILES = 1 << 19
POLL_S = 0.1
SAMPLE_EVERY = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecordSettings:
    """`roots` are the directories to record, each without what is mounted below it."""

    roots: tuple[str, ...] = DEFAULT_ROOTS
    workload: str = ""
    method: Method = "auto"


class Recording(Closing):
    """The recording of one start; a context manager.

    `survey` examines the files before the start, `begin` sets the clock, `sample` may be called now
    and then, `finish` makes the trace. `method` and `why` say which method was chosen, and why.
    Where the method can tell processes apart, only touches by descendants of `pid` count. `start`
    raises NotSupportedError when the required method is not available.
    """

    def __init__(self, settings: FileRecordSettings, pid: int | None = None) -> None:
        self._settings = settings
        self._probe = ResidencyProbe()
        self._before: list[FileState] = []
        self._pid, self._mapped = pid, MappedPages()
        self._after: dict[str, FileState] | None = None
        self._begun_s, self._begun_wall_ns = time.monotonic(), time.time_ns()
        self.cold = False
        self._tracer: Tracer | None = None
        self._opens = OpenWatcher()
        self.method: str = settings.method
        self.why = "asked for"

    def start(self) -> Recording:
        """Choose the method, and begin to watch."""
        if self._settings.method in ("auto", "tracefs"):
            self._try_tracefs()
        self._opens.start()
        if self._tracer is not None:
            self.method = "tracefs"
        elif self.method == "auto":
            self.method = "residency"
        return self

    def _try_tracefs(self) -> None:
        try:
            self._tracer = Tracer(self._pid).start()
            if self._settings.method == "auto":
                self.why = "the kernel's tracing is open to this process"
        except NotSupportedError as error:
            if self._settings.method == "tracefs":
                raise
            self.why = str(error)

    def survey(self, *, evict: bool = False) -> None:
        """Examine every file, and watch every directory.

        `evict`: first drop the files from memory, as far as they are not in use.
        """
        for count, (folder, entries) in enumerate(folders(resolve_roots(self._settings.roots))):
            for entry in entries:
                state = self._examine(entry, evict)
                if state is not None:
                    self._before.append(state)
            # Only now, so that our own opening of the files is not noted.
            self._opens.add(folder)
            if count >= MAX_FOLDERS or len(self._before) >= MAX_FILES:
                break

    def _examine(self, entry: os.DirEntry[str], evict: bool) -> FileState | None:
        if self.method != "opens":
            return probe_file(self._probe, entry.path, evict=evict)
        if evict:
            probe_file(self._probe, entry.path, evict=True)
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return None
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        return FileState(entry.path, *identity, None) if status.st_size else None

    def begin(self) -> None:
        """The start begins now."""
        self._begun_s, self._begun_wall_ns = time.monotonic(), time.time_ns()

    def sample(self, pid: int | None = None) -> None:
        """Note what the processes below `pid` have mapped; needed for files of other owners."""
        if self.method != "tracefs":
            pid = self._pid if pid is None else pid
            self._mapped.look(process_tree(pid) if pid else [], time.monotonic())

    def finish(self, *, full: bool) -> FileTrace:
        """The trace of this start.

        `full`: the start reached its end, its first step say, so that what it did not touch counts
        as well; only a cold start counts as full.
        """
        self.settle()
        files = {state.path: state for state in self._before if self._is_old(state)}
        if self._tracer is not None:
            touched = list(
                touches.from_events(files.values(), self._tracer.events(), self._begun_s)
            )
            resident_bytes = _resident_bytes(files.values())
            self.cold = not self._tracer.lost and _is_cold(resident_bytes, _total_bytes(touched))
        else:
            touched = list(self._find_touches(files.values()))
        listed = {
            path: TracedFile(path, files[path].size_bytes, files[path].mtime_ns)
            for path in {touch.path for touch in touched}
        }
        workload = self._settings.workload
        return filetraces.trace_of_touches(listed, touched, workload, full=full and self.cold)

    def settle(self) -> None:
        """End the start: what is touched from now on does not count. Twice is safe."""
        self.close()
        if self._after is None:
            self._after = {}
            for before in self._before if self._tracer is None else ():
                if before.pages is not None:
                    state = probe_file(self._probe, before.path)
                    if state is not None:
                        self._after[state.path] = state

    def close(self) -> None:
        """Stop watching; twice is safe."""
        self._opens.close()
        if self._tracer is not None:
            self._tracer.close()

    def __enter__(self) -> Recording:
        return self.start()

    def _is_old(self, state: FileState) -> bool:
        """Whether a file was not made by the start itself: only then the next start can use it."""
        return state.mtime_ns < self._begun_wall_ns and filetraces.is_plain_path(state.path)

    def _find_touches(self, files: Iterable[FileState]) -> Iterator[Touch]:
        added: list[tuple[FileState, list[Extent]]] = []
        unknown = before_bytes = added_bytes = 0
        opened_s, mapped = self._opens.first_s, self._mapped.pages()
        for before in files:
            if before.pages is None:
                pages = touches.pages_of_opened(before, opened_s, mapped)
                unknown += bool(pages)
                added.append((before, pages))
                continue
            after = (self._after or {}).get(before.path)
            if after is None or after.pages is None or not _is_same(before, after):
                continue
            pages = subtract(after.pages, before.pages)
            added.append((before, pages))
            before_bytes += covered_bytes(before.pages)
            added_bytes += covered_bytes(pages)
        self.cold = not unknown and _is_cold(before_bytes, added_bytes)
        for state, pages in added:
            at_ms = touches.ms(opened_s.get(state.path, self._begun_s) - self._begun_s)
            for page in pages:
                yield Touch(state.path, page.offset, page.length, at_ms)


def _is_cold(before_bytes: int, added_bytes: int) -> bool:
    """Whether the start read much more than was in memory: otherwise it may have been warm."""
    return added_bytes > 2 * before_bytes


def _resident_bytes(files: Iterable[FileState]) -> int:
    return sum(covered_bytes(state.pages or ()) for state in files)


def _total_bytes(several: Iterable[Touch]) -> int:
    return sum(touch.length for touch in several)


def _is_same(one: FileState, other: FileState) -> bool:
    return one._replace(pages=None) == other._replace(pages=None)


class CommandRecording:
    """Runs a recording in a thread of its own; a context manager around the command.

    It ends at the command's end, its first step or the window's end; `ended_by` says which.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        window_s: float = WINDOW_S,
        events_dir: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recording, self._window_s, self._clock = recording, window_s, clock
        self._events_dir = events_dir
        self._watch: FirstStepWatch | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self.ended_by = "command"

    def __enter__(self) -> CommandRecording:
        if self._events_dir:
            self._watch = FirstStepWatch.begin(self._events_dir)
        self._recording.begin()
        start_without_signals(self._thread)
        return self

    def _run(self) -> None:
        until, looks = self._clock() + self._window_s, 0
        while not self._over.wait(POLL_S):
            if self._watch is not None and self._watch.was_reached():
                self.ended_by = "first step"
            elif self._clock() >= until:
                self.ended_by = "window"
            else:
                looks += 1
                if looks % SAMPLE_EVERY == 1:
                    self._recording.sample()
                continue
            self._recording.settle()
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._recording.close()

    def trace(self, *, succeeded: bool) -> FileTrace:
        """The trace of the start. `succeeded`: whether the command did what it should."""
        full = self.ended_by != "command" or succeeded
        return self._recording.finish(full=full)
