"""Folders of commands that have an image mounted for themselves, and sweeping those of killed ones.

`<runtime>/containers/<random>/` belongs to one command and is locked as long as that lives: `tree`
is the mount, everything else is the command's own. A folder that a killed command left is removed
by a server of this node's images, within a second or so, or by the next command.
"""

from __future__ import annotations

import contextlib
import os

from bootseer.errors import BootseerError
from bootseer.fuse.mount.mount_point import unmount
from bootseer.system.file_lock import acquire_directory

FOLDER, TREE = "containers", "tree"


def sweep(runtime: str) -> None:
    """Unmount and remove what killed commands left; containers that still run keep their trees.

    Does nothing while another process makes or sweeps such folders.
    """
    folder = os.path.join(runtime, FOLDER)
    with contextlib.suppress(OSError), acquire_directory(folder, limit_s=0):
        sweep_locked(folder)


def sweep_locked(folder: str) -> None:
    """As `sweep`, for a folder that the caller has locked."""
    for name in os.listdir(folder):
        own_folder = os.path.join(folder, name)
        with contextlib.suppress(OSError), acquire_directory(own_folder, limit_s=0):
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
