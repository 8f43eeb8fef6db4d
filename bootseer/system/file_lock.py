"""Locks of whole files and directories among processes, by flock(2).

A lock is an open file's: children that have its descriptor hold it as well. It ends when the last
of them has closed it, however their processes end.
"""

from __future__ import annotations

import fcntl
import os
import time

from bootseer.context_managers import Closing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE_S = 0.05


class FileLock(Closing):
    """The lock of an open file, which closing it lets go of. Twice is safe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def is_named(self, path: str) -> bool:
        """Whether a path leads to the very file: its holder before may have removed or moved it."""
        return is_named(self.descriptor, path)

    def release(self) -> None:
        """Let go of it for children that have the descriptor, too."""
        unlock(self.descriptor)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def acquire(
    path: str,
    mode: int = 0o600,
    *,
    create: bool = True,
    flags: int = 0,
    limit_s: float | None = None,
    waiting: Callable[[], None] | None = None,
) -> FileLock:
    """Open a file and lock it; it is made where there is none, unless `create` is false.

    `flags` are more flags of open(2). Raises OSError; see `lock`.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    return _locked(os.open(path, flags, mode), limit_s, waiting)


def acquire_directory(path: str, *, limit_s: float | None = None) -> FileLock:
    """Open a directory, which must be there, and lock it. Raises OSError; see `lock`."""
    return _locked(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), limit_s)


def _locked(
    descriptor: int, limit_s: float | None, waiting: Callable[[], None] | None = None
) -> FileLock:
    try:
        lock(descriptor, limit_s=limit_s, waiting=waiting)
    except BaseException:  # who asked never had it to close
        os.close(descriptor)
        raise
    return FileLock(descriptor)


def lock(
    descriptor: int,
    *,
    shared: bool = False,
    limit_s: float | None = None,
    waiting: Callable[[], None] | None = None,
) -> None:
    """Lock an open file, instead of the lock that it has; a shared one stands beside others.

    Waits for `limit_s` seconds, without end where it is None, after a call of `waiting` where it
    must wait at all. Raises BlockingIOError where another open file holds it longer (the lock that
    there was may be lost then), and other OSErrors where files have no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if limit_s is None and waiting is None:
        return fcntl.flock(descriptor, kind)
    end_s = None if limit_s is None else time.monotonic() + limit_s
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if end_s is not None and time.monotonic() >= end_s:
                raise
        if waiting is not None:
            waiting, said = None, waiting
            said()
        time.sleep(_PAUSE_S)


def unlock(descriptor: int) -> None:
    """Let go of an open file's lock, if it has one."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_named(descriptor: int, path: str) -> bool:
    """Whether a path leads to the very file that is open, and is no symbolic link."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
