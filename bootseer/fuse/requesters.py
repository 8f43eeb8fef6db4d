"""The threads that wait for an answer of ours: whether a signal is ending one of them.

A requester may be in execve(2), which waits for our answer and holds what parts of its /proc
need. So each look is bounded, and one that takes longer is no sign of a killed thread: the kernel
keeps nothing back of those.
"""

from __future__ import annotations

from collections.abc import Callable

from bootseer.proc_files import LIMIT_S, call_within

_SIGKILL_BIT = 1 << 8
_PF_SIGNALED = 0x400
"""Of `linux/sched.h`; the place of the flags in /proc/PID/stat is told by proc(5)."""


def is_being_killed(thread: int) -> bool:
    """Whether SIGKILL is pending, which every deadly signal becomes for each thread it ends.

    `thread` is its id in our PID namespace; 0 = not known there, of which nothing can be told.
    """
    return _look(_has_sigkill_pending, thread)


def closes_because_killed(thread: int) -> bool:
    """Whether the kernel closes a thread's files because a signal ended it.

    Not so for a thread that closes a file itself, ends by itself, or becomes another program.
    `thread` as in `is_being_killed`.
    """
    return _look(_was_signalled, thread)


def _look(look: Callable[[int], bool], thread: int) -> bool:
    if not thread:
        return False
    try:
        return call_within(LIMIT_S, look, thread)
    except (OSError, IndexError, ValueError, RuntimeError):  # the last: no thread can be started
        return False


def _has_sigkill_pending(thread: int) -> bool:
    with open(f"/proc/{thread}/status", "rb") as file:
        return any(
            int(line[8:], 16) & _SIGKILL_BIT
            for line in file
            if line.startswith((b"SigPnd:", b"ShdPnd:"))
        )


def _was_signalled(thread: int) -> bool:
    # Who still has an address space is not ending; and only who has one can be in execve(2), in
    # which `stat` would be kept back. `status` never is.
    with open(f"/proc/{thread}/status", "rb") as file:
        if any(line.startswith(b"VmSize:") for line in file):
            return False
    with open(f"/proc/{thread}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return bool(int(fields[6]) & _PF_SIGNALED)
