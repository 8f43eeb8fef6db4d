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
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import LIMIT_S, until

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
    with _mapped(path) as mapped:
        pages = _pages_in_memory(mapped)
    return sum(pages) / len(pages)


@contextmanager
def held_in_memory(paths: Iterable[Path], *, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Wait until every page of the files has come into memory, and keep it there meanwhile.

    With a limit of 0, all must be there already. A kernel may page out what no process has mapped
    (DAMON's reclaim does, within seconds), so that the first pages can be gone before the last have
    come. Each page is mapped once it is seen.
    """
    with ExitStack() as stack:
        files = [(stack.enter_context(_mapped(path)), set[int]()) for path in paths]
        until(
            lambda: not [file for file in files if not _hold_pages(*file)],
            "the files' pages in memory",
            limit_s=limit_s,
        )
        yield


def _hold_pages(mapped: mmap.mmap, held: set[int]) -> bool:
    """Map the pages of a file that have come; whether all have."""
    pages = _pages_in_memory(mapped)
    for number in {number for number, here in enumerate(pages) if here} - held:
        mapped[number * mmap.PAGESIZE]
        held.add(number)
    return len(held) == len(pages)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), path.stat().st_size, flags=mmap.MAP_PRIVATE) as mapped,
    ):
        mapped.madvise(mmap.MADV_RANDOM)  # to touch a page reads none ahead
        yield mapped


def _pages_in_memory(mapped: mmap.mmap) -> list[bool]:
    seen = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    size = ctypes.c_size_t(len(mapped))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, seen) == 0
    return [bool(page & 1) for page in seen]


def drop(what: str = PAGES) -> None:
    """Empty the whole machine's page cache, or that of its inodes and names. Needs root.

    Never from a test with `page_cache_stays`, or while it is `staying`: it would wait for itself.
    """
    with _locked(fcntl.LOCK_EX):
        Path("/proc/sys/vm/drop_caches").write_text(what, encoding="ascii")
