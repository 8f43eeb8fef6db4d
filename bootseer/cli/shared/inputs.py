"""Opening what a user names as input: a file, or a pipe by its path."""

from __future__ import annotations

import os
import stat
import sys
from typing import BinaryIO

from bootseer.errors import UsageError
from bootseer.system.regular_files import irregularity, open_to_read


def standard_input() -> BinaryIO:
    """The bytes of standard input; UsageError where the caller closed it."""
    if sys.stdin is None:  # as `<&-` leaves it
        raise UsageError("cannot read standard input: it is closed; name a file, or give it one")
    return sys.stdin.buffer


def opener(path: str, flags: int) -> int:
    """The `opener` of `open(path, "rb")`; a FIFO is opened as ever, and waited for.

    That is what a shell's `<(...)` and `/dev/stdin` behind a pipe are. The null device is empty.
    Raises UsageError for another device, which may have no end, and for a socket, and OSError.
    """
    found = os.stat(path)
    if stat.S_ISFIFO(found.st_mode) or _is_null_device(found):
        return os.open(path, flags)
    kind = irregularity(found.st_mode)
    if kind:
        raise UsageError(f"cannot read {path}: it is {kind}; name a file, a pipe, or - for stdin")
    return open_to_read(path)


def _is_null_device(found: os.stat_result) -> bool:
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev
