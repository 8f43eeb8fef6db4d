"""Where what a user names as output is written: a file, in place of one that is there."""

from __future__ import annotations

import os
import stat

from bootseer.errors import UsageError
from bootseer.system.regular_files import irregularity


def file_to_replace(path: str) -> tuple[str, int | None]:
    """The path of a file to write, links followed, and its permission bits where it is there.

    A file that takes another's place would take that of a device or a pipe as well, for root that
    of /dev/null; and /dev/stdout may lead to a file that is appended to. Raises UsageError for
    these, and OSError.
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
