"""Trying a short call again while its store is away. Transfers of data are never retried here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from bootseer.errors import DeadlineError, StoreUnavailableError

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

T = TypeVar("T")


def retrying(call: Callable[[], T], *, retry_s: float) -> T:
    """Return what `call` returns, trying again on StoreUnavailableError and DeadlineError.

    Waits grow from a tenth of a second, with full jitter, and are never shorter than the server
    asked for. No try starts later than `retry_s` after the first one; then the last error rises.
    """
    end_s = time.monotonic() + retry_s
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return call()
        except (StoreUnavailableError, DeadlineError) as error:
            pause_s = max(random.uniform(0, wait_s), getattr(error, "retry_after_s", 0.0))
            if not error.retryable or time.monotonic() + pause_s > end_s:
                raise
        time.sleep(pause_s)
        wait_s = min(wait_s * 2, LONGEST_WAIT_S)
