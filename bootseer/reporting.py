"""Faults of long-lived servers: each kind reported once, as a log line and as an event."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping

from bootseer import events
from bootseer.system.lru import put_youngest

MOST_KINDS = 1000


class Once:
    """Tells the first of each kind from those that follow, from any thread.

    With `forget_s` a kind that was not met for so long is new again; without, one is after
    MOST_KINDS others were met.
    """

    def __init__(self, forget_s: float = math.inf) -> None:
        self._forget_s = forget_s
        self._met_s: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def is_new(self, kind: Hashable) -> bool:
        """Whether this kind has not been met; from now on it has."""
        now_s = time.monotonic()
        with self._lock:
            if self._forget_s < math.inf:
                recent = {k: s for k, s in self._met_s.items() if now_s - s <= self._forget_s}
                self._met_s = recent
            is_new = kind not in self._met_s
            most = MOST_KINDS if self._forget_s == math.inf else len(self._met_s) + 1
            put_youngest(self._met_s, kind, now_s, most)
        return is_new


class Reporter:
    """Reports each kind of fault once, so that a million failing reads are one line.

    After MOST_KINDS reports there are no more, for texts that are kinds may differ without end;
    `endless`: kinds are few, or far apart. `event` is the name under which `bootseer report` shows
    them, `attributes` stand in each of these events, and `writer` writes them: by default this
    process's own. `log` takes the line, after the event or, with `log_first`, before it.
    """

    def __init__(
        self,
        event: str,
        log: Callable[[str], None] | None = None,
        *,
        log_first: bool = False,
        endless: bool = False,
        writer: events.NullWriter | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        self._event, self._log, self._log_first = event, log, log_first
        self._writer, self._attributes = writer, attributes or {}
        self._reported = Once()
        self._left: float = math.inf if endless else MOST_KINDS

    def report(self, kind: str, text: str, *, same: str = "") -> None:
        """Report a fault, if it is the first of its kind, or of those that are the `same`."""
        if self._left <= 0 or not self._reported.is_new(same or kind):
            return
        self._left -= 1
        if self._log is not None and self._log_first:
            self._log(text)
        attributes = {"error.type": kind, "error.message": text, **self._attributes}
        if self._writer is None:
            events.fault(self._event, **attributes)
        else:
            self._writer.point(self._event, "fallback", attributes)
        if self._log is not None and not self._log_first:
            self._log(text)

    def report_failure(self, what: str, error: BaseException) -> None:
        """Report that an operation raised what it should not have."""
        name = type(error).__name__
        self.report(f"{what} {name}", f"{what} failed: {name}: {error}")
