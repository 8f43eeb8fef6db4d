"""The log of mounts in the background that were given none."""

from __future__ import annotations

import contextlib
import os
import stat

from bootseer.config.paths import user_directory
from bootseer.system import file_lock
from bootseer.system.processes import call_within

MOST_BYTES = 1 << 20
LIMIT_S = 1.0
"""For a home that hangs, as on a network: a mount does not wait for its log."""


def own_log() -> str:
    """The log file of this user's mounts; "" where none can be written, with a warning.

    Only the user may read it. A log that has grown large is renamed, replacing the previous one, so
    that at most two are kept; a mount that has it open goes on writing to the renamed file.
    """
    folder = user_directory("XDG_STATE_HOME", ".local/state", None)
    path = os.path.join(folder, "checkpoint.log")
    try:
        call_within(LIMIT_S, _make, folder, path)
    except (OSError, RuntimeError) as error:  # the latter: no thread can be started
        import logging  # `start` saves ten milliseconds where it is not needed

        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        logging.getLogger(__name__).warning(
            "bootseer: no log of what goes wrong in this mount: %s: %s", path, why
        )
        return ""
    return path


def _make(folder: str, path: str) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            opened = os.fstat(fd)
            if not stat.S_ISREG(opened.st_mode) or opened.st_uid != os.geteuid():
                raise OSError("it is no regular file of this user")
            if opened.st_mode & 0o077:
                with contextlib.suppress(OSError):  # file systems without modes
                    os.fchmod(fd, 0o600)
            if opened.st_size <= MOST_BYTES or not _rotate(fd, path):
                return
        finally:
            os.close(fd)


def _rotate(fd: int, path: str) -> bool:
    """Rename the log. False where this file stays; else another one must be checked."""
    try:
        file_lock.lock(fd, limit_s=0)
    except OSError:  # another process does it; or there are no locks, and the log goes on growing
        return False
    # The previous owner of the lock may have renamed it; the file there now must not be replaced.
    with contextlib.suppress(FileNotFoundError):
        if file_lock.is_named(fd, path):
            os.replace(path, path + ".1")
    return True
