"""System calls on mounts and mounted trees that Python's `os` lacks; each raises OSError.

Sources: mount(2), umount2(2), open_tree(2), move_mount(2), mount_setattr(2), openat2(2),
fsopen(2).
"""

from __future__ import annotations

import os
import struct

from bootseer.system.libc import last_error, libc, system_call

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
MS_NOATIME, MS_BIND, MS_REC, MS_PRIVATE = 0x400, 0x1000, 0x4000, 0x40000
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 0x1, 0x2, 0x8
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOATIME, ATTR_ATIME = 0x1, 0x2, 0x4, 0x10, 0x70
NO_MOUNTS, NO_SYMLINKS, BENEATH, IN_ROOT = 0x01, 0x04, 0x08, 0x10
# The same numbers on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_OPENAT2, _MOUNT_SETATTR = 437, 442
_HERE = -100
_CLONE, _FROM_EMPTY_PATH, _NO_AUTOMOUNT, _EMPTY_PATH = 0x1, 0x4, 0x800, 0x1000
_FS_CLOEXEC, _CONFIG_CREATE = 1, 6
_ATTR = struct.Struct("<QQQQ")  # struct mount_attr: set, clear, propagation, user namespace
_HOW = struct.Struct("<QQQ")  # struct open_how: flags, mode, resolve


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2); `data` are the file system's own options. An error's file is the target."""
    words = (os.fsencode(source), os.fsencode(target), kind.encode())
    if libc().mount(*words, flags, os.fsencode(data) or None):
        raise last_error(target)


def unmount(target: str, *, lazily: bool = False, force: bool = False) -> None:
    """umount2(2); a symbolic link is not followed. `EBUSY` while in use, unless `lazily`."""
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazily else 0) | (_MNT_FORCE if force else 0)
    if libc().umount2(os.fsencode(target), flags):
        raise last_error(target)


def make_mount(kind: str) -> int:
    """A descriptor of an unattached mount of a file system that has no source."""
    context = system_call(_FSOPEN, kind.encode(), _FS_CLOEXEC)
    try:
        system_call(_FSCONFIG, context, _CONFIG_CREATE, 0, 0, 0)
        return system_call(_FSMOUNT, context, _FS_CLOEXEC, 0)
    finally:
        os.close(context)


def clone_tree(path: str) -> int:
    """A descriptor of an unattached copy of the mount at `path`."""
    return system_call(_OPEN_TREE, _HERE, os.fsencode(path), _CLONE | _NO_AUTOMOUNT | os.O_CLOEXEC)


def change_tree(tree: int, *, add: int, remove: int = 0) -> None:
    """Add and remove attributes of a mount."""
    about = _ATTR.pack(add, remove, 0, 0)
    system_call(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, about, len(about))


def attach_tree(tree: int, target: str) -> None:
    """Mount what `clone_tree` gave."""
    system_call(_MOVE_MOUNT, tree, b"", _HERE, os.fsencode(target), _FROM_EMPTY_PATH)


def open_in(root: int, path: bytes, flags: int, resolve: int) -> int:
    """Open a path below a folder; `resolve` says what it may not pass."""
    how = _HOW.pack(flags, 0, resolve)
    return system_call(_OPENAT2, root, path, how, len(how))
