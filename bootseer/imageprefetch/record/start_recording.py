"""When a start's recording ends, and what becomes of its trace.

A start is recorded from its first touch until its first step, which an event file tells, or until
the window is over, whichever is first. Then, or when the mount ends before, its trace is merged
with those of earlier starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from bootseer import events
from bootseer import light_dataclasses as dataclasses
from bootseer.blocks.trace.recorder import Recorder
from bootseer.blocks.trace.trace_file import Trace
from bootseer.errors import BootseerError
from bootseer.imageprefetch.record.touch_journal import SAVE_S, Journal

if TYPE_CHECKING:
    from typing import Protocol

    class Traces(Protocol):
        """What a recording asks of a `TraceStore`."""

        def load(self, workload: str) -> Trace | None: ...

        def add(self, trace: Trace) -> Trace: ...


FIRST_STEP = "first_step"
POLL_S = 0.1
IDLE_S = 1.0  # between looks at a mount that nobody reads yet
LOOK_SHARE = 0.1  # of what starts touch: who reads less and unmounts has looked, not started
_MARK = b'"first_step"'  # what no other line of an event file is likely to hold
_MOST_BYTES = 4 << 20  # read of one file at a time


class FirstStepWatch:
    """Looks for `first_step` in what is written to a directory of event files from now on.

    What stands there already is of an earlier attempt and does not count.
    """

    def __init__(self, directory: str | os.PathLike[str], after_ns: int = 0) -> None:
        """`after_ns`: look for steps since that moment, though it lies in the past."""
        self._directory, self._after_ns = directory, after_ns
        self._read: dict[str, int] = dict(self._sizes(before_ns=after_ns))

    def _sizes(self, before_ns: int = 0) -> list[tuple[str, int]]:
        """The files' sizes; with `before_ns` only of those that have not changed since."""
        try:
            with os.scandir(self._directory) as entries:
                found = [(e.name, e.stat()) for e in entries if e.is_file()]
            return [(n, s.st_size) for n, s in found if not before_ns or s.st_mtime_ns < before_ns]
        except OSError:
            return []  # it may be made later, by whoever writes first

    def reached(self) -> bool:
        """Whether a first step was written since the last look."""
        return any(
            self._in_file(name, self._read.get(name, 0), size) for name, size in self._sizes()
        )

    def _in_file(self, name: str, start: int, size: int) -> bool:
        """Look through the whole lines that were added to a file."""
        if size < start:
            start = self._read[name] = 0  # it was replaced
        if size == start:
            return False
        try:
            with open(os.path.join(self._directory, name), "rb", buffering=0) as file:
                file.seek(start)
                added = file.read(_MOST_BYTES)
        except OSError:
            return False
        lines, newline, rest = added.rpartition(b"\n")
        if not newline and len(rest) == _MOST_BYTES:
            lines, newline, rest = rest, b"", b""  # no event is so long
        self._read[name] = start + len(lines) + len(newline)
        return _MARK in lines and any(
            _is_first_step(line, self._after_ns) for line in lines.split(b"\n")
        )


def _is_first_step(line: bytes, after_ns: int) -> bool:
    if _MARK not in line:
        return False
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(event, dict) or event.get("name") != FIRST_STEP:
        return False
    at_ns = event.get("time_unix_nano")
    return not after_ns or (isinstance(at_ns, int) and at_ns >= after_ns)


class LateRecorder(Recorder):
    """Asks for the name of what it records at its end: that may need a whole block table."""

    def __init__(
        self,
        named: Callable[[], str],
        size_bytes: int,
        workload: str,
        *,
        window_s: float,
        elapsed_s: float,
    ) -> None:
        super().__init__("", size_bytes, workload, window_s=window_s, elapsed_s=elapsed_s)
        self._named = named

    def trace(self, *, full: bool) -> Trace:
        return dataclasses.replace(super().trace(full=full), object=self._named())


