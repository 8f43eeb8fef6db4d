"""Calls that may block for ever, as on a file system whose server does not answer.

A thread that the kernel holds back waiting for such a server is ended by no signal and keeps its
process from ending, or from becoming another program. So what may hang there is called in a process
of its own (`call_in_process`), which can be left behind; for all else a thread does
(`call_in_thread`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping

from bootseer import errors
from bootseer.errors import BootseerError, DeadlineError
from bootseer.system.mountinfo import all_mounts
from bootseer.system.processes import stat_fields
from bootseer.system.readiness import readable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

_NETWORK_TEXT = """
    nfs nfs4 cifs smb3 ceph lustre gpfs beegfs beegfs_nodev panfs glusterfs orangefs pvfs2 afs 9p
    virtiofs wekafs fuseblk autofs
"""
_NETWORK = frozenset(_NETWORK_TEXT.split())
_MOST_LINKS = 40
"""Links that the kernel follows in one path."""
_OK = b"="
_MOST_S = 1e6
_END_S, _LOOK_S = 1.0, 0.001
"""How long a killed process may take to end, and how often it is looked for."""


def may_hang(path: str) -> bool:
    """Whether a path crosses a file system that is served over a network or by another process.

    No such file system is asked anything, so this does not hang where one does not answer.
    """
    try:
        served = {mounted.target: _is_served(mounted.kind) for mounted in all_mounts()}
    except OSError:
        return False  # without /proc it cannot be known
    hangs = served.get("/", False)
    if not any(served.values()):
        return False
    here, left, links = "", os.path.abspath(path).split("/")[1:], 0
    while left:
        name = left.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here).rstrip("/")
            hangs = _is_on_served(here, served)
            continue
        here = f"{here}/{name}"
        if here in served:
            hangs = served[here]
            if hangs:
                return True
        try:
            target = os.readlink(here)
        except OSError:
            continue  # no link, or nothing there at all
        links += 1
        if links > _MOST_LINKS:
            return hangs
        here = "" if target.startswith("/") else os.path.dirname(here).rstrip("/")
        hangs = _is_on_served(here, served)
        left = [*target.split("/"), *left]
    return hangs


def _is_on_served(folder: str, served: Mapping[str, bool]) -> bool:
    """Whether the last mount on the way to a folder ("" for the root) is a served one."""
    while folder and folder not in served:
        folder = os.path.dirname(folder).rstrip("/")
    return served.get(folder or "/", False)


def _is_served(kind: str) -> bool:
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


def call_in_thread(call: Callable[[], T], limit_s: float, what: str) -> T:
    """What `call` returns or raises. Raises DeadlineError when it takes longer than `limit_s`.

    The thread that waits for it stays behind until the process ends. It is one that `threading`
    knows, with this one's signal mask: what it starts, or logs, is as if it were done here.
    """
    import threading

    faults: list[BaseException] = []
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # a thread's would be lost; the caller raises it below
            faults.append(error)

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(min(limit_s, threading.TIMEOUT_MAX))
    if faults:
        raise faults[0]
    if not answers:
        raise _late(what, limit_s)
    return answers[0]


def call_in_process(
    call: Callable[[], bytes], limit_s: float, what: str, *, while_at_work: bool = False
) -> bytes:
    """What `call` returns in a forked process. Raises DeadlineError when it takes longer.

    With `while_at_work` it may take any time in which it makes progress: it is given up when it
    has neither read, written nor computed for `limit_s`, at the latest after twice that.

    `call` asks the kernel and does little else: locks of our other threads stay locked there. It
    uses no descriptor of ours: they are closed there, so that a process that is left behind does
    not hold them. An error of ours that it raises is raised here, as its nearest class in `errors`.
    """
    # Most starts call nothing that may hang. The child must import nothing.
    from bootseer.system.child_processes import close_descriptors, fork
    from bootseer.system.regular_files import write_fully

    try:
        out, into = os.pipe()
    except OSError as error:
        raise errors.from_os_error(error, f"ask {what}") from error
    try:
        pid = fork()
    except OSError as error:  # no more processes, or no memory
        os.close(out)
        os.close(into)
        raise errors.from_os_error(error, f"ask {what}") from error
    if pid == 0:
        try:
            close_descriptors(into)
            _open_standard_streams(into)
            write_fully(into, _reply_of(call))
        finally:
            os._exit(0)
    os.close(into)
    try:
        reply = _receive(out, limit_s, what, pid if while_at_work else 0)
    finally:
        os.close(out)
        _end(pid)
    if reply.startswith(_OK):
        return reply[len(_OK) :]
    if not reply:
        raise BootseerError(f"the process that worked on {what} died; try again")
    name, text = json.loads(reply)
    raise getattr(errors, name)(text)


def _late(what: str, limit_s: float) -> DeadlineError:
    return DeadlineError(f"{what} did not answer for {limit_s:g} s")


def _reply_of(call: Callable[[], bytes]) -> bytes:
    try:
        return _OK + call()
    except BootseerError as error:
        kinds = [k.__name__ for k in type(error).__mro__ if k.__module__ == errors.__name__]
        return json.dumps([kinds[0], str(error)]).encode()


def _open_standard_streams(but: int) -> None:
    """Open /dev/null as all of them, or what is printed would go into the file opened next."""
    with contextlib.suppress(OSError):  # without /dev/null nothing else is lost
        null = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2} - {but, null}:
            os.dup2(null, number)


def _receive(out: int, limit_s: float, what: str, worker: int) -> bytes:
    """The whole reply; while a `worker`, a process id, makes progress, it has time."""
    end_s = time.monotonic() + min(limit_s, _MOST_S)
    reply, done = b"", _work_of(worker)
    while True:
        if readable(out, timeout_s=end_s - time.monotonic()):
            part = os.read(out, 1 << 20)
            if not part:
                return reply
            reply += part
            continue
        if (now := _work_of(worker)) == done:
            raise _late(what, limit_s)
        end_s, done = time.monotonic() + min(limit_s, _MOST_S), now


def _work_of(worker: int) -> tuple[bytes, ...]:
    """The processor time of a process and the bytes that it read and wrote; none of process 0."""
    if not worker:
        return ()
    with open(f"/proc/{worker}/stat", "rb") as file:
        times = stat_fields(file.read())[11:13]
    try:
        with open(f"/proc/{worker}/io", "rb") as file:
            return (*times, file.read())
    except OSError:
        return tuple(times)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + _END_S
    with contextlib.suppress(ChildProcessError):  # our parent had SIGCHLD ignored
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < end_s:
            time.sleep(_LOOK_S)


class TimeBudget:
    """Calls that have one time limit together, each in a thread (`call_in_thread`)."""

    def __init__(self, limit_s: float, least_s: float) -> None:
        """`least_s` is what a call has however long those before it took."""
        self._limit_s, self._least_s = limit_s, least_s
        self._spent_s = 0.0

    def call(self, call: Callable[[], T], what: str) -> T:
        """What `call` returns or raises. Raises DeadlineError when the budget is spent."""
        left_s = max(self._least_s, self._limit_s - self._spent_s)
        begun_s = time.monotonic()
        try:
            return call_in_thread(call, round(left_s, 1), what)
        finally:
            self.charge(time.monotonic() - begun_s)

    def charge(self, spent_s: float) -> None:
        """Take time off that another call has taken."""
        self._spent_s += spent_s

    def refill(self) -> None:
        """Give the calls that follow the whole limit again."""
        self._spent_s = 0.0
