"""One try at one request, shared by the thread that makes it and by whoever may give up on it."""

from __future__ import annotations

import threading
from collections.abc import Callable

STALL_S = 20.0


class Attempt:
    """One try at one range of one object.

    The caller sets the wishes: `avoid` and `prefer` name replicas (see `Placed`), `stall_s` is
    the longest time without a byte. The store keeps `replica` and `received_bytes` up to date,
    registers with `on_cancel` what breaks its connection, and raises StoreUnavailableError when
    it was cancelled. A store without replicas ignores the wishes.
    """

    __slots__ = (
        "_cancelled",
        "_close",
        "_lock",
        "avoid",
        "number",
        "prefer",
        "received_bytes",
        "replica",
        "stall_s",
    )

    def __init__(
        self,
        *,
        number: int = 0,
        avoid: frozenset[str] = frozenset(),
        prefer: str = "",
        stall_s: float = STALL_S,
    ) -> None:
        self.number = number
        self.avoid = avoid
        self.prefer = prefer
        self.stall_s = stall_s
        self.replica = ""
        self.received_bytes = 0
        self._lock = threading.Lock()
        self._cancelled = False
        self._close: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether somebody gave up on this try."""
        return self._cancelled

    def on_cancel(self, close: Callable[[], None] | None) -> None:
        """Say what breaks the connection in use (None: nothing any more).

        `close` is called at once when the try was cancelled before. It must be safe from another
        thread: shut a socket down, never close its descriptor.
        """
        with self._lock:
            self._close = close
            late = self._cancelled and close is not None
        if late and close is not None:
            close()

    def cancel(self) -> None:
        """Give up: the thread that makes the request gets an error soon."""
        with self._lock:
            self._cancelled = True
            close = self._close
        if close is not None:
            close()
