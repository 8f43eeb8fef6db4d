"""Lower priorities for the processor and the disk; what the kernel refuses stays as it is."""

from __future__ import annotations

import contextlib
import os
import threading

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


class YieldingProcess:
    """All threads of this process, which run behind others' from `begin` to `end`.

    They do only where the kernel lets them come back, which takes CAP_SYS_NICE or a limit of
    RLIMIT_NICE.
    """

    def __init__(self, steps: int) -> None:
        """`steps` are those of nice(2) by which they are lower."""
        self._steps = steps
        self._own: int | None = None

    def begin(self) -> None:
        """Lower them, and those that they start; nothing raises."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        if own + self._steps <= _LEAST_NICENESS and _may_come_back(own):
            self._own = own
            _set_all_threads(own + self._steps)

    def end(self) -> None:
        """Put them back; again, or before `begin`, does nothing."""
        own, self._own = self._own, None
        if own is not None:
            _set_all_threads(own)


_LEAST_NICENESS = 19


def _may_come_back(niceness: int) -> bool:
    """Whether a thread may leave a lower priority; found out by one that ends then."""
    may: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness + 1)
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            may.append(True)

    thread = threading.Thread(target=attempt)
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had
        return False
    thread.join()
    return bool(may)


def _set_all_threads(niceness: int) -> None:
    for _ in range(2):  # one that began meanwhile has its priority of the thread that began it
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
