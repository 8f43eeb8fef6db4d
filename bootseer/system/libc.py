"""The C library, for what Python's `os` lacks.

It is loaded at the first use: importing ctypes takes milliseconds, which most starts save.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import CDLL

_loaded: list[CDLL] = []


def libc() -> CDLL:
    """The C library's functions; `last_error` says why a call of one failed.

    All of this process share them: to set a function's `argtypes`, take one by `libc()["name"]`,
    which is the caller's own.
    """
    if not _loaded:
        import ctypes

        _loaded.append(ctypes.CDLL(None, use_errno=True))
    return _loaded[0]


def last_error(path: str | bytes | None = None) -> OSError:
    """Why this thread's last call failed, about a file where `path` names one."""
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


def system_call(number: int, *words: int | bytes) -> int:
    """syscall(2), for a system call that the C library has no function for. Raises OSError."""
    import ctypes

    given = [word if isinstance(word, bytes) else ctypes.c_long(word) for word in words]
    result: int = libc().syscall(ctypes.c_long(number), *given)
    if result < 0:
        raise last_error()
    return result
