"""Children that go on in Python, made from a process of which nothing is known.

And what such a child lets go of.
"""

from __future__ import annotations

import gc
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

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


def give_up_streams() -> None:
    """Put /dev/null in the place of the standard streams: their readers wait for our end else."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if null > 2:
        os.close(null)


def close_descriptors(*keep: int) -> None:
    """Close all descriptors but some: who waits for the end of a pipe must not wait for our end."""
    try:
        most = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # no /proc
        most = 4096
    low = 0
    for high in (*sorted(keep), most + 1):
        if low < high:  # `os.closerange(0, 0)` closes all there are
            os.closerange(low, high)
        low = high + 1


def give_up_descriptors(keep: Container[int]) -> None:
    """Put /dev/null in the place of all descriptors but some.

    Their numbers stay taken: objects that we inherited may still close them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in keep and descriptor != null:
            os.dup2(null, descriptor, inheritable=False)


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
