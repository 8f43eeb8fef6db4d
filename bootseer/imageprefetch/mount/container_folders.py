"""Folders of commands that have an image mounted for themselves, and sweeping those of killed ones.

`<runtime>/containers/<random>/` belongs to one command and is locked as long as that lives: `tree`
is the image's mount, everything else is the command's own. A folder that a killed command left is
removed by a server of this node's images, within a second or so, or by the next command: what is
mounted in it lives on in the container. `upper` are files that a container needs until it ends.
Files are deleted under another name and with no lock, for a container may have written many.
"""

from __future__ import annotations

import contextlib
import os

from bootseer.errors import BootseerError
from bootseer.fuse.mount.mount_point import unmount
from bootseer.system.file_lock import acquire_directory
from bootseer.system.mountinfo import all_mounts
from bootseer.system.paths import is_within

FOLDER, TREE, UPPER = "containers", "tree", "upper"
_GONE = ".gone"


def sweep(runtime: str) -> None:
    """Unmount and remove what killed commands left; containers that still run keep their trees.

    Does nothing while another process makes or sweeps such folders.
    """
    folder = os.path.join(runtime, FOLDER)
    with contextlib.suppress(OSError), acquire_directory(folder, limit_s=0):
        sweep_locked(folder)
    delete_renamed(folder)


def sweep_locked(folder: str) -> None:
    """As `sweep`, for a folder that the caller has locked; deletes nothing yet."""
    for name in os.listdir(folder):
        own_folder = os.path.join(folder, name)
        with contextlib.suppress(OSError), acquire_directory(own_folder, limit_s=0):
            for mounted in _mounts_below(own_folder):
                with contextlib.suppress(BootseerError):
                    unmount(mounted, lazily=True)
            _take_away(own_folder)


def is_layer_used(own_folder: str) -> bool:
    """Whether an overlay in another mount namespace has the files of a folder's `UPPER`.

    A container whose command was killed goes on, and has its overlay in a namespace of its own.
    """
    path = os.fsencode(os.path.join(own_folder, UPPER))
    if not os.path.isdir(path):
        return False
    seen = {os.readlink("/proc/self/ns/mnt")}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{name}/ns/mnt")
            if namespace in seen:
                continue
            with open(f"/proc/{name}/mountinfo", "rb") as file:
                lines = file.readlines()
            if any(path in line.rpartition(b" - ")[2] for line in lines):
                return True
            if any(line.split(b" ")[4] == b"/" for line in lines):  # read whole, by no chroot
                seen.add(namespace)
    return False


def _mounts_below(own_folder: str) -> list[str]:
    """Where anything is mounted in a folder, what was mounted last first."""
    return [one.target for one in all_mounts() if is_within(one.target, own_folder)][::-1]


def remove(own_folder: str) -> None:
    """Remove a command's folder, unless something is still mounted in it: that is swept later."""
    _take_away(own_folder)
    delete_renamed(os.path.dirname(own_folder))


def _take_away(own_folder: str) -> None:
    try:
        if _mounts_below(own_folder) or is_layer_used(own_folder):
            return
        os.rmdir(os.path.join(own_folder, TREE))
    except FileNotFoundError:
        pass
    except OSError:
        return
    rename_away(own_folder)


def rename_away(folder: str) -> None:
    """Have `delete_renamed` delete a folder, which nobody finds from now on."""
    if not folder.endswith(_GONE):
        with contextlib.suppress(OSError):
            os.rename(folder, folder + _GONE)


def delete_renamed(base: str) -> None:
    """Delete what was renamed so in a folder, also what a killed process did not get to."""
    with contextlib.suppress(OSError):
        renamed = [name for name in os.listdir(base) if name.endswith(_GONE)]
        if renamed:
            import shutil  # takes milliseconds, which a start would wait for

            for name in renamed:
                shutil.rmtree(os.path.join(base, name), ignore_errors=True)
