"""Locks on whole files and directories between processes, by flock(2).

A lock belongs to an open file description: a child process that inherits the descriptor holds the
lock as well. The kernel releases it when the last such descriptor is closed, also when a process is
killed.
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
    """A lock that is held until `close`, which may be called twice."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def is_named(self, path: str) -> bool:
        """Whether `path` still leads to the locked file: see `is_named`."""
        return is_named(self.descriptor, path)

    def release(self) -> None:
        """Release the lock although child processes may have the descriptor open."""
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
    """Open a file and lock it exclusively. A missing file is created, with `create`.

    `flags` are added to those of open(2). Raises OSError; for the rest see `lock`.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    return _lock_opened(os.open(path, flags, mode), limit_s, waiting)


def acquire_directory(path: str, *, limit_s: float | None = None) -> FileLock:
    """Open an existing directory and lock it exclusively. Raises OSError; see `lock`."""
    return _lock_opened(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), limit_s)


def _lock_opened(
    descriptor: int, limit_s: float | None, waiting: Callable[[], None] | None = None
) -> FileLock:
    try:
        lock(descriptor, limit_s=limit_s, waiting=waiting)
    except BaseException:  # the caller has no descriptor to close
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
    """Lock an open file, in place of the lock that it has already.

    Waits `limit_s` seconds at most: None is without limit, 0 is not at all. `waiting` is called
    once before a wait begins. Raises BlockingIOError when the lock is still held elsewhere; a lock
    that was to be replaced may be lost then. Raises other OSErrors where the file system has no
    locks.
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
            waiting()
            waiting = None
        time.sleep(_PAUSE_S)


def unlock(descriptor: int) -> None:
    """Release an open file's lock, if it has one."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_named(descriptor: int, path: str) -> bool:
    """Whether `path` leads to an open file, and not by a symbolic link.

    Between open and lock a previous holder may have removed or replaced the file.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
