"""Folders of commands that have an image mounted for themselves, and what killed ones leave there.

`<runtime>/containers/<random>/` is one command's, locked as long as that lives: `tree` is what is
mounted; all else there is the command's own. What a killed one left is swept by a server of this
node's images, within a second or so, or by the next command.
"""

from __future__ import annotations

import contextlib
import os

from bootseer.errors import BootseerError
from bootseer.fuse.mount.mount_point import unmount
from bootseer.system.file_lock import acquire_directory

FOLDER, TREE = "containers", "tree"


def sweep(runtime: str) -> None:
    """Unmount what killed ones left behind; containers that run on it keep what they have.

    Does nothing while another process makes or sweeps such folders.
    """
    folder = os.path.join(runtime, FOLDER)
    with contextlib.suppress(OSError), acquire_directory(folder, limit_s=0):
        sweep_locked(folder)


def sweep_locked(folder: str) -> None:
    """As `sweep`, of a folder that the caller has locked."""
    for name in os.listdir(folder):
        above = os.path.join(folder, name)
        with contextlib.suppress(OSError), acquire_directory(above, limit_s=0):
            with contextlib.suppress(BootseerError):
                unmount(os.path.join(above, TREE), lazily=True)
            remove(above)


def remove(above: str) -> None:
    """What is mounted still is swept another time."""
    try:
        os.rmdir(os.path.join(above, TREE))
    except FileNotFoundError:
        pass
    except OSError:
        return
    import shutil  # milliseconds, which a start shall not wait for

    shutil.rmtree(above, ignore_errors=True)
