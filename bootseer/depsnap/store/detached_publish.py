"""Finish a publication in a process that outlives the start and leaves the job its resources."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from bootseer.storage.lease import Lease
from bootseer.storage.store import Store
from bootseer.system.child_processes import close_descriptors, fork, silence_streams
from bootseer.system.priority import use_idle_disk
from bootseer.system.readiness import readable

_HANDOVER_S = 10.0


def detach(lease: Lease, reopen: Callable[[], Store], work: Callable[[Store], None]) -> None:
    """Give the lease to a detached child that does `work` and then releases it.

    The child uses a store of its own: connections and their threads do not survive a fork.

    Returns when the child owns the lease, so that its holder never seems dead to other nodes. The
    child is in a session of its own, with the lowest CPU and disk priority and none of our streams.
    Raises OSError when no process can be made; the lease is then still the caller's.
    """
    lease.pause()
    ready, report = os.pipe()
    try:
        first = fork()
    except OSError:
        os.close(ready)
        os.close(report)
        lease.start()
        raise
    if first == 0:
        _child(lease, reopen, work, report)
    os.close(report)
    os.waitpid(first, 0)
    readable(ready, timeout_s=_HANDOVER_S)
    os.close(ready)
    lease.forget()


def _child(
    lease: Lease, reopen: Callable[[], Store], work: Callable[[Store], None], report: int
) -> None:
    """Never returns: it ends by os._exit, so that no handler of the parent's runs twice."""
    code = 1
    try:
        os.setsid()
        if fork() != 0:
            os._exit(0)
        store = reopen()  # nothing is contacted yet; its path may be relative
        _leave_job(report)
        with lease:
            lease.adopt(store)
            os.write(report, b".")
            os.close(report)
            work(store)
        code = 0
    except BaseException:  # there is no caller any more: `work` reports its faults as events
        code = 1
    finally:
        os._exit(code)


def _leave_job(keep: int) -> None:
    """Give up the directory, the descriptors except `keep`, and the priority of the job."""
    os.chdir("/")
    silence_streams()
    close_descriptors(0, 1, 2, keep)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives on
    os.nice(19)  # and not the idle class: other nodes may wait for this snapshot
    use_idle_disk()
