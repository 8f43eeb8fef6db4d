"""Leaving the processor and the disk to others; what the kernel refuses is left as it is."""

from __future__ import annotations

import contextlib
import os

from bootseer.system.libc import system_call

# ioprio_set(2), which the C library lacks; from the kernel's tables of system calls.
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
    """From here on, have the processor and the disk when nobody else wants them; this thread and
    those that it starts."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)
    use_idle_disk()


def use_idle_disk() -> None:
    """As `go_idle`, of the disk alone."""
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        with contextlib.suppress(OSError):
            system_call(number, _WHO_PROCESS, 0, _IDLE_CLASS)
