"""Children that go on in Python, made from a process of which nothing is known."""

import gc
import os


def fork() -> int:
    """As `os.fork`; the child never collects what this process had.

    A finalizer may wait for a thread, and of all threads the child has one: a client of HDFS that
    is let go of in a child waits for its runtime's for ever. Nor does a collection copy, page by
    page, what both processes share. Raises OSError.
    """
    pid = os.fork()
    if pid == 0:
        gc.freeze()
    return pid
