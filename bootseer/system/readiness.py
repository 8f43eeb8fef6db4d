"""Waiting until file descriptors can be read or written, whatever their numbers.

select(2) knows no descriptors from 1,024 on.
"""

from __future__ import annotations

import math
import select
from collections.abc import Iterable


def readable(*descriptors: int, timeout_s: float | None = None) -> frozenset[int]:
    """Those of some descriptors that have something to read, have ended or are broken.

    Waits until there is one, for `timeout_s` seconds at most (None: without end); none then.
    """
    return _ready(descriptors, select.POLLIN, timeout_s)


def writable(*descriptors: int, timeout_s: float | None = None) -> frozenset[int]:
    """As `readable`, of those that take something to write."""
    return _ready(descriptors, select.POLLOUT, timeout_s)


def _ready(descriptors: Iterable[int], events: int, timeout_s: float | None) -> frozenset[int]:
    watched = select.poll()
    for descriptor in descriptors:
        watched.register(descriptor, events)
    timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
    return frozenset(descriptor for descriptor, _ in watched.poll(timeout_ms))
