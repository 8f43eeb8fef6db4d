"""Child processes of our Python: forked, or started again for one of our modules."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_BOOT = (
    "import sys; places, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "sys.path[:] = places.split('\\n'); "
    "sys.exit(__import__(module, fromlist=['main']).main())"
)


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


def has_threads() -> bool:
    """Whether a forked child may inherit locks that nothing releases: other threads run here.

    One that waits for a call that was given up counts as well.
    """
    import threading

    from bootseer.system.processes import has_unanswered_calls

    return threading.active_count() > 1 or has_unanswered_calls()


def silence_streams() -> None:
    """Replace the standard streams by /dev/null, so that their readers see the end of file."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if null > 2:
        os.close(null)


def close_descriptors(*keep: int) -> None:
    """Close all descriptors but those of `keep`, so that readers of a pipe see its end."""
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # no /proc
        highest = 4096
    low = 0
    for high in (*sorted(keep), highest + 1):
        if low < high:  # `os.closerange(0, 0)` closes every descriptor there is
            os.closerange(low, high)
        low = high + 1


def silence_descriptors(keep: Container[int]) -> None:
    """Replace all descriptors but those of `keep` by /dev/null.

    Their numbers remain in use, because inherited objects may still close them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in keep and descriptor != null:
            os.dup2(null, descriptor, inheritable=False)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends.

    No signal comes from a parent that has ended before the call: compare `os.getppid()` after it.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def name_thread(name: bytes) -> None:
    """Set the name of this thread as `ps` shows it, cut to 15 bytes.

    The name of a process's first thread is that of the process.
    """
    _prctl(_PR_SET_NAME, name)


def _prctl(option: int, argument: int | bytes) -> None:
    from bootseer.system.libc import libc  # most callers of `fork` do not need it

    libc().prctl(option, argument)


def command_for(module: str, *arguments: str) -> list[str]:
    """The command line that runs `main()` of a module, its arguments in `sys.argv[1:]`.

    Isolated (-I): PYTHONHOME, PYTHONPATH and the like are the job's. Modules are looked for where
    this process does, but last in the folder that `python -m` put first: a job's own, which may
    hold a `json.py`.
    """
    places = list(sys.path)
    if not sys.flags.safe_path:
        places.append(places.pop(0))
    package_parent = os.path.abspath(__file__)
    for _ in range(3):
        package_parent = os.path.dirname(package_parent)
    places = list(dict.fromkeys([*filter(os.path.isabs, places), package_parent]))
    return [sys.executable, "-I", "-c", _BOOT, "\n".join(places), module, *arguments]
