"""Mount and PID namespaces. Linux only."""

from __future__ import annotations

import os

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The machine's own PID namespace, from `linux/proc_ns.h`: all processes are seen from there."""


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
