"""Checking an output file that the user names, before it is written or replaced."""

from __future__ import annotations

import os
import stat

from bootseer.errors import UsageError
from bootseer.system.regular_files import irregularity


def resolve_output(path: str) -> tuple[str, int | None]:
    """Return the path to write, symbolic links followed, and an existing file's permission bits.

    Replacing a file by a rename would also replace a device or a pipe, for root even /dev/null;
    and /dev/stdout may lead to a file that is being appended to. Raises UsageError for these, and
    OSError.
    """
    mode: int | None = None
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        pass
    kind = irregularity(mode) if mode is not None else ""
    folder = os.path.realpath(os.path.dirname(path) or ".") + "/"
    if not kind and folder.startswith(("/dev/", "/proc/")) and not folder.startswith("/dev/shm/"):
        kind = "one of the system's own"
    if kind:
        raise UsageError(f"cannot write {path}: it is {kind}; name a file")
    if mode is None:
        return os.path.realpath(path) if os.path.islink(path) else path, None
    return os.path.realpath(path), stat.S_IMODE(mode)
