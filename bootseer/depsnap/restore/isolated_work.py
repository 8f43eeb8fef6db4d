"""Work on a file system that may hang, done by a process of its own.

Whoever waits for a FUSE server that has taken a request is ended by no signal, and a thread that
does so keeps its process from ending. A process that does is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable

from bootseer import errors
from bootseer.errors import BootseerError, DeadlineError
from bootseer.system.fork import fork
from bootseer.system.readiness import readable

_OK = b"="
_MOST_S = 1e6
_MOST_DESCRIPTORS = 4096
_END_S, _LOOK_S = 1.0, 0.001
"""How long a killed process may take to go, and how often it is looked for."""


def read_apart(
    read: Callable[[], bytes], limit_s: float, what: str, *, while_at_work: bool = False
) -> bytes:
    """What `read` returns in a forked process. Raises DeadlineError when it takes longer.

    With `while_at_work` it may take any time in which it does something: it is given up when it
    has neither read, written nor computed for `limit_s`, at the latest after twice that.

    `read` asks the kernel and does little else, for locks of our other threads stay locked there;
    and it uses no descriptor of ours, which are closed there, lest what is left behind hold them.
    Raises the errors of ours that it raises, as the class of `errors` that they are of.
    """
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
        _answer(read, into)
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


def _answer(read: Callable[[], bytes], into: int) -> None:
    """The child's whole life; never returns."""
    try:
        os.closerange(0, into)
        os.closerange(into + 1, into + _MOST_DESCRIPTORS)
        _fill_standard_streams(into)
        try:
            reply = _OK + read()
        except BootseerError as error:
            kinds = [k.__name__ for k in type(error).__mro__ if k.__module__ == errors.__name__]
            reply = json.dumps([kinds[0], str(error)]).encode()
        left = memoryview(reply)
        while left:
            left = left[os.write(into, left) :]
    finally:
        os._exit(0)


def _fill_standard_streams(but: int) -> None:
    """Lest a file that is opened next gets what something prints."""
    with contextlib.suppress(OSError):  # without /dev/null nothing is lost but that
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2} - {but, nowhere}:
            os.dup2(nowhere, number)


def _receive(out: int, limit_s: float, what: str, worker: int) -> bytes:
    """All that comes; while a `worker`, a process's number, is at work, there is time."""
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
            raise DeadlineError(f"{what} did not answer for {limit_s:g} s")
        end_s, done = time.monotonic() + min(limit_s, _MOST_S), now


def _work_of(worker: int) -> tuple[bytes, ...]:
    """The processor time of a process and the bytes that it asked for; nothing of process 0."""
    if not worker:
        return ()
    from bootseer.system.proc_files import stat_fields  # most starts do without

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
    with contextlib.suppress(ChildProcessError):  # who started us has SIGCHLD ignored
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
