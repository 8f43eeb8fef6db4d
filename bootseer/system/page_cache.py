"""What the kernel's page cache has of a file, by cachestat(2): Linux 6.5, `linux/mman.h`.

For a file on overlayfs it looks at the wrong cache and reports nothing.
"""

from __future__ import annotations

import mmap

from bootseer.system.libc import system_call

_CACHESTAT = 451  # on every architecture: it is newer than their common numbers
_COUNTS = 5


def count_cached_bytes(descriptor: int, offset: int, length: int) -> int:
    """How many bytes of a range are in whole pages of the cache; the last page may exceed it.

    Raises OSError, also where the kernel has no such call. A length of 0 reaches to the file's end.
    """
    import ctypes

    numbers = ctypes.c_uint64 * 2
    span, counted = numbers(offset, length), (ctypes.c_uint64 * _COUNTS)()
    system_call(_CACHESTAT, descriptor, ctypes.addressof(span), ctypes.addressof(counted), 0)
    return int(counted[0]) * mmap.PAGESIZE
