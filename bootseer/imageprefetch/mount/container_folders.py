"""Folders of commands that have an image mounted for themselves, and sweeping those of killed ones.

`<runtime>/containers/<random>/` belongs to one command and is locked as long as that lives: `tree`
is the mount, everything else is the command's own. A folder that a killed command left is removed
by a server of this node's images, within a second or so, or by the next command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from bootseer.errors import BootseerError
from bootseer.fuse.mount.mount_point import unmount

FOLDER, TREE = "containers", "tree"


def sweep(runtime: str) -> None:
    """Unmount and remove what killed commands left; containers that still run keep their trees.

    Does nothing while another process makes or sweeps such folders.
    """
    folder = os.path.join(runtime, FOLDER)
    with contextlib.suppress(OSError), lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        sweep_locked(folder)


def sweep_locked(folder: str) -> None:
    """As `sweep`, for a folder that the caller has locked."""
    for name in os.listdir(folder):
        own_folder = os.path.join(folder, name)
        with contextlib.suppress(OSError), lock_folder(own_folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            with contextlib.suppress(BootseerError):
                unmount(os.path.join(own_folder, TREE), lazily=True)
            remove(own_folder)


def remove(own_folder: str) -> None:
    """Remove a command's folder, unless its tree is still mounted: that is swept later."""
    try:
        os.rmdir(os.path.join(own_folder, TREE))
    except FileNotFoundError:
        pass
    except OSError:
        return
    import shutil  # takes milliseconds, which a start would wait for

    shutil.rmtree(own_folder, ignore_errors=True)


@contextlib.contextmanager
def lock_folder(path: str, how: int) -> Iterator[None]:
    """Hold the lock of a directory; the kernel frees it with its process."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)
