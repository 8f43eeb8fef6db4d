"""Where a server's own faults go: an event and a callback, once for each kind."""

from __future__ import annotations

from collections.abc import Callable

from bootseer import events

_MOST_KINDS = 1000


class Faults:
    """Remembers what was said, so that a million failing reads say it once.

    `event` is the name under which reports show it.
    """

    def __init__(
        self, on_fault: Callable[[str], None] | None = None, event: str = "fuse.fault"
    ) -> None:
        self._on_fault = on_fault
        self._event = event
        self._said: set[str] = set()

    def say(self, kind: str, text: str, same: str = "") -> None:
        """Tell of a fault, if it is the first one of this kind, or of those that are the `same`."""
        same = same or kind
        if same in self._said or len(self._said) >= _MOST_KINDS:
            return
        self._said.add(same)
        events.fault(self._event, **{"error.type": kind, "error.message": text})
        if self._on_fault is not None:
            self._on_fault(text)

    def failed(self, what: str, error: BaseException) -> None:
        """An operation raised what it should not have."""
        name = type(error).__name__
        self.say(f"{what} {name}", f"{what} failed: {name}: {error}")
