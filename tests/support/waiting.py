"""Waiting for what a test has begun to come true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 120.0
"""How long to wait at most; nothing is measured by it, so that a busy machine may take its time."""

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "it", *, limit_s: float = LIMIT_S) -> T:
    """Wait until a condition holds and return what it gave; fails saying `what` did not come."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.01)
    return value
