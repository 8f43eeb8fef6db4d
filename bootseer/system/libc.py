"""The C library, for functions that Python's `os` lacks.

It is loaded at the first use: importing ctypes takes milliseconds that most commands can save.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import CDLL

_loaded: list[CDLL] = []


def libc() -> CDLL:
    """The functions of the C library; `last_error` tells why a call failed.

    The object is shared by the whole process. To set a function's `argtypes`, take a function
    object of your own by `libc()["name"]`.
    """
    if not _loaded:
        import ctypes

        _loaded.append(ctypes.CDLL(None, use_errno=True))
    return _loaded[0]


def last_error(path: str | bytes | None = None) -> OSError:
    """The error of this thread's last call of a C function, with `path` as its file name."""
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


def system_call(number: int, *words: int | bytes) -> int:
    """syscall(2), for a system call without a function in the C library. Raises OSError."""
    import ctypes

    arguments = [word if isinstance(word, bytes) else ctypes.c_long(word) for word in words]
    result: int = libc().syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise last_error()
    return result
