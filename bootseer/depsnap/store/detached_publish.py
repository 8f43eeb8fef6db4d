"""Finish a publication in a process that outlives us and stays out of the job's way."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from bootseer.storage.lease import Lease
from bootseer.storage.store import Store
from bootseer.system.fork import fork
from bootseer.system.priority import use_idle_disk
from bootseer.system.readiness import readable

HANDOVER_S = 10.0
_FIRST_OWN_FD = 3


def detach(lease: Lease, reopen: Callable[[], Store], work: Callable[[Store], None]) -> None:
    """Hand the lease to a detached child that does `work` and then releases it.

    The child uses a store of its own: connections and their threads do not survive a fork.

    Returns when the child owns the lease, so that nobody sees its holder dead in between. The
    child is in a session of its own, of lowest CPU and disk priority, with no stream of ours.
    Raises OSError when no process can be made; the lease is then still the caller's.
    """
    lease.pause()
    ready, tell = os.pipe()
    try:
        first = fork()
    except OSError:
        os.close(ready)
        os.close(tell)
        lease.start()
        raise
    if first == 0:
        _child(lease, reopen, work, tell)
    os.close(tell)
    os.waitpid(first, 0)
    readable(ready, timeout_s=HANDOVER_S)
    os.close(ready)
    lease.forget()


def _child(
    lease: Lease, reopen: Callable[[], Store], work: Callable[[Store], None], tell: int
) -> None:
    """Never returns: leaves by os._exit, so that no handler of the parent's runs twice."""
    code = 1
    try:
        os.setsid()
        if fork() != 0:
            os._exit(0)
        store = reopen()  # nothing is contacted yet; a path of it may be relative
        _quiet(tell)
        with lease:
            lease.adopt(store)
            os.write(tell, b".")
            os.close(tell)
            work(store)
        code = 0
    except BaseException:  # nobody is left to tell: `work` reports its own faults as events
        code = 1
    finally:
        os._exit(code)


def _quiet(keep: int) -> None:
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(_FIRST_OWN_FD):
        os.dup2(null, fd)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives on
    os.closerange(_FIRST_OWN_FD, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX") if keep < 0 else keep + 4096)
    os.nice(19)  # and not idle altogether: other nodes may wait for what is published
    use_idle_disk()
