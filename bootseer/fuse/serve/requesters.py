"""The threads that wait for our replies: whether a signal is ending one of them.

A requester may be in execve(2), which waits for our reply and meanwhile locks parts of its /proc.
So each look into /proc has a time limit. A look that exceeds it proves nothing: the kernel locks
nothing of a killed thread, but the machine may be that busy.
"""

from __future__ import annotations

import os

from bootseer.system.processes import LIMIT_S, call_within, stat_fields

CLOSING_LIMIT_S = 10.0
"""For a look without which a `close` fails."""
_SIGKILL_BIT = 1 << 8
_PF_SIGNALED = 0x400
"""Of `linux/sched.h`."""
_FLAGS, _EXIT_CODE = 9 - 3, 52 - 3
"""Places in /proc/PID/stat, whose fields proc(5) numbers, from the third field on."""
_SIGNAL_BITS = 0x7F
"""Of an exit code: the signal that ended the process, 0 = none (wait(2))."""


def is_being_killed(thread: int) -> bool:
    """Whether SIGKILL is pending, which every deadly signal becomes for each thread it ends.

    `thread` is its id in our PID namespace. One without an id there, 0, counts as not killed.
    """
    if not thread:
        return False
    try:
        return call_within(LIMIT_S, _has_sigkill_pending, thread)
    except (OSError, ValueError, RuntimeError):  # the last: no thread can be started
        return False


def closes_because_killed(thread: int) -> bool:
    """Whether the kernel closes a thread's files because a signal ended its process.

    False for a thread that closes a file itself, ends by itself, or executes another program, and
    for one that ends because another thread of its process called `exit`. `thread` as in
    `is_being_killed`; one that our /proc does not show counts as not killed, too.

    Raises OSError, such as TimeoutError, when a look failed that may succeed another time.
    """
    if not thread:
        return False
    try:
        return call_within(CLOSING_LIMIT_S, _was_ended_by_signal, thread)
    except RuntimeError:  # no thread can be started; what is read here is never locked
        return _was_ended_by_signal(thread)


def _has_sigkill_pending(thread: int) -> bool:
    with open(f"/proc/{thread}/status", "rb") as file:
        return any(
            int(line[8:], 16) & _SIGKILL_BIT
            for line in file
            if line.startswith((b"SigPnd:", b"ShdPnd:"))
        )


def _was_ended_by_signal(thread: int) -> bool:
    try:
        return _ended_by_signal(thread)
    except (FileNotFoundError, ProcessLookupError, PermissionError, IndexError, ValueError):
        return False  # as it waits, it exists: it is not shown here, or not in this form


def _ended_by_signal(thread: int) -> bool:
    # A thread that still has an address space is not ending; and only such a thread can be in
    # execve(2), which locks `stat`. `status` is never locked.
    process = thread
    with open(f"/proc/{thread}/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmSize:"):
                return False
            if line.startswith(b"Tgid:"):
                process = int(line[5:])
    fields = _stat(thread)
    if not int(fields[_FLAGS]) & _PF_SIGNALED:
        return False
    # A thread has this flag as well when another of its process called exit_group(2), and the
    # last one to close is mostly such a thread. The exit code distinguishes them: `do_exit` in
    # kernel/exit.c sets it before it closes the files.
    code = int(fields[_EXIT_CODE])
    if code or _may_look_into(thread):
        return bool(code & _SIGNAL_BITS)
    # The kernel shows 0 to a process without that right. After `exit` its caller, mostly the
    # first thread, has no such flag, while a deadly signal gives it to every thread.
    return bool(int(_stat(process)[_FLAGS]) & _PF_SIGNALED)


def _stat(thread: int) -> list[bytes]:
    with open(f"/proc/{thread}/stat", "rb") as file:
        return stat_fields(file.read())


def _may_look_into(thread: int) -> bool:
    """Whether we have the right (ptrace(2), "access mode checking") that shows its exit code."""
    try:
        os.readlink(f"/proc/{thread}/cwd")
    except PermissionError:
        return False
    except OSError:
        pass  # the right is checked first
    return True
