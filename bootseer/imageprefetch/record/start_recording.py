"""Recording a start: from its first touch until its first step, the window's end or the unmount.

An event file reports the first step. At the end the start's trace is merged with those of earlier
starts. `ServerRecording` is the recording of one image server, which a new worker continues when
one has died.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer import events
from bootseer import light_dataclasses as dataclasses
from bootseer.context_managers import Closing
from bootseer.errors import BootseerError
from bootseer.imageprefetch.record.touch_journal import SAVE_S, TouchJournal

if TYPE_CHECKING:
    from typing import Protocol

    from bootseer.blockimage.serve.data_file import DataFile
    from bootseer.blocks.trace.recorder import Recorder
    from bootseer.blocks.trace.trace_file import Trace
    from bootseer.imageprefetch.record.first_step import FirstStepWatch
    from bootseer.imageprefetch.record.trace_store import TraceStore

    class Traces(Protocol):
        """What a recording asks of a `TraceStore`."""

        def load(self, workload: str) -> Trace | None: ...

        def add(self, trace: Trace) -> Trace: ...


POLL_S = 0.1
IDLE_S = 1.0  # between looks for a first step while nothing has been read
SETTLE_S = 10.0  # an unmount waits so long for a mount that is still coming up
LOOK_SHARE = 0.1  # a mount with less than that of a usual start's reads was no start


class StartRecording(Closing):
    """Ends a recorder at the first step, and merges its trace into a store; a context manager.

    - `full`: asked once, at the end, whether this was a cold start to which nothing was replayed.
      A start that ends by unmount, having touched next to nothing of what starts do, never counts.
    - `name`: asked at the end for the name of the object that is recorded, which may need a whole
      block table; without it the recorder has it.
    - `journal`: where the touches are saved in small steps meanwhile. A recording that continues
      one of a server that died looks for first steps since `begun_ns`.
    - `ended`: called with the merged trace, or with None where nothing was touched or kept.
    - `began`: asked at the unmount whether the command was started at all; if not, nothing is kept.

    What goes wrong never reaches the start: an event reports it.
    """

    def __init__(
        self,
        recorder: Recorder,
        store: Traces,
        *,
        full: Callable[[], bool],
        name: Callable[[], str] | None = None,
        events_dir: str = "",
        ended: Callable[[Trace | None], None] | None = None,
        journal: TouchJournal | None = None,
        begun_ns: int = 0,
        began: Callable[[], bool] = lambda: True,
    ) -> None:
        self._recorder, self._store, self._journal = recorder, store, journal
        self._full, self._name, self._ended, self._began = full, name, ended, began
        self._events_dir, self._begun_ns = events_dir, begun_ns
        self._watch: FirstStepWatch | None = None
        self._closing = threading.Event()
        self._keep_lock = threading.Lock()
        self._is_kept = False
        self.why = ""
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)

    def start(self) -> StartRecording:
        """Begin to watch; returns at once."""
        if self._events_dir:
            from bootseer.imageprefetch.record.first_step import FirstStepWatch

            self._watch = FirstStepWatch.begin(self._events_dir, self._begun_ns)
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
            reached = self._watch is not None and self._watch.was_reached()
        self._keep("first step" if reached else "window")

    def _reached_idle(self) -> bool:
        """Wait for the first touch; True when a first step was reported without any."""
        while not self._recorder.wait(IDLE_S):
            if self._watch is not None and self._watch.was_reached():
                return True
        return False

    def _keep(self, why: str) -> None:
        with self._keep_lock:
            if self._is_kept:
                return
            self._is_kept = True
            self.why = why
            self._recorder.end()
            merged = self._merge()
            if self._journal is not None:
                self._journal.remove()
            # Under the lock: a thread that closes at this moment ends the process right after it.
            if self._ended is not None:
                self._ended(merged)

    def _merge(self) -> Trace | None:
        trace = self._recorder.trace(full=self._full())
        if not trace.extents or (self.why == "unmount" and not self._began()):
            return None
        if self._name is not None:
            trace = dataclasses.replace(trace, object=self._name())
        trace = self._discount_look(from_first_touch(trace))
        attributes = {
            "bootseer.bytes": trace.touched_bytes(),
            "bootseer.image.workload": trace.workload,
            "bootseer.image.full": bool(trace.starts),
            "bootseer.image.ended_by": self.why,
        }
        with events.open_writer() as writer:
            try:
                merged = self._store.add(trace)
            except BootseerError as error:  # a full disk must not prevent a start
                writer.point("image.record", "fallback", {"bootseer.reason": str(error)})
                return None
            attributes["bootseer.image.starts"] = merged.starts
            writer.point("image.record", "ok", attributes)
        return merged

    def _discount_look(self, trace: Trace) -> Trace:
        """The trace; if it was a short look instead of a start, one that counts for no start."""
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
        if self._thread.ident is None:
            self.start()
        return self


def from_first_touch(trace: Trace) -> Trace:
    """The same trace, with times that count from its first touch.

    How long an image was mounted before it was used differs from start to start, and would mix up
    their order when they are merged.
    """
    if not trace.extents:
        return trace
    zero_ms = min(extent.first_touch_ms for extent in trace.extents)
    extents = tuple(e._replace(first_touch_ms=e.first_touch_ms - zero_ms) for e in trace.extents)
    return dataclasses.replace(trace, extents=extents)


class ServerRecording:
    """The recording of what programs read through an image server's FUSE file, if it is wanted.

    `journal` is a file for the touches so far. `name` gives the name of the image's data, as a
    trace has it; it is asked at the end. If the file `not_begun` exists at the unmount, the
    command was never started.
    """

    def __init__(
        self,
        file: DataFile,
        journal: str,
        name: Callable[[], str],
        *,
        wanted: bool,
        workload: str,
        window_s: float,
        events_dir: str,
        not_begun: str,
    ) -> None:
        self._file, self._name, self._is_wanted = file, name, wanted
        self._workload, self._window_s = workload, window_s
        self._events_dir, self._not_begun = events_dir, not_begun
        self._journal = TouchJournal(journal)
        self._recorder: Recorder | None = None
        self._recording: StartRecording | None = None
        self._is_resumed = False
        self._is_settled = threading.Event()

    @property
    def is_active(self) -> bool:
        """Whether there is anything to `run`."""
        return self._recorder is not None

    def begin(self, data_bytes: int) -> None:
        """Record reads from now on."""
        if self._is_wanted:
            self._journal.create()
            self._record(data_bytes, 0.0)

    def resume(self, data_bytes: int) -> None:
        """Continue the recording of the previous worker, if it was not over."""
        touches = self._journal.resume() if self._is_wanted else None
        if touches is not None:
            self._is_resumed = True
            self._record(data_bytes, self._journal.elapsed_s).restore(touches)

    def _record(self, data_bytes: int, elapsed_s: float) -> Recorder:
        from bootseer.blocks.trace.recorder import Recorder

        recorder = self._recorder = Recorder(
            "",
            data_bytes,
            self._workload,
            window_s=self._window_s,
            elapsed_s=elapsed_s,
        )
        self._file.record(recorder)
        return recorder

    def run(self, folder: str, *, cold: bool, ended: Callable[[Trace | None], None]) -> None:
        """Wait for the end in the background, and merge the trace into those in `folder`.

        `cold`: nothing was replayed. A recording with a gap is no full start, nor is one to which
        another process replayed.
        """
        if self._recorder is None:
            return
        is_resumed, file, not_begun = self._is_resumed, self._file, self._not_begun
        self._recording = StartRecording(
            self._recorder,
            _LateTraceStore(folder),
            full=lambda: cold and not is_resumed and not file.reads.warm_reads,
            name=self._name,
            events_dir=self._events_dir,
            ended=ended,
            journal=self._journal,
            begun_ns=self._journal.begun_ns if is_resumed else 0,
            began=lambda: not (not_begun and os.path.exists(not_begun)),
        ).start()
        self._is_settled.set()

    def drop(self) -> None:
        """There will be no `run`: the image was not mounted, or is not served any more."""
        self._is_settled.set()

    def close(self) -> None:
        """End now, if it has not ended, and keep what was touched; twice is safe."""
        if self.is_active:
            self._is_settled.wait(SETTLE_S)  # a mount that is unmounted at once was read, too
        if self._recording is not None:
            self._recording.close()


class _LateTraceStore:
    """A `TraceStore` that is imported when a start is over.

    Imported earlier, it would delay the hot set's frames, for which a job waits.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def _open(self) -> TraceStore:
        from bootseer.imageprefetch.record.trace_store import TraceStore

        return TraceStore(self._folder)

    def load(self, workload: str) -> Trace | None:
        """As `TraceStore.load`."""
        return self._open().load(workload)

    def add(self, trace: Trace) -> Trace:
        """As `TraceStore.add`."""
        return self._open().add(trace)