class StartRecording:
    """Ends a recorder at the first step, and merges its trace into a store; a context manager.

    `full` is asked once, at the end: whether this was a cold start to which nothing was replayed.
    One that ends by unmount, having touched next to nothing of what starts do, is none in any case.
    `journal` gets the touches in small steps meanwhile; one that is resumed for a server that died
    tells since when (`begun_ns`) the first step is looked for. `ended` is called with the merged
    trace, or with None where nothing was touched or kept; nothing is where `began` says, at the
    unmount, that the command never did. What goes wrong here never reaches the
    start: it is told by an event.
    """

    def __init__(
        self,
        recorder: Recorder,
        store: Traces,
        *,
        full: Callable[[], bool],
        events_dir: str = "",
        ended: Callable[[Trace | None], None] | None = None,
        journal: Journal | None = None,
        begun_ns: int = 0,
        began: Callable[[], bool] = lambda: True,
    ) -> None:
        self._began = began
        self._recorder, self._store, self._journal = recorder, store, journal
        self._full, self._ended = full, ended
        self._watch = FirstStepWatch(events_dir, begun_ns) if events_dir else None
        self._closing = threading.Event()
        self._kept = threading.Lock()
        self._done = False
        self.why = ""
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)

    def start(self) -> StartRecording:
        """Begin to watch; returns at once."""
        self._thread.start()
        return self

    def _run(self) -> None:
        wait_s = None if self._journal is None else SAVE_S
        wait_s = wait_s if self._watch is None else POLL_S
        reached = self._reached_idle()
        unsaved_s = 0.0
        while not reached and (left_s := self._recorder.left_s()) > 0:
            waited_s = min(left_s, left_s if wait_s is None else wait_s)
            if self._closing.wait(waited_s):
                return  # `close` keeps the trace
            unsaved_s += waited_s
            if self._journal is not None and unsaved_s >= SAVE_S:
                unsaved_s = 0.0
                self._journal.save(self._recorder)
            reached = self._watch is not None and self._watch.reached()
        self._keep("first step" if reached else "window")

    def _reached_idle(self) -> bool:
        """Wait for the first touch; True when a first step was told without any."""
        while not self._recorder.wait(IDLE_S):
            if self._watch is not None and self._watch.reached():
                return True
        return False

    def _keep(self, why: str) -> None:
        with self._kept:
            if self._done:
                return
            self._done = True
            self.why = why
            self._recorder.end()
            merged = self._merge()
            if self._journal is not None:
                self._journal.remove()
            # Under the lock: who closes at this moment ends the process right behind it.
            if self._ended is not None:
                self._ended(merged)

    def _merge(self) -> Trace | None:
        trace = self._recorder.trace(full=self._full())
        if not trace.extents or (self.why == "unmount" and not self._began()):
            return None
        trace = self._unless_look(from_first_touch(trace))
        attributes = {
            "bootseer.bytes": trace.touched_bytes(),
            "bootseer.image.workload": trace.workload,
            "bootseer.image.full": bool(trace.starts),
            "bootseer.image.ended_by": self.why,
        }
        with events.open_writer() as writer:
            try:
                merged = self._store.add(trace)
            except BootseerError as error:  # a full disk must not stop anybody's start
                writer.point("image.record", "fallback", {"bootseer.reason": str(error)})
                return None
            attributes["bootseer.image.starts"] = merged.starts
            writer.point("image.record", "ok", attributes)
        return merged

    def _unless_look(self, trace: Trace) -> Trace:
        """The trace; of what was no start but somebody's look, one that counts for no start."""
        if not trace.starts or self.why != "unmount":
            return trace
        try:
            known = self._store.load(trace.workload)
        except BootseerError:  # it is set aside when this one is added
            return trace
        if known is None or trace.touched_bytes() >= LOOK_SHARE * known.mean_bytes():
            return trace
        extents = tuple(e._replace(starts_seen=0, replays_seen=1) for e in trace.extents)
        return dataclasses.replace(trace, starts=0, replays=0, extents=extents)

    def close(self) -> None:
        """End now, if it has not ended, and keep what was touched; twice is safe."""
        self._closing.set()
        self._recorder.end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._keep("unmount")

    def __enter__(self) -> StartRecording:
        with contextlib.suppress(RuntimeError):  # it was started already
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def from_first_touch(trace: Trace) -> Trace:
    """The same, with times from its first touch on.

    How long a mount stood there before anybody used it differs from start to start and would mix
    up their order when they are merged.
    """
    if not trace.extents:
        return trace
    zero_ms = min(extent.first_touch_ms for extent in trace.extents)
    extents = tuple(e._replace(first_touch_ms=e.first_touch_ms - zero_ms) for e in trace.extents)
    return dataclasses.replace(trace, extents=extents)
