"""Warm, page-aligned memory for blocks, used again and again within one budget.

A page fault costs more than the copy that follows it: a copy into fresh pages runs at a fifth of
the speed of one into memory that was touched before. So memory is mapped in slabs, populated
once (in huge pages where the kernel has them), cut into slots of one size a slab, and never
given back to the kernel while other slots of its size may need it.

`Pool` only does the accounting: it is not thread-safe (its owner has the lock) and maps nothing.
The mapping happens in `Slot.view`, in the thread that needs the memory and outside that lock.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING

from bootseer.system.libc import libc

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
SLAB_BYTES = 4 << 20
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
SMALL_COPY_BYTES = 32 << 10


def slot_bytes(size_bytes: int) -> int:
    """The slot size for so many bytes: whole pages, at most a page or a quarter more than asked."""
    size_bytes = max(size_bytes, PAGE_BYTES)
    step = max(PAGE_BYTES, 1 << max(0, (size_bytes - 1).bit_length() - 3))
    return -(-size_bytes // step) * step


def writable(buffer: WriteableBuffer) -> memoryview:
    """The bytes of a reader's memory. Raises TypeError for memory that cannot be written to."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise TypeError("a read needs memory to write to, such as a bytearray; this is read-only")
    return view


def address_of(view: memoryview) -> int:
    """Where a writable, flat view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between writable views of equal length, without the interpreter's lock if long."""
    size = len(target)
    if size <= SMALL_COPY_BYTES:
        target[:] = source
    elif size != len(source):
        raise ValueError(f"cannot copy {len(source)} bytes into {size}")
    else:
        ctypes.memmove(address_of(target), address_of(source), size)


# Through ctypes both run without the interpreter's lock; `mmap.madvise` holds it.
_madvise = libc()["madvise"]
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mincore = libc()["mincore"]
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Slab:
    """One mapping of `count` slots."""

    __slots__ = ("_lock", "_map", "free", "size_bytes", "slot_bytes")

    def __init__(self, slot_size: int, count: int) -> None:
        self.slot_bytes = slot_size
        self.size_bytes = slot_size * count
        self.free = count
        self._lock = threading.Lock()
        self._map: memoryview | None = None

    def memory(self) -> memoryview:
        with self._lock:
            if self._map is None:
                self._map = _map_warm(self.size_bytes)
            return self._map


class Slot:
    """`size_bytes` of page-aligned memory that one owner uses at a time."""

    __slots__ = ("_start", "_view", "size_bytes", "slab")

    def __init__(self, slab: _Slab, start: int) -> None:
        self.slab = slab
        self.size_bytes = slab.slot_bytes
        self._start = start
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """The memory, mapped and populated at the first use."""
        if self._view is None:
            self._view = self.slab.memory()[self._start : self._start + self.slab.slot_bytes]
        return self._view


class Pool:
    """Slots of any size within `budget_bytes` of mappings. Not thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.mapped_bytes = 0
        self.used_bytes = 0
        self._free: dict[int, list[Slot]] = {}
        self._empty: dict[_Slab, None] = {}  # slabs none of whose slots is used, oldest first

    def take(self, size_bytes: int, *, beyond: bool = False) -> Slot | None:
        """A slot of at least `size_bytes`; None where the budget has no room (unless `beyond`)."""
        size = slot_bytes(size_bytes)
        free = self._free.get(size)
        if not free:
            if not self._grow(size, beyond):
                return None
            free = self._free[size]
        slot = free.pop()
        slab = slot.slab
        if slab in self._empty:
            del self._empty[slab]
        slab.free -= 1
        self.used_bytes += size
        return slot

    def give(self, slot: Slot) -> None:
        """Take a slot back; it must not be read or written any more."""
        slab = slot.slab
        slab.free += 1
        self.used_bytes -= slab.slot_bytes
        self._free[slab.slot_bytes].append(slot)
        if slab.free * slab.slot_bytes == slab.size_bytes:
            self._empty[slab] = None
            if self.mapped_bytes > self.budget_bytes:
                self._drop(slab)

    def clear(self) -> None:
        """Release all memory that is not in use."""
        for slab in list(self._empty):
            self._drop(slab)

    def _grow(self, size: int, beyond: bool) -> bool:
        most = max(1, min(SLAB_BYTES, self.budget_bytes // 8) // size)
        room = self.budget_bytes - self.mapped_bytes
        while room < size and self._empty:
            slab = next(iter(self._empty))
            room += slab.size_bytes
            self._drop(slab)
        if room < size and not beyond:
            return False
        count = max(1, min(most, room // size))
        slab = _Slab(size, count)
        self.mapped_bytes += slab.size_bytes
        self._empty[slab] = None
        slots = self._free.setdefault(size, [])
        slots.extend(Slot(slab, number * size) for number in reversed(range(count)))
        return True

    def _drop(self, slab: _Slab) -> None:
        """Forget a slab; its memory is unmapped with the last view of it."""
        del self._empty[slab]
        self.mapped_bytes -= slab.size_bytes
        kept = [slot for slot in self._free[slab.slot_bytes] if slot.slab is not slab]
        self._free[slab.slot_bytes] = kept


def _map_warm(size_bytes: int) -> memoryview:
    """Fresh private memory whose pages are populated."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    populate(view, huge=size_bytes >= HUGE_BYTES)
    return view


def populate(view: memoryview, *, huge: bool = False) -> None:
    """Bring in the whole pages of writable memory at once, rather than by a fault a page.

    Contents stay as they are. Nothing happens where the kernel cannot (before 5.14).
    """
    start = address_of(view)
    end = (start + len(view)) & -PAGE_BYTES
    start = -(-start // PAGE_BYTES) * PAGE_BYTES
    if end <= start:
        return
    if huge:
        _madvise(start, end - start, MADV_HUGEPAGE)
    _madvise(start, end - start, MADV_POPULATE_WRITE)


def looks_warm(view: memoryview) -> bool:
    """Whether the last page of a long view is there: a cheap guess, where populating is not."""
    page = (address_of(view) + len(view) - 1) & -PAGE_BYTES
    resident = ctypes.c_ubyte()
    return _mincore(page, PAGE_BYTES, ctypes.byref(resident)) == 0 and bool(resident.value & 1)
