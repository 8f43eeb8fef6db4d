"""How long to wait before another try, and calls that are tried again while a store is away.

The calls are short ones, and `Store.read_range`; `Store.read_scatter` is one attempt, which its
callers repeat.
"""

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
REPORT_AFTER_S, REPORT_AGAIN_S = 2.0, 30.0
"""After how long a wait for a store is reported, and how soon the next report may come."""

_MOST_DOUBLINGS = 60  # a float ends at 1,023; some callers never give up

wait_listener: Listener | None = None
"""Called for each try that failed and will be made again, from any thread: for a process whose log
is not read."""
_reported_s = -math.inf
_end_s: contextvars.ContextVar[float] = contextvars.ContextVar("end_s", default=math.inf)


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Bound all calls of the block together: after `limit_s` none is tried (again)."""
    token = _end_s.set(min(_end_s.get(), time.monotonic() + limit_s))
    try:
        yield
    finally:
        _end_s.reset(token)


def backoff_s(
    failures: int,
    *,
    first_s: float = FIRST_WAIT_S,
    most_s: float = LONGEST_WAIT_S,
    error: BaseException | None = None,
    chance: float | None = None,
) -> float:
    """Seconds until the next try after a number of failures in a row (1, 2, …): full jitter.

    A share `chance` (0 to 1, by default a random one) of a time that is `first_s` at the first
    failure, doubles with each further one, and is never more than `most_s`. A server that said in
    `error` how long it wants to be left alone is asked no sooner.
    """
    if chance is None:
        from bootseer.system.randomness import CHANCE  # a millisecond, for calls that failed

        chance = CHANCE.random()
    ceiling_s = min(most_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
    asked_s = error.retry_after_s if isinstance(error, StoreUnavailableError) else 0.0
    return max(chance * ceiling_s, asked_s)


def another(error: E) -> E:
    """The same error once more, for another caller: each raises an object of its own.

    All that it tells goes along, such as how long a server wants to be left alone.
    """
    import copy

    fresh = copy.copy(error)
    fresh.__cause__ = error
    return fresh


def retry_call(call: Callable[[], T], *, retry_s: float) -> T:
    """Return what `call` returns, trying again on StoreUnavailableError and DeadlineError.

    Between tries it waits for `backoff_s`. No try starts later than `retry_s` after the first one;
    then the last error rises. Within `limited`, no try starts after that limit either, and a first
    one gives DeadlineError.
    A wait that a person would notice is logged as a warning; `wait_listener` is called for all.
    """
    began_s = time.monotonic()
    if began_s > _end_s.get():
        raise DeadlineError("the store did not answer in time what was asked before this")
    end_s = min(began_s + retry_s, _end_s.get())
    tries = 0
    while True:
        tries += 1
        try:
            return call()
        except (StoreUnavailableError, DeadlineError) as error:
            pause_s = backoff_s(tries, error=error)
            if not error.retryable or time.monotonic() + pause_s > end_s:
                raise
            if wait_listener is not None:
                wait_listener(describe(error), tries, end_s - time.monotonic())
            if time.monotonic() - began_s >= REPORT_AFTER_S:
                _report(error, tries, end_s)
        time.sleep(pause_s)


def _report(error: BaseException, tries: int, end_s: float) -> None:
    """Log that a store is waited for, unless that was just said, of this store or another."""
    global _reported_s
    now_s = time.monotonic()
    if now_s - _reported_s < REPORT_AGAIN_S:
        return
    _reported_s = now_s
    import logging  # ten milliseconds, which nearly every start can save

    text = "bootseer: %s; asking again for up to %d s (try %d)"
    logging.getLogger(__name__).warning(text, error, math.ceil(end_s - now_s), tries + 1)
