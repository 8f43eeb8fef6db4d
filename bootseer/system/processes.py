"""Processes as /proc shows them, those of others looked at for a limited time.

The kernel keeps some of their files (stat, environ, io, maps, pagemap) back while a process is in
execve(2): it holds `exec_update_lock` (fs/proc, fs/exec.c) until it has closed the files that do
not outlive the call, which can take for ever where closing one waits for a FUSE server.

On a start's way, so it imports next to nothing. Importable on Python 3.9.
"""

from __future__ import annotations

import _thread
import os
import sys

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
USERS_NAMED = 5
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The initial one of the machine, from `linux/proc_ns.h`, in which every process is visible."""


_unanswered: set[int] = set()
"""The calls that were given up and may go on in their threads."""


class NoAnswerError(TimeoutError):
    """A call took longer than its limit."""


def read_proc(path: str, limit_s: float = LIMIT_S) -> bytes:
    """The whole of a file under /proc.

    Raises NoAnswerError when the kernel keeps it back for longer than `limit_s` seconds, and the
    OSError of opening or reading it.
    """
    return call_within(limit_s, _read, path)


def call_within(limit_s: float, function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function returns or raises, which may look into other processes.

    Raises NoAnswerError after `limit_s` seconds; the call itself is left to a thread of its own
    until the kernel lets go of it, which holds up neither exit nor exec.
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
            _unanswered.discard(id(outcome))
            running.release()

    # The thread begins with our mask: signals that we hold back for a job must not end it there.
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    try:
        _thread.start_new_thread(call, ())
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
    running.acquire(timeout=min(limit_s, _thread.TIMEOUT_MAX))
    if not outcome:
        _unanswered.add(id(outcome))
        if outcome:  # it came just now
            _unanswered.discard(id(outcome))
        raise NoAnswerError(f"the kernel did not answer within {limit_s:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def has_unanswered_calls() -> bool:
    """Whether a call that `call_within` gave up may still go on in its thread."""
    return bool(_unanswered)


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def children_of(pid: int) -> list[int]:
    """The processes that a process's first thread has forked, and that have yet to be reaped.

    Empty where it has ended, or the kernel does not list them (CONFIG_PROC_CHILDREN).
    """
    try:
        return [*map(int, _read(f"/proc/{pid}/task/{pid}/children").split())]
    except OSError:
        return []


def stat_fields(stat: bytes) -> list[bytes]:
    """The fields of /proc/PID/stat (proc_pid_stat(5)) from the third, the state, on.

    The second, the command's name, may contain spaces and parentheses.
    """
    return stat.rpartition(b")")[2].split()


def find_start_ticks(pid: int) -> int | None:
    """When a process was forked, in clock ticks since boot; None for one that has ended.

    Raises TimeoutError when the kernel keeps the answer back: the process is alive, in execve(2).
    """
    path = f"/proc/{pid}/stat"
    try:
        fields = stat_fields(_read(path) if pid == os.getpid() else read_proc(path))
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except TimeoutError:
        raise
    except (OSError, ValueError, IndexError):
        return None


def start_ticks(pid: int) -> int:
    """As `find_start_ticks`, with 0 for a process that has ended."""
    return find_start_ticks(pid) or 0


def fill_streams() -> None:
    """Have no file of ours take the number of a standard stream that is closed.

    A daemon replaces these. What is started by exec finds them closed, as we did.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives on


def own_status(name: str) -> str:
    """A field of /proc/self/status; "" where there is none."""
    try:
        status = _read("/proc/self/status")
    except OSError:
        return ""
    value = status.partition(f"\n{name}:".encode())[2].partition(b"\n")[0]
    return value.decode("ascii", "replace").strip()


def has_capability(number: int) -> bool:
    """Whether a capability of this process is in effect; False without /proc."""
    return bool(int(own_status("CapEff") or "0", 16) >> number & 1)


def boot_id() -> str:
    """The id of this boot, the same in every container of the node. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().decode("ascii").strip()


def pid_namespace() -> int:
    """The number of this process's PID namespace. Raises OSError."""
    return os.stat("/proc/self/ns/pid").st_ino


def mount_namespace(pid: int | str = "self") -> int:
    """The number of a process's mount namespace. Raises OSError."""
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino


def sees_all_processes() -> bool:
    """Whether this process is in the machine's initial PID namespace."""
    try:
        return pid_namespace() == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def mount_namespace_has_ended(number: int, made_in: int) -> bool:
    """Whether certainly no process is left in mount namespace `number`.

    `made_in` is the PID namespace it was created in. Only root there, or in the initial PID
    namespace, can see every process that may use it; for others the answer is False.
    """
    if os.geteuid() != 0 or not (sees_all_processes() or pid_namespace() == made_in):
        return False
    try:
        mount_namespace(1)  # fails where /proc hides processes
        return not any(_is_in(name, number) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return False  # not every process may be inspected


def _is_in(pid: str, number: int) -> bool:
    try:
        return mount_namespace(pid) == number
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended meanwhile


def users_of(folder: str) -> list[str]:
    """Some processes that have a file or their directory there; only those we may look into."""
    users: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if len(users) >= USERS_NAMED:
            break
        try:
            links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
            links += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            if any(_leads_into(link, folder) for link in links):
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                    users.append(f"{file.read().strip()} (process {pid})")
        except OSError:
            continue
    return users


def _leads_into(link: str, folder: str) -> bool:
    from bootseer.system.paths import is_within  # most that import this module do without

    try:
        path = os.readlink(link)
    except OSError:
        return False
    return is_within(path, folder)
