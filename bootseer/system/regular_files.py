"""Regular files: opening them in folders that others may write to, reading and writing fully.

Opening a FIFO waits for its other end, for ever where there is none, and reading a device may.
"""

from __future__ import annotations

import errno
import os
import stat

_KINDS = (
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def irregularity(mode: int) -> str:
    """What `st_mode` says that an entry is, as "a FIFO (named pipe)"; "" of files and folders."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "")


def open_to_read(path: str, flags: int = 0, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file, or of a folder; at once, whatever stands there.

    Raises OSError: ENXIO for a FIFO, a socket or a device, else that of open(2), to which `flags`
    are more flags.
    """
    # A look first: to open a FIFO and close it takes bytes that another reader should get.
    follow = not flags & os.O_NOFOLLOW
    _refuse(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow), path)
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        _refuse(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _refuse(status: os.stat_result, path: str) -> None:
    kind = irregularity(status.st_mode)
    if kind:
        raise OSError(errno.ENXIO, f"it is {kind}, no file", path)


def opener(path: str, flags: int) -> int:
    """`open_to_read` as the `opener` of `open(path, "rb")`."""
    return open_to_read(path, flags)


def reopen_to_read(place: int, path: str | bytes = "") -> int:
    """Open for reading the regular file that an O_PATH descriptor refers to.

    Unlike a plain open, one with O_PATH has no effect on devices and pipes. Raises OSError with
    `path` as its file name, EINVAL for anything but a regular file.
    """
    if not stat.S_ISREG(os.fstat(place).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_fully(fd: int, view: memoryview, offset: int) -> int:
    """Fill a buffer from an open file. Returns the bytes read, fewer where the file ends."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def write_fully(fd: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of `data`, at the current position or at `offset`."""
    view, done = memoryview(data), 0
    while done < len(view):
        if offset is None:
            done += os.write(fd, view[done:])
        else:
            done += os.pwrite(fd, view[done:], offset + done)
