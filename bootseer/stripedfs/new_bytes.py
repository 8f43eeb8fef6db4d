"""Bytes objects that are filled in place, so that a large read is never copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


class NewBytes:
    """Bytes that are filled through `view` and then taken, without a second copy of them.

    Python's C interface allows filling a bytes object that was made without contents for as long
    as nothing else refers to it. Copying a large one would take longer than fetching it, and twice
    the memory.
    """

    __slots__ = ("_data", "view")

    def __init__(self, length: int) -> None:
        self._data: bytes = _make_bytes(None, length)
        self.view = memoryview(b"")
        if length:
            # A bytes object ends in its contents and one zero byte, which its size counts.
            begin = id(self._data) + bytes.__basicsize__ - 1
            memory = (ctypes.c_char * length).from_address(begin)
            setattr(memory, "owner", self._data)  # noqa: B010 - it lives as long as any view
            self.view = memoryview(memory).cast("B")

    def take(self, length: int) -> bytes:
        """The first `length` bytes; nothing may write to `view` any more."""
        return self._data if length == len(self._data) else self._data[:length]


_make_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_make_bytes.restype = ctypes.py_object
_make_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


def fill_bytes(length: int, fill: Callable[[memoryview], int]) -> bytes:
    """New bytes that `fill` writes; it returns how many they are."""
    new = NewBytes(max(0, length))
    return new.take(fill(new.view) if length > 0 else 0)
