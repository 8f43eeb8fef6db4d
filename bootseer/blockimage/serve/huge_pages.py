"""Memory for frames, in huge pages where the kernel has them.

Frames come by the hundred and stay for a while: touching fresh memory page by page costs a third
of unpacking them.
"""

from __future__ import annotations

import mmap

CHUNK_BYTES = 8 << 20
_ALIGNED_BYTES = 4096


class Arena:
    """Hands out pieces of large mappings; for one thread. A mapping goes with its last piece."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, size_bytes: int) -> memoryview:
        """So many writable bytes, all zero, for this caller alone."""
        if size_bytes > len(self._rest):
            mapped = mmap.mmap(
                -1, max(CHUNK_BYTES, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            if hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    mapped.madvise(mmap.MADV_HUGEPAGE)
                except OSError:
                    pass  # a kernel without them: slower, nothing else
            self._rest = memoryview(mapped)
        taken = self._rest[:size_bytes]
        used = -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._rest = self._rest[used:]
        return taken
