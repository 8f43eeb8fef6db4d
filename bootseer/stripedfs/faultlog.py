"""The log of mounts in the background for which nobody named one."""

from __future__ import annotations

import contextlib
import os
import stat

from bootseer.config_paths import user_directory

MOST_BYTES = 1 << 20


def own_log() -> str:
    """Where this user's mounts tell what went wrong; "" where nothing can be kept.

    Nobody else may read it. One that has grown is put aside, over the one before, so that two of
    them are kept at most; a mount that has it open goes on in what was put aside.
    """
    folder = user_directory("XDG_STATE_HOME", ".local/state", None)
    path = os.path.join(folder, "checkpoint.log")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if _size_of(path) > MOST_BYTES:
            os.replace(path, path + ".1")
        fd = os.open(path, flags, 0o600)
        try:
            opened = os.fstat(fd)
        finally:
            os.close(fd)
        if stat.S_ISREG(opened.st_mode) and opened.st_uid == os.geteuid():
            return path
    return ""


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
