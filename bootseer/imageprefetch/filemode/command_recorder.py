"""Recording one command from its beginning to its first step, its end or the window's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from bootseer.imageprefetch.filemode.file_trace import FileTrace
from bootseer.imageprefetch.filemode.recorder import WINDOW_S, Recording
from bootseer.imageprefetch.filemode.threads import start_deaf
from bootseer.imageprefetch.record.first_step import FirstStepWatch

POLL_S = 0.1
SAMPLE_EVERY = 3


class CommandRecording:
    """Watches a recording from a thread of its own; a context manager around the command.

    Leaving it ends the recording; `trace` then gives what was seen and `ended_by` says by what.
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
        self._watch = FirstStepWatch.begin(events_dir) if events_dir else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self.ended_by = "command"

    def __enter__(self) -> CommandRecording:
        self._recording.begin()
        start_deaf(self._thread)
        return self

    def _run(self) -> None:
        until, looks = self._clock() + self._window_s, 0
        while not self._over.wait(POLL_S):
            if self._watch is not None and self._watch.reached():
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
        """What was seen. `succeeded`: whether the command did what it was to do."""
        full = self.ended_by != "command" or succeeded
        return self._recording.finish(full=full)
