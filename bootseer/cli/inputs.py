"""Opening what a user names as input: a file, or a pipe by its path."""

from __future__ import annotations

import os
import stat

from bootseer.errors import UsageError
from bootseer.regular_files import irregularity, open_to_read


def opener(path: str, flags: int) -> int:
    """The `opener` of `open(path, "rb")`; a FIFO is opened as ever, and waited for.

    That is what a shell's `<(...)` and `/dev/stdin` behind a pipe are. Raises UsageError for a
    device, which may have no end, and for a socket, and OSError.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISFIFO(mode):
        return os.open(path, flags)
    kind = irregularity(mode)
    if kind:
        raise UsageError(f"cannot read {path}: it is {kind}; name a file, a pipe, or - for stdin")
    return open_to_read(path)
