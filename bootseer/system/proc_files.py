"""Files of processes under /proc, those of others read for a limited time.

The kernel keeps some of those (stat, environ, io, maps, pagemap) back while their process is in
execve(2): it holds `exec_update_lock` (fs/proc, fs/exec.c) until it has closed the files that do
not outlive the call, which can take for ever where closing one waits for a FUSE server.

On a start's way, so it imports next to nothing. Importable on Python 3.9.
"""

from __future__ import annotations

import _thread
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from typing import Any, TypeVar

    Result = TypeVar("Result")
else:
    import _signal  # `signal` itself imports enum: 2 ms

LIMIT_S = 1.0
CAP_FOWNER, CAP_SYS_ADMIN = 3, 21


def read_proc(path: str, limit_s: float = LIMIT_S) -> bytes:
    """The whole of a file under /proc.

    Raises TimeoutError when the kernel keeps it back for longer than `limit_s` seconds, and the
    OSError of opening or reading it.
    """
    return call_within(limit_s, _read, path)


def call_within(limit_s: float, function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function returns or raises, which may look into other processes.

    Raises TimeoutError, an OSError, after `limit_s` seconds; the call itself is left to a thread
    of its own until the kernel lets go of it, which holds up neither exit nor exec.
    """
    outcome: list[tuple[Result | None, BaseException | None]] = []
    running = _thread.allocate_lock()
    running.acquire()

    def call() -> None:
        try:
            outcome.append((function(*arguments), None))
        except BaseException as error:  # whatever it is, it belongs to the caller
            outcome.append((None, error))
        finally:
            running.release()

    # The thread begins with our mask: signals that we hold back for a job must not end it there.
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    try:
        _thread.start_new_thread(call, ())
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
    running.acquire(timeout=limit_s)
    if not outcome:
        raise TimeoutError(f"the kernel did not answer within {limit_s:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def stat_fields(stat: bytes) -> list[bytes]:
    """The fields of /proc/PID/stat (proc_pid_stat(5)) from the third on, the state.

    The second, the command's name, may hold spaces and parentheses.
    """
    return stat.rpartition(b")")[2].split()


def start_ticks(pid: int) -> int:
    """When a process was forked, in clock ticks since boot; 0 of one that has ended.

    Raises TimeoutError when the kernel keeps it back: the process lives, in execve(2).
    """
    path = f"/proc/{pid}/stat"
    try:
        fields = stat_fields(_read(path) if pid == os.getpid() else read_proc(path))
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except TimeoutError:
        raise
    except (OSError, ValueError, IndexError):
        return 0


def own_status(name: str) -> str:
    """What /proc/self/status says under a name; "" where it cannot be told."""
    try:
        status = _read("/proc/self/status")
    except OSError:
        return ""
    value = status.partition(f"\n{name}:".encode())[2].partition(b"\n")[0]
    return value.decode("ascii", "replace").strip()


def has_capability(number: int) -> bool:
    """Whether this process has a capability in effect; False where that cannot be told."""
    return bool(int(own_status("CapEff") or "0", 16) >> number & 1)
