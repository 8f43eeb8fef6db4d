"""Where what a user names as output is written: a file, in place of one that is there."""

from __future__ import annotations

import os
import stat

from bootseer.errors import UsageError
from bootseer.regular_files import irregularity


def file_to_replace(path: str) -> tuple[str, int | None]:
    """The path of a file to write, links followed, and its permission bits where it is there.

    A file that takes another's place would take that of a device or a pipe as well, for root that
    of /dev/null. Raises UsageError for these, and OSError.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return os.path.realpath(path), None
    kind = irregularity(mode)
    if kind:
        raise UsageError(f"cannot write {path}: it is {kind}; name a file")
    return os.path.realpath(path), stat.S_IMODE(mode)
