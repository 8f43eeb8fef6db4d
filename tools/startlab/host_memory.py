"""Memory that a virtual machine has given back to its host.

Who touches it first waits for the host: 1.5 s a GiB were seen in huge pages, where memory of the
machine takes 0.1 s. How much a start needs of it depends on what the start before has freed, and
when. So it is taken back before each, on all sides alike.
"""

from __future__ import annotations

import contextlib
import mmap

_HUGE_BYTES = 2 << 20
MOST_BYTES = 6 << 30
"""Some times what a start of the example needs with its caches."""
MOST_SMALL_BYTES = 2 << 30


def take_back() -> None:
    """Touch free memory, half of it at most, and let go of it again.

    First in huge pages, then less of it in small ones: the kernel takes these from other lists,
    and with huge pages alone each third start still waited for its host, by 0.15 s.
    """
    size_bytes = min(MOST_BYTES, _available_bytes() // 2) // _HUGE_BYTES * _HUGE_BYTES
    if size_bytes:
        _touch(size_bytes, mmap.MADV_HUGEPAGE, step_bytes=mmap.PAGESIZE * 16)
        _touch(min(MOST_SMALL_BYTES, size_bytes), mmap.MADV_NOHUGEPAGE, step_bytes=mmap.PAGESIZE)


def _touch(size_bytes: int, advice: int, *, step_bytes: int) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size_bytes, flags=flags) as taken:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            taken.madvise(advice)
        for offset in range(0, size_bytes, step_bytes):
            taken[offset] = 1


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
