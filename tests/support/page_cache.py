"""The machine's page cache, which some tests must empty while others see what comes into it.

There is no narrower way to empty a mount's: it is everybody's. So who does it waits until no test
beside it, in another worker, relies on what is in memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LOCK = Path(tempfile.gettempdir(), f"bootseer-tests-page-cache-{os.getuid()}")
PAGES, INODES = "1", "2"


@contextmanager
def _locked(how: int) -> Iterator[None]:
    with LOCK.open("w") as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def staying() -> Iterator[None]:
    """No other test empties the page cache meanwhile."""
    with _locked(fcntl.LOCK_SH):
        yield


@pytest.fixture
def page_cache_stays() -> Iterator[None]:
    """No other test empties the page cache during this one."""
    with staying():
        yield


def share_in_memory(path: Path) -> float:
    """The share of a file's pages that the page cache holds."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapped:
        seen = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), seen) == 0
    return sum(page & 1 for page in seen) / len(seen)


def drop(what: str = PAGES) -> None:
    """Empty the whole machine's page cache, or that of its inodes and names. Needs root.

    Never from a test with `page_cache_stays`, or while it is `staying`: it would wait for itself.
    """
    with _locked(fcntl.LOCK_EX):
        Path("/proc/sys/vm/drop_caches").write_text(what, encoding="ascii")
