"""What is mounted, and in which namespace. Linux only."""

from __future__ import annotations

import os
import re

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The machine's own PID namespace, from `linux/proc_ns.h`: all processes are seen from there."""


def mounted(target: str) -> bool:
    """Whether something is mounted exactly at `target` in this mount namespace."""
    return os.fsencode(target) in _mount_points()


def below(target: str) -> list[str]:
    """Mount points strictly below `target`, which a mount over it would hide."""
    prefix = os.fsencode(target.rstrip("/") + "/")
    return [os.fsdecode(p) for p in _mount_points() if p.startswith(prefix) and p != prefix]


def kinds() -> list[tuple[str, str]]:
    """Mount points and their file systems' names, those mounted later behind earlier ones.

    Raises OSError without /proc.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        lines = [line.partition(b" - ") for line in file]
    return [
        (os.fsdecode(_unescape(mount.split(b" ", 5)[4])), kind.split(b" ", 1)[0].decode())
        for mount, _, kind in lines
    ]


def _mount_points() -> list[bytes]:
    return [os.fsencode(point) for point, _ in kinds()]


def _unescape(field: bytes) -> bytes:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), field)


def namespace() -> int:
    """This mount namespace's number."""
    return os.stat("/proc/self/ns/mnt").st_ino


def pid_namespace() -> int:
    """This PID namespace's number."""
    return os.stat("/proc/self/ns/pid").st_ino


def ended(number: int, made_in: int) -> bool:
    """Whether surely no process lives in mount namespace `number`, made in PID namespace `made_in`.

    Only root in that PID namespace, or in the machine's own, sees all who could; to others it
    may still live.
    """
    if os.geteuid() != 0 or pid_namespace() not in (made_in, _FIRST_PID_NAMESPACE):
        return False
    try:
        os.stat("/proc/1/ns/mnt")  # also the proof that /proc hides nobody
        for name in os.listdir("/proc"):
            if name.isdigit() and _lives_in(name, number):
                return False
    except OSError:
        return False  # not allowed to look at every process
    return True


def _lives_in(pid: str, number: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino == number
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended meanwhile
