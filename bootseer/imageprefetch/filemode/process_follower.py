"""Recording a start that runs already, at next to no cost to it.

While the job starts there is only what cannot be had later: how much its processes made the disk
read, the kernel's events where they are open to us, openings of files that belong to others. The
files are looked at once, when the start is over. All that is in memory then counts as the start's,
if about as much came in since it began; otherwise they were there before, and nothing is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.blocks.extents import Extent, covered_bytes
from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.filemode import rate_limit
from bootseer.imageprefetch.filemode.inotify import Opens
from bootseer.imageprefetch.filemode.mincore import Asker, Seen, look
from bootseer.imageprefetch.filemode.pagemap import Mapped, mapping_order, read_bytes, tree
from bootseer.imageprefetch.filemode.tracefs import Tracer, may_trace

if TYPE_CHECKING:  # loaded at the end, when nobody waits for the disk any more
    from bootseer.imageprefetch.filemode.file_trace import FileTrace, Touch

FIRST_LOOK_S, LONGEST_BETWEEN_S = 0.25, 4.0
MAX_FOLDERS = 1 << 17
MAX_LOOKED_AT = 1 << 19
NOTHING: Mapping[str, Sequence[Extent]] = {}


class Following:
    """The start of process `pid`, followed from now on; a context manager.

    Call `sample` a few times a second. `finish` makes the trace, within some seconds; it hurries
    once `over` answers true. `method` and `why` say by what, and why by that.
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
        """`helpers`: other processes that read on its behalf alone. `cache_before`:
        `rate_limit.cache_bytes()` of the start's beginning; default: now."""
        self._roots, self._workload, self._pid = roots, workload, pid
        self._helpers, self._over = helpers, over
        self._asker, self._mapped = Asker(), Mapped()
        self._cache_before = rate_limit.cache_bytes() if cache_before is None else cache_before
        self._begun_s, self._begun_wall_ns = time.monotonic(), time.time_ns()
        self._own_bytes = 0
        self._next_s, self._between_s = self._begun_s + FIRST_LOOK_S, FIRST_LOOK_S
        self.cold = False
        self.method, self.why = "residency", ""
        self._tracer = self._traced_by()
        # One's own files are looked at afterwards: nothing has to be heard of them.
        self._opens = None if self._tracer or self._asker.owns_all else Opens()
        self._unheard = rate_limit.Paced(self._hear())

    def _traced_by(self) -> Tracer | None:
        if not may_trace():
            self.why = "the kernel's tracing is not open to this process"
            return None
        try:
            tracer = Tracer(self._pid)
        except NotSupportedError as error:
            self.why = str(error)
            return None
        self.method, self.why = "tracefs", "the kernel's tracing is open to this process"
        return tracer

    def _hear(self) -> Iterator[None]:
        """Listen to directories, those first from which the job has mapped something."""
        from bootseer.imageprefetch.filemode import roots as places

        assert self._opens is not None
        near = {os.path.dirname(path) for path in self._mapped.pages()}
        for folder in sorted(near):
            self._opens.add(folder)
        for count, (folder, _) in enumerate(places.folders(places.resolved(self._roots))):
            self._opens.add(folder)
            if count >= MAX_FOLDERS:
                return
            yield

    def sample(self) -> None:
        """Note what will not be there to be seen later; cheap, and does nothing most times."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._between_s = min(2 * self._between_s, LONGEST_BETWEEN_S)
            self._next_s = now_s + self._between_s
            self._look_at_processes()
        if self._opens is not None:
            self._unheard.go_on(now_s - self._begun_s)

    def opened(self) -> frozenset[str]:
        """Files of others whose opening was heard so far."""
        return frozenset(self._opens.first_s if self._opens is not None else ())

    def _look_at_processes(self) -> None:
        pids = tree(self._pid)
        self._own_bytes = max(self._own_bytes, read_bytes([*pids, *self._helpers]))
        if self._opens is not None:
            self._mapped.look(pids, time.monotonic())

    def finish(
        self, *, full: bool, replayed: Mapping[str, Sequence[tuple[int, int]]] = NOTHING
    ) -> FileTrace:
        """The trace of this start.

        `full`: the start came to its end, its first step say, so that what it did not touch says
        something too; it is believed of a cold one alone. What was `replayed` is left out.
        """
        from bootseer.imageprefetch.filemode import file_trace as filetraces
        from bootseer.imageprefetch.filemode import touches

        self._look_at_processes()
        ranks = mapping_order(tree(self._pid))
        came = self._came_bytes()
        self.close()
        files = {
            seen.path: seen
            for seen in self._files()
            # What the start itself made is nothing that the next one could read ahead.
            if seen.mtime_ns < self._begun_wall_ns and filetraces.is_plain_path(seen.path)
        }
        traced = list(self._traced(files.values()))
        resident = self._resident(files.values(), came, ranks)
        found = [*traced, *touches.without(resident, touches.by_path(traced))]
        seen = list(touches.without(found, replayed))
        listed = {
            path: filetraces.TracedFile(path, files[path].size_bytes, files[path].mtime_ns)
            for path in {touch.path for touch in seen}
        }
        full = full and self.cold and not replayed
        return filetraces.made(listed, seen, self._workload, full=full)

    def _came_bytes(self) -> Callable[[int], int]:
        """What of that many bytes in memory came in since the start began, as far as one knows.

        A lazily loaded file system reads no disk, but its pages are charged to the container.
        More than all files have tells nothing: then it was data that came.
        """
        now = rate_limit.cache_bytes()
        grown = now - self._cache_before if now and self._cache_before else 0

        def came(resident_bytes: int) -> int:
            return max(self._own_bytes, grown if 2 * grown <= 3 * resident_bytes else 0)

        return came

    def _files(self) -> Iterator[Seen]:
        from bootseer.imageprefetch.filemode import roots as places

        pace, count = rate_limit.Pace(self._over), 0
        for _, entries in places.folders(places.resolved(self._roots)):
            for entry in entries:
                seen = look(self._asker, entry.path)
                if seen is not None:
                    yield seen
            pace.rest()
            count += len(entries)
            if count >= MAX_LOOKED_AT:
                return

    def _traced(self, files: Iterable[Seen]) -> Iterator[Touch]:
        from bootseer.imageprefetch.filemode import touches

        if self._tracer is None:
            return iter(())
        return touches.traced(files, self._tracer.heard(), self._begun_s)

    def _resident(
        self, files: Iterable[Seen], came: Callable[[int], int], ranks: Mapping[str, int]
    ) -> Iterator[Touch]:
        from bootseer.imageprefetch.filemode import touches
        from bootseer.imageprefetch.filemode.file_trace import Touch

        files = list(files)
        heard = self._opens.first_s if self._opens is not None else {}
        mapped = self._mapped.pages()
        first = {**self._mapped.first_s, **heard}
        there = sum(covered_bytes(seen.pages or ()) for seen in files)
        opened = {s.path: touches.opened(s, heard, mapped) for s in files if s.pages is None}
        unknown = any(opened.values())
        self.cold = not unknown and 3 * came(there) > 2 * there
        for seen in files:
            pages = opened.get(seen.path) or (seen.pages if self.cold else None) or ()
            at_s = first.get(seen.path)
            ms = ranks.get(seen.path, 0) if at_s is None else touches.ms(at_s - self._begun_s)
            for page in pages:
                yield Touch(seen.path, page.offset, page.length, ms)

    def close(self) -> None:
        """Listen no more; twice is safe."""
        if self._opens is not None:
            self._opens.close()
        if self._tracer is not None:
            self._tracer.close()

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
