"""Children that go on in Python, made from a process of which nothing is known."""

from __future__ import annotations

import gc
import os

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def fork() -> int:
    """As `os.fork`; the child never collects garbage that this process had. Raises OSError.

    A finalizer may wait for a thread, and of all threads the child has one: a client of HDFS that
    is let go of in a child waits for its runtime's for ever. (What the child itself drops the last
    reference to, it does let go of.) Nor does a collection copy, page by page, what both share.
    """
    collects = gc.isenabled()
    gc.disable()  # or what the fork itself calls in the child may begin a collection
    try:
        pid = os.fork()
        if pid == 0:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
    return pid


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, from now on.

    A parent that has ended already sends none: compare `os.getppid()` afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def name_thread(name: bytes) -> None:
    """What `ps` shows of this thread, of a process's first one as of the process: 15 bytes."""
    _prctl(_PR_SET_NAME, name)


def _prctl(option: int, argument: int | bytes) -> None:
    from bootseer.system.libc import libc  # most who fork do without

    libc().prctl(option, argument)
