"""System calls on mounted trees that Python's `os` lacks; each raises OSError.

Sources: open_tree(2), move_mount(2), mount_setattr(2), openat2(2).
"""

from __future__ import annotations

import os
import struct

from bootseer.system.libc import system_call

ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOATIME, ATTR_ATIME = 0x1, 0x2, 0x4, 0x10, 0x70
NO_MOUNTS, NO_SYMLINKS, BENEATH, IN_ROOT = 0x01, 0x04, 0x08, 0x10
# The same numbers on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_HERE = -100
_CLONE, _FROM_EMPTY_PATH, _NO_AUTOMOUNT, _EMPTY_PATH = 0x1, 0x4, 0x800, 0x1000
_ATTR = struct.Struct("<QQQQ")  # struct mount_attr: set, clear, propagation, user namespace
_HOW = struct.Struct("<QQQ")  # struct open_how: flags, mode, resolve


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
