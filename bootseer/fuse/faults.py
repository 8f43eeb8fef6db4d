"""Where a server's own faults go: an event and a callback, once for each kind."""

from __future__ import annotations

from collections.abc import Callable

from bootseer.profiler import events

_MOST_KINDS = 1000


class Faults:
    """Remembers what was said, so that a million failing reads say it once."""

    def __init__(self, on_fault: Callable[[str], None] | None = None) -> None:
        self._on_fault = on_fault
        self._said: set[str] = set()

    def say(self, kind: str, text: str) -> None:
        """Tell of a fault of this kind, if it is the first one."""
        if kind in self._said or len(self._said) >= _MOST_KINDS:
            return
        self._said.add(kind)
        events.event("fuse.fault", **{"error.type": kind, "error.message": text})
        if self._on_fault is not None:
            self._on_fault(text)

    def failed(self, what: str, error: BaseException) -> None:
        """An operation raised what it should not have."""
        name = type(error).__name__
        self.say(f"{what} {name}", f"{what} failed: {name}: {error}")
