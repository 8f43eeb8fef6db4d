"""Opening an input that the user names: a file, a pipe by its path, or standard input."""

from __future__ import annotations

import os
import stat
import sys
from typing import BinaryIO

from bootseer.errors import UsageError
from bootseer.system.regular_files import irregularity, open_to_read


def standard_input() -> BinaryIO:
    """Return standard input as a binary stream. Raises UsageError if it is closed."""
    if sys.stdin is None:  # as `<&-` leaves it
        raise UsageError("cannot read standard input: it is closed; name a file, or give it one")
    return sys.stdin.buffer


def open_input(path: str, flags: int) -> int:
    """Open `path` and return its descriptor: the `opener` of `open(path, "rb", opener=...)`.

    A FIFO, such as a shell's `<(...)` or `/dev/stdin` in a pipeline, is opened as usual and may
    block until it has a writer. The null device reads as empty. Raises OSError, and UsageError
    for a socket and for any other device, which may have no end.
    """
    status = os.stat(path)
    if stat.S_ISFIFO(status.st_mode) or _is_null_device(status):
        return os.open(path, flags)
    kind = irregularity(status.st_mode)
    if kind:
        raise UsageError(f"cannot read {path}: it is {kind}; name a file, a pipe, or - for stdin")
    return open_to_read(path)


def _is_null_device(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev
