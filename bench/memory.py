"""Free memory stays with the machine while a benchmark runs.

A virtual machine may give free memory back to its host (free page reporting of virtio-balloon,
the kernel's mm/page_reporting.c); whoever touches it next waits for the host, about 3 µs a page of
4 KiB. How much was given back depends on how long the machine had rested, so that the same reading
of 512 MiB from HDFS took 2.8 s after six idle seconds and 1.7 s otherwise. For all sides alike,
blocks that are smaller than the largest are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

LEAST_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")
LARGEST = "10"  # MAX_PAGE_ORDER of most configurations


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep free memory from the host; without such a host, or without root, this does nothing."""
    try:
        before = LEAST_ORDER.read_text(encoding="ascii")
        _set(LARGEST)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        _set(before)


def _set(order: str) -> None:
    with LEAST_ORDER.open("r+", encoding="ascii") as file:  # never made
        file.write(order)


def is_given_back() -> bool:
    """Whether free memory goes back to a host now."""
    try:
        return int(LEAST_ORDER.read_text(encoding="ascii")) < int(LARGEST)
    except (OSError, ValueError):
        return False
