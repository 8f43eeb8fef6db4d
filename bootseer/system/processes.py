"""Which boot, and which namespaces of it, processes live in."""

from __future__ import annotations

import os

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The machine's own, from `linux/proc_ns.h`: all processes are seen from there."""


def boot_id() -> str:
    """This boot's id; also the same in every container of the node. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().decode("ascii").strip()


def pid_namespace() -> int:
    """This process's PID namespace's number. Raises OSError."""
    return os.stat("/proc/self/ns/pid").st_ino


def mount_namespace(pid: int | str = "self") -> int:
    """A process's mount namespace's number. Raises OSError."""
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino


def sees_all_processes() -> bool:
    """Whether this process is in the machine's own PID namespace."""
    try:
        return pid_namespace() == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def mount_namespace_has_ended(number: int, made_in: int) -> bool:
    """Whether surely no process lives in mount namespace `number`, made in PID namespace `made_in`.

    Only root in that PID namespace, or in the machine's own, sees all who could; to others it
    may still live.
    """
    if os.geteuid() != 0 or not (sees_all_processes() or pid_namespace() == made_in):
        return False
    try:
        mount_namespace(1)  # also the proof that /proc hides nobody
        return not any(_lives_in(name, number) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return False  # not allowed to look at every process


def _lives_in(pid: str, number: int) -> bool:
    try:
        return mount_namespace(pid) == number
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended meanwhile
