"""The root of a container: an image's tree, layers above it, and a private writable one.

`<cache>/containers/<random>/` holds what was written, on the node's disk: see `container_folders`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from bootseer.errors import NotSupportedError, from_os_error
from bootseer.imageprefetch.mount.container_folders import UPPER
from bootseer.system import mount_calls

_OPTIONS = "redirect_dir=off,metacopy=off,index=off"
"""What is written stays plain files, devices and one attribute, of which a layer can be made."""


def mount_root(lowers: Sequence[str], folder: str, target: str) -> str:
    """Mount `lowers`, the topmost first, below a new writable layer in `folder`; returns that one.

    Raises NotSupportedError where this machine cannot do it, and the errors of `from_os_error`.
    """
    # Of blanks the kernel's list of mounts, by which files in use are known, has other forms.
    if any(mark in path for path in (*lowers, folder) for mark in ",:\\ \t\n"):
        raise NotSupportedError(
            "a path of this node's cache or runtime directory holds a comma, colon, backslash or "
            "blank, which an overlay cannot have; choose others"
        )
    upper, work = os.path.join(folder, UPPER), os.path.join(folder, "work")
    try:
        for path in (upper, work, target):
            os.makedirs(path, mode=0o755, exist_ok=True)
        _copy_attributes(lowers[-1], upper)
        layers = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work}"
        mount_calls.mount("overlay", target, "overlay", 0, f"{layers},{_OPTIONS}")
    except OSError as error:
        raise from_os_error(error, f"mount the container's root at {target}") from error
    return upper


def _copy_attributes(source: str, target: str) -> None:
    """Give the topmost layer the mode and owner of the image's root, which it decides."""
    about = os.stat(source)
    os.chown(target, about.st_uid, about.st_gid)
    os.chmod(target, stat.S_IMODE(about.st_mode))
