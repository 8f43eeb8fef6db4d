"""Recording a start that runs already, at next to no cost to it.

While the job starts, only that is noted which would be lost later: how much its processes made the
disk read, the kernel's events where they are accessible, openings of files of other owners. The
files are examined once, when the start is over. All that is in memory then counts as read by the
start, if about as much was read since its begin; otherwise it was there before, and nothing counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.blocks.extents import Extent, covered_bytes
from bootseer.context_managers import Closing
from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.filemode import rate_limit
from bootseer.imageprefetch.filemode.inotify import OpenWatcher
from bootseer.imageprefetch.filemode.mincore import FileState, ResidencyProbe, probe_file
from bootseer.imageprefetch.filemode.pagemap import (
    MappedPages,
    mapping_order,
    process_tree,
    read_bytes,
)
from bootseer.imageprefetch.filemode.tracefs import Tracer, may_trace

if TYPE_CHECKING:  # loaded at the end, when the job does not wait for the disk any more
    from bootseer.imageprefetch.filemode.file_trace import FileTrace, Touch

FIRST_LOOK_S, LONGEST_BETWEEN_S = 0.25, 4.0
MAX_FOLDERS = 1 << 17
MAX_FILES = 1 << 19
NOTHING: Mapping[str, Sequence[Extent]] = {}


class ProcessFollower(Closing):
    """Records the start of process `pid` within its block; a context manager.

    Call `sample` a few times a second. `finish` makes the trace within some seconds; it works
    without pauses once `over` answers true. `method` and `why` say which method is used, and why.
    `helpers` are other processes that read only for this start. `cache_before` is
    `rate_limit.cache_bytes()` of the start's begin; default: now.
    """

    def __init__(
        self,
        roots: Sequence[str],
        workload: str,
        pid: int,
        *,
        helpers: Sequence[int] = (),
        over: Callable[[], bool] = lambda: False,
        cache_before: int | None = None,
    ) -> None:
        self._roots, self._workload, self._pid = roots, workload, pid
        self._helpers, self._over, self._cache_before = helpers, over, cache_before
        self._probe, self._mapped = ResidencyProbe(), MappedPages()
        self._begun_s, self._begun_wall_ns = time.monotonic(), time.time_ns()
        self._read_bytes = 0
        self._next_s, self._between_s = self._begun_s + FIRST_LOOK_S, FIRST_LOOK_S
        self.cold = False
        self.method, self.why = "residency", ""
        self._tracer: Tracer | None = None
        self._opens: OpenWatcher | None = None
        self._watching = rate_limit.LimitedWork(self._watch_folders())

    def start(self) -> ProcessFollower:
        """Choose the method, and begin to record."""
        if self._cache_before is None:
            self._cache_before = rate_limit.cache_bytes()
        self._tracer = self._start_tracer()
        # Files of our own are examined afterwards: their opening does not matter.
        if self._tracer is None and not self._probe.owns_all:
            self._opens = OpenWatcher().start()
        return self

    def _start_tracer(self) -> Tracer | None:
        if not may_trace():
            self.why = "the kernel's tracing is not open to this process"
            return None
        try:
            tracer = Tracer(self._pid).start()
        except NotSupportedError as error:
            self.why = str(error)
            return None
        self.method, self.why = "tracefs", "the kernel's tracing is open to this process"
        return tracer

    def _watch_folders(self) -> Iterator[None]:
        """Watch directories, those first from which the job has mapped something."""
        from bootseer.imageprefetch.filemode.roots import folders, resolve_roots

        assert self._opens is not None
        mapped_folders = {os.path.dirname(path) for path in self._mapped.pages()}
        for folder in sorted(mapped_folders):
            self._opens.add(folder)
        for count, (folder, _) in enumerate(folders(resolve_roots(self._roots))):
            self._opens.add(folder)
            if count >= MAX_FOLDERS:
                return
            yield

    def sample(self) -> None:
        """Note what would be lost later; cheap, and does nothing most times."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._between_s = min(2 * self._between_s, LONGEST_BETWEEN_S)
            self._next_s = now_s + self._between_s
            self._examine_processes()
        if self._opens is not None:
            self._watching.go_on(now_s - self._begun_s)

    def _examine_processes(self) -> None:
        pids = process_tree(self._pid)
        self._read_bytes = max(self._read_bytes, read_bytes([*pids, *self._helpers]))
        if self._opens is not None:
            self._mapped.look(pids, time.monotonic())

    def finish(
        self, *, full: bool, replayed: Mapping[str, Sequence[tuple[int, int]]] = NOTHING
    ) -> FileTrace:
        """The trace of this start.

        `full`: the start reached its end, its first step say, so that what it did not touch counts
        as well; only a cold start counts as full. What was `replayed` is left out.
        """
        from bootseer.imageprefetch.filemode import file_trace as filetraces
        from bootseer.imageprefetch.filemode import touches

        self._examine_processes()
        ranks = mapping_order(process_tree(self._pid))
        new_bytes = self._new_bytes()
        self.close()
        files = {
            state.path: state
            for state in self._files()
            # A file that the start itself made does not help the next start.
            if state.mtime_ns < self._begun_wall_ns and filetraces.is_plain_path(state.path)
        }
        traced = list(self._traced_touches(files.values()))
        resident = self._resident_touches(files.values(), new_bytes, ranks)
        touched = [*traced, *touches.subtract_ranges(resident, touches.by_path(traced))]
        own = list(touches.subtract_ranges(touched, replayed))
        listed = {
            path: filetraces.TracedFile(path, files[path].size_bytes, files[path].mtime_ns)
            for path in {touch.path for touch in own}
        }
        full = full and self.cold and not replayed
        return filetraces.trace_of_touches(listed, own, self._workload, full=full)

    def _new_bytes(self) -> Callable[[int], int]:
        """How many of a number of bytes in memory were read since the start's begin, at a guess.

        A lazily loaded file system reads no disk, but its pages are charged to the container. If
        that grew by more than all files have, it was other data that was read.
        """
        now = rate_limit.cache_bytes()
        growth = now - self._cache_before if now and self._cache_before else 0

        def new_bytes(resident_bytes: int) -> int:
            return max(self._read_bytes, growth if 2 * growth <= 3 * resident_bytes else 0)

        return new_bytes

    def _files(self) -> Iterator[FileState]:
        from bootseer.imageprefetch.filemode.roots import folders, resolve_roots

        pace, count = rate_limit.Pace(self._over), 0
        for _, entries in folders(resolve_roots(self._roots)):
            for entry in entries:
                state = probe_file(self._probe, entry.path)
                if state is not None:
                    yield state
            pace.rest()
            count += len(entries)
            if count >= MAX_FILES:
                return

    def _traced_touches(self, files: Iterable[FileState]) -> Iterator[Touch]:
        from bootseer.imageprefetch.filemode import touches

        if self._tracer is None:
            return iter(())
        return touches.from_events(files, self._tracer.events(), self._begun_s)

    def _resident_touches(
        self, files: Iterable[FileState], new_bytes: Callable[[int], int], ranks: Mapping[str, int]
    ) -> Iterator[Touch]:
        from bootseer.imageprefetch.filemode import touches
        from bootseer.imageprefetch.filemode.file_trace import Touch

        files = list(files)
        opened_s = self._opens.first_s if self._opens is not None else {}
        mapped = self._mapped.pages()
        first_s = {**self._mapped.first_s, **opened_s}
        resident_bytes = sum(covered_bytes(state.pages or ()) for state in files)
        opened = {
            s.path: touches.pages_of_opened(s, opened_s, mapped) for s in files if s.pages is None
        }
        is_unknown = any(opened.values())
        self.cold = not is_unknown and 3 * new_bytes(resident_bytes) > 2 * resident_bytes
        for state in files:
            pages = opened.get(state.path) or (state.pages if self.cold else None) or ()
            at_s = first_s.get(state.path)
            ms = ranks.get(state.path, 0) if at_s is None else touches.ms(at_s - self._begun_s)
            for page in pages:
                yield Touch(state.path, page.offset, page.length, ms)

    def close(self) -> None:
        """Stop watching; twice is safe."""
        if self._opens is not None:
            self._opens.close()
        if self._tracer is not None:
            self._tracer.close()

    def __enter__(self) -> ProcessFollower:
        return self.start()
