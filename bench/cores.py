"""Which processors the two ends of a benchmark run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator


def halves() -> tuple[list[int], list[int]]:
    """The processors of this process in two halves: for the client, for the servers."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]


@contextlib.contextmanager
def only_on(cpus: Collection[int]) -> Iterator[None]:
    """Threads and processes started meanwhile stay on these; on any where none is named."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cpus) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
