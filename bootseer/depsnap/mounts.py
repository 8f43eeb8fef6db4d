"""mount(2) and umount2(2) through the C library, and what is mounted. Linux only."""

from __future__ import annotations

import os
import re

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 0x1, 0x2, 0x4, 0x20, 0x1000
"""Flags of mount(2), from `linux/mount.h`."""


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Raises OSError with errno, the target as its file name."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode(),
        ctypes.c_ulong(flags),
        os.fsencode(options) or None,
    )
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def unmount(target: str) -> None:
    """Raises OSError (EBUSY while in use)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(target), 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def mounted(target: str) -> bool:
    """Whether something is mounted exactly at `target` in this mount namespace."""
    wanted = os.fsencode(target)
    with open("/proc/self/mountinfo", "rb") as file:
        return any(_unescape(line.split(b" ", 5)[4]) == wanted for line in file)


def _unescape(field: bytes) -> bytes:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), field)


def namespace() -> int:
    """This mount namespace's number."""
    return os.stat("/proc/self/ns/mnt").st_ino
