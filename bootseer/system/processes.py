"""The boot and the namespaces that processes run in."""

from __future__ import annotations

import os

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The initial one of the machine, from `linux/proc_ns.h`, in which every process is visible."""


def boot_id() -> str:
    """The id of this boot, the same in every container of the node. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().decode("ascii").strip()


def pid_namespace() -> int:
    """The number of this process's PID namespace. Raises OSError."""
    return os.stat("/proc/self/ns/pid").st_ino


def mount_namespace(pid: int | str = "self") -> int:
    """The number of a process's mount namespace. Raises OSError."""
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino


def sees_all_processes() -> bool:
    """Whether this process is in the machine's initial PID namespace."""
    try:
        return pid_namespace() == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def mount_namespace_has_ended(number: int, made_in: int) -> bool:
    """Whether certainly no process is left in mount namespace `number`.

    `made_in` is the PID namespace it was created in. Only root there, or in the initial PID
    namespace, can see every process that may use it; for others the answer is False.
    """
    if os.geteuid() != 0 or not (sees_all_processes() or pid_namespace() == made_in):
        return False
    try:
        mount_namespace(1)  # fails where /proc hides processes
        return not any(_is_in(name, number) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return False  # not every process may be inspected


def _is_in(pid: str, number: int) -> bool:
    try:
        return mount_namespace(pid) == number
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended meanwhile
