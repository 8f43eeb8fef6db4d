"""Trying a short call again while its store is away. Transfers of data are never retried here."""

from __future__ import annotations

import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Iterator

from bootseer.errors import DeadlineError, StoreUnavailableError, describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias, TypeVar

    T = TypeVar("T")
    E = TypeVar("E", bound=BaseException)

Listener: TypeAlias = Callable[[str, int, float], None]
"""Called with why a try failed, how many have failed, and for how many seconds more are made."""

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
TELL_AFTER_S, TELL_AGAIN_S = 2.0, 30.0
"""When a wait for a store is told of, and how soon the next telling may come."""

wait_listener: Listener | None = None
"""Called for each try that failed and will be made again, from any thread: for a process whose log
is not read."""
_told_s = -math.inf
_end_s: contextvars.ContextVar[float] = contextvars.ContextVar("end_s", default=math.inf)


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Bound all calls of the block together: after `limit_s` none is tried (again)."""
    token = _end_s.set(min(_end_s.get(), time.monotonic() + limit_s))
    try:
        yield
    finally:
        _end_s.reset(token)


def another(error: E) -> E:
    """The same error once more, for another caller: each raises an object of its own.

    All that it tells goes along, such as how long a server wants to be left alone.
    """
    import copy

    fresh = copy.copy(error)
    fresh.__cause__ = error
    return fresh


def retrying(call: Callable[[], T], *, retry_s: float) -> T:
    """Return what `call` returns, trying again on StoreUnavailableError and DeadlineError.

    Waits grow from a tenth of a second, with full jitter, and are never shorter than the server
    asked for. No try starts later than `retry_s` after the first one; then the last error rises.
    Within `limited`, no try starts after that limit either, and a first one gives DeadlineError.
    A wait that a person would notice is logged as a warning; `wait_listener` is called for all.
    """
    began_s = time.monotonic()
    if began_s > _end_s.get():
        raise DeadlineError("the store did not answer in time what was asked before this")
    end_s = min(began_s + retry_s, _end_s.get())
    wait_s, tries = FIRST_WAIT_S, 0
    while True:
        tries += 1
        try:
            return call()
        except (StoreUnavailableError, DeadlineError) as error:
            from bootseer.system.randomness import CHANCE

            pause_s = max(CHANCE.uniform(0, wait_s), getattr(error, "retry_after_s", 0.0))
            if not error.retryable or time.monotonic() + pause_s > end_s:
                raise
            if wait_listener is not None:
                wait_listener(describe(error), tries, end_s - time.monotonic())
            if time.monotonic() - began_s >= TELL_AFTER_S:
                _tell(error, tries, end_s)
        time.sleep(pause_s)
        wait_s = min(wait_s * 2, LONGEST_WAIT_S)


def _tell(error: BaseException, tries: int, end_s: float) -> None:
    """Log that a store is waited for, unless that was just said, of this store or another."""
    global _told_s
    now_s = time.monotonic()
    if now_s - _told_s < TELL_AGAIN_S:
        return
    _told_s = now_s
    import logging  # ten milliseconds, which nearly every start can save

    text = "bootseer: %s; asking again for up to %d s (try %d)"
    logging.getLogger(__name__).warning(text, error, math.ceil(end_s - now_s), tries + 1)
