"""One attempt at one request, as its maker and a thread that may cancel it share it."""

from __future__ import annotations

import threading
from collections.abc import Callable

STALL_S = 20.0


class Attempt:
    """One attempt at one range of one object.

    The caller sets the wishes: `avoid` and `prefer` name replicas (see `BlockLocation`), `stall_s`
    is the longest time without a byte. The store keeps `replica` and `received_bytes` up to date,
    registers with `on_cancel` what breaks its connection, and raises StoreUnavailableError when
    the attempt was cancelled. A store without replicas ignores the wishes.
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
        """Whether this attempt was given up."""
        return self._cancelled

    def on_cancel(self, close: Callable[[], None] | None) -> None:
        """Register what breaks the connection in use (None: there is none any more).

        `close` is called at once when the attempt was cancelled before. It must be safe from
        another thread: shut a socket down, never close its descriptor.
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
