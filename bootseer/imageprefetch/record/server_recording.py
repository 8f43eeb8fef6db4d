"""The recording of one server: begun with its mount, or gone on with after a worker died."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer.imageprefetch.record.touch_journal import Journal

if TYPE_CHECKING:
    from bootseer.blockimage.serve.data_file import DataFile
    from bootseer.blocks.trace.trace_file import Trace
    from bootseer.imageprefetch.mount.mount import MountSettings
    from bootseer.imageprefetch.record.start_recording import LateRecorder, StartRecording
    from bootseer.imageprefetch.record.trace_store import TraceStore

SETTLE_S = 10.0


class Noting:
    """What programs read of a data file is noted, until the first step or the window's end.

    `named` gives the name of the image's data, as a trace has it; it is asked at the end.
    """

    def __init__(
        self, settings: MountSettings, journal: str, file: DataFile, named: Callable[[], str]
    ) -> None:
        self._settings, self._file, self._named = settings, file, named
        self._journal = Journal(journal)
        self._recorder: LateRecorder | None = None
        self._recording: StartRecording | None = None
        self._resumed = False
        self._settled = threading.Event()

    @property
    def active(self) -> bool:
        """Whether there is anything to `run`."""
        return self._recorder is not None

    def begin(self, data_bytes: int) -> None:
        """Note reads from now on, if this mount is to be recorded."""
        if self._settings.record:
            self._journal.create()
            self._note(data_bytes, 0.0)

    def resume(self, data_bytes: int) -> None:
        """Go on where the worker before this one did, if its recording was not over."""
        touches = self._journal.resume() if self._settings.record else None
        if touches is not None:
            self._resumed = True
            self._note(data_bytes, self._journal.elapsed_s).restore(touches)

    def _note(self, data_bytes: int, elapsed_s: float) -> LateRecorder:
        from bootseer.imageprefetch.record.start_recording import LateRecorder

        settings = self._settings
        made = self._recorder = LateRecorder(
            self._named,
            data_bytes,
            settings.workload,
            window_s=settings.record_window_s,
            elapsed_s=elapsed_s,
        )
        self._file.record(made)
        return made

    def run(self, folder: str, *, cold: bool, ended: Callable[[Trace | None], None]) -> None:
        """Wait for the end in the background, and merge the trace into those in `folder`.

        `cold`: nothing was replayed. A recording with a gap is no full start, nor is one to which
        somebody else replayed.
        """
        if self._recorder is None:
            return
        from bootseer.imageprefetch.record.start_recording import StartRecording

        settings, resumed, file = self._settings, self._resumed, self._file
        self._recording = StartRecording(
            self._recorder,
            _Traces(folder),
            full=lambda: cold and not resumed and not file.reads.warm_reads,
            events_dir=settings.events_dir,
            ended=ended,
            journal=self._journal,
            begun_ns=self._journal.begun_ns if resumed else 0,
            began=lambda: not (settings.not_begun and os.path.exists(settings.not_begun)),
        ).start()
        self._settled.set()

    def drop(self) -> None:
        """The image was not mounted, or is not served any more: there will be no `run`."""
        self._settled.set()

    def close(self) -> None:
        """End now, if it has not ended, and keep what was touched; twice is safe."""
        if self.active:
            self._settled.wait(SETTLE_S)  # whoever unmounts at once has touched something too
        if self._recording is not None:
            self._recording.close()


class _Traces:
    """A `TraceStore` that is imported when a start is over, or its hot set is there.

    Before, it would take time that the hot set's frames, and a job, wait for.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def _store(self) -> TraceStore:
        from bootseer.imageprefetch.record.trace_store import TraceStore

        return TraceStore(self._folder)

    def load(self, workload: str) -> Trace | None:
        """As `TraceStore.load`."""
        return self._store().load(workload)

    def add(self, trace: Trace) -> Trace:
        """As `TraceStore.add`."""
        return self._store().add(trace)
