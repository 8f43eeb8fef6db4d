"""Children that go on in Python, made from a process of which nothing is known."""

import gc
import os


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


def close_above(number: int) -> None:
    """Close all descriptors above one: who waits for a pipe's end must not wait for ours."""
    try:
        most = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # no /proc
        most = number + 4096
    if most > number:
        os.closerange(number + 1, most + 1)
