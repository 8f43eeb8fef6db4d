"""Ending a node's agent once nothing that it began is in use.

While a process holds the lock of the file `draining` in the runtime directory, the agent refuses
every task, so that callers do the work themselves, or go the plain way. The mounts that it has made
for pods are in use as well: who serves one needs the agent to have it unmounted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable

from bootseer.agent.client import socket_path
from bootseer.errors import (
    BusyError,
    DeadlineError,
    NotFoundError,
    NotSupportedError,
    from_os_error,
)
from bootseer.fuse.mount.agent_mount import SOURCE
from bootseer.fuse.mount.mount_point import KIND
from bootseer.system import file_lock
from bootseer.system.processes import mount_namespace
from bootseer.system.readiness import readable

DRAINING = "draining"
CREDENTIALS = struct.Struct("=3i")
_POLL_S = 0.2
_END_S = 10.0


def is_draining(runtime: str) -> bool:
    """Whether the agent of a runtime directory takes on nothing."""
    try:
        descriptor = os.open(os.path.join(runtime, DRAINING), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        file_lock.lock(descriptor, shared=True, limit_s=0)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def drain(runtime: str, is_in_use: Callable[[], bool], limit_s: float) -> None:
    """Have the agent take on nothing more, wait until nothing is in use, and end it.

    In use are the mounts of pods, and what `is_in_use` knows of.

    Raises NotFoundError where there is no agent, BusyError where it is drained already, and
    DeadlineError where something is in use after `limit_s`: then the agent takes on tasks again, as
    it does when this process is killed.
    """
    agent = _agent_of(runtime)
    path = os.path.join(runtime, DRAINING)
    try:
        lock = file_lock.acquire(path, limit_s=0)
    except BlockingIOError as error:
        os.close(agent)
        raise BusyError("the agent is drained already, by another process") from error
    except OSError as error:
        os.close(agent)
        raise from_os_error(error, f"lock {path}") from error
    try:
        _await_end_of_use(lambda: is_in_use() or count_pod_mounts(runtime) > 0, limit_s)
        signal.pidfd_send_signal(agent, signal.SIGTERM)
        if not readable(agent, timeout_s=_END_S):
            raise DeadlineError(f"the agent did not end within {_END_S:g} s; it goes on")
    except ProcessLookupError:
        pass  # it has ended
    finally:
        lock.close()
        os.close(agent)


def _await_end_of_use(is_in_use: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while is_in_use():
        if time.monotonic() > end_s:
            raise DeadlineError(
                f"mounts of this node are still in use after {limit_s:g} s; the agent goes on: end "
                "what uses them, and drain it again"
            )
        time.sleep(_POLL_S)


def source_of_pods(runtime: str) -> str:
    """How the source of each mount begins that an agent of a runtime directory made for a pod."""
    return f"{SOURCE}{zlib.crc32(os.fsencode(os.path.abspath(runtime))):08x}:"


def count_pod_mounts(runtime: str) -> int:
    """How many mounts that were made for pods are there, in any mount namespace of this node."""
    source = b" " + KIND.encode() + b" " + source_of_pods(runtime).encode()
    seen: set[int] = set()
    numbers: set[bytes] = set()  # devices: a copy of the namespace shows the same mount again
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            namespace = mount_namespace(int(process))
            if namespace not in seen:
                with open(f"/proc/{process}/mountinfo", "rb") as file:
                    numbers.update(line.split(b" ", 3)[2] for line in file if source in line)
                seen.add(namespace)
    return len(numbers)


def _agent_of(runtime: str) -> int:
    """A descriptor of the process that listens at the agent's socket."""
    path = socket_path(runtime)
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(path)
        except OSError as error:
            raise NotFoundError(f"no agent answers at {path}") from error
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process: int = CREDENTIALS.unpack(credentials)[0]
    if not process:
        raise NotSupportedError(f"the agent at {path} lives among other processes: drain it there")
    try:
        return os.pidfd_open(process)
    except OSError as error:
        raise from_os_error(error, f"look at the agent {process}") from error
