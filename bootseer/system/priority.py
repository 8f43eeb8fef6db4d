"""Lowest priorities for the processor and the disk; what the kernel refuses stays as it is."""

from __future__ import annotations

import contextlib
import os

from bootseer.system.libc import system_call

# ioprio_set(2) has no function in the C library; numbers from the kernel's system call tables.
_BY_MACHINES = {
    251: "x86_64",
    289: "i386 i486 i586 i686",
    30: "aarch64 riscv64 loongarch64",
    314: "armv6l armv7l armv8l",
    273: "ppc64 ppc64le",
    282: "s390x",
}
_IOPRIO_SET = {name: number for number, names in _BY_MACHINES.items() for name in names.split()}
_WHO_PROCESS, _IDLE_CLASS = 1, 3 << 13


def go_idle() -> None:
    """Let this thread, and those it starts, use the processor and the disk only when idle."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)
    use_idle_disk()


def use_idle_disk() -> None:
    """As `go_idle`, for the disk alone."""
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        with contextlib.suppress(OSError):
            system_call(number, _WHO_PROCESS, 0, _IDLE_CLASS)
