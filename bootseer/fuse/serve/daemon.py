"""Daemonise a mount server, and report its first answer to the process that started it."""

from __future__ import annotations

import _thread
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    StoreUnavailableError,
    describe,
    from_os_error,
)
from bootseer.system.child_processes import fork, silence_descriptors, silence_streams
from bootseer.system.processes import call_within
from bootseer.system.readiness import readable

END_S = 10.0
REAP_S = 1.0
REPORT_AFTER_S, REPORT_EVERY_S = 5.0, 30.0
"""A wait for a mount that takes this long is reported, by the process that waits."""

LOG_LIMIT_S = 1.0
UNLOGGED = "give --log-file FILE to see why"
WAITING = "waiting"
"""Key of what a server may send, any number of times, before its answer: `why` its last try failed,
how many `tries` did, and for how many seconds more (`left_s`) it will try again."""
_MAX_REASON_CHARS = 500  # less than a pipe takes at once

Answer = dict[str, Any]
Send = Callable[[Answer], None]


class Log:
    """Lines with their time, appended to a file or written to standard error.

    `subject` is put before each, where several servers share a file. A file system that hangs is
    waited for one second only: the mount's users must not wait for its log.
    """

    def __init__(self, fd: int, subject: str = "") -> None:
        self._fd = fd
        self._lock, self._hung_in = _thread.allocate_lock(), 0
        self._prefix = f"{subject if subject.isprintable() else repr(subject)}: " if subject else ""

    @classmethod
    def open(cls, path: str, subject: str = "") -> Log:
        """The log in a file; "" = standard error."""
        if not path:
            return cls(2, subject)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = call_within(LOG_LIMIT_S, os.open, path, flags, 0o644)
        except (TimeoutError, RuntimeError) as error:  # the latter: no thread can be started
            raise DeadlineError(f"cannot write the log {path}: {error}") from error
        except OSError as error:
            raise from_os_error(error, f"write the log {path}") from error
        return cls(fd, subject)

    def say(self, text: str) -> None:
        """One line; dropped silently where it cannot be written, or another one is stuck."""
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self._prefix}{text}\n"
        with self._lock:
            if self._hung_in == os.getpid():  # in the process that forked us, it is not our write
                return
            with contextlib.suppress(OSError, RuntimeError):
                call_within(LOG_LIMIT_S, self._write, line.encode(errors="backslashreplace"))

    def _write(self, line: bytes) -> None:
        self._hung_in = os.getpid()
        try:
            os.write(self._fd, line)
        finally:
            self._hung_in = 0


def start(
    serve: Callable[[Send], None],
    *,
    mountpoint: str,
    limit_s: float,
    waits_for: str = "",
    tries: int = 0,
    log_file: str = "",
    unlogged: str = UNLOGGED,
    keep: Sequence[int] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Answer:
    """Have a child of this process `serve`; returns its answer, and leaves it running.

    `waits_for` names what must answer before it can mount. `tries` is 1 where it reports each
    failed try (`WAITING`), and 0 where it does not.

    The child is a session of its own, in `/`, with nothing open that a terminal would wait for.
    `serve` calls its argument with the answer once the mount is served. Raises what `serve`
    raised before that; what it raises later goes to `log_file`, and without one the error says
    what to do instead (`unlogged`). StoreUnavailableError after `limit_s`: then, and when this
    process is interrupted, the child is asked to end (SIGTERM). With `keep`, the child has only
    these descriptors of this process, and so holds no pipes and locks of others while it lives.
    `meanwhile` is called here while the child starts. Call it in a process that has one thread.
    """
    readable_end, writable_end = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(readable_end)
        _run_in_background(serve, writable_end, log_file, mountpoint, keep)
    os.close(writable_end)
    waits_for = waits_for or f"the mount at {mountpoint}"
    wait = Wait(waits_for, limit_s, tries)
    try:
        if meanwhile is not None:
            meanwhile()
        answer = receive_answer(
            readable_end,
            wait,
            mountpoint=mountpoint,
            advice=f"see {log_file}" if log_file else unlogged,
        )
    except BaseException as error:  # an interrupt too: no server must outlive the caller's wait
        try:
            if log_file and isinstance(error, StoreUnavailableError):
                with contextlib.suppress(
                    BootseerError
                ):  # the error refers to the log, so it must be there
                    Log.open(log_file, mountpoint).say(
                        f"not mounted, waited for {waits_for}: {error}"
                    )
        finally:
            _end(pid)
        raise
    finally:
        os.close(readable_end)
    if "error" in answer:
        raise decode_error(answer)
    return answer


def _end(pid: int) -> None:
    """Ask a child that is not waited for any more to end, and give it the time to clean up."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)  # not reaped yet, so the number is still its own
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            readable(process, timeout_s=END_S)
        finally:
            os.close(process)


def _run_in_background(
    serve: Callable[[Send], None],
    pipe: int,
    log_file: str,
    mountpoint: str,
    keep: Sequence[int] | None,
) -> NoReturn:
    code, is_starting = 1, True
    try:
        os.setsid()
        os.chdir("/")
        silence_streams()
        if keep is not None:
            silence_descriptors({0, 1, 2, pipe, *keep})

        def send(answer: Answer) -> None:
            nonlocal is_starting
            is_starting = is_starting and WAITING in answer
            send_answer(pipe, answer)

        serve(send)
        code = 0
    except (
        BaseException
    ) as error:  # a border: this process must end here, and the caller get the reason
        answer = encode_error(error)
        if is_starting:
            with contextlib.suppress(OSError):
                send_answer(pipe, answer)
        else:
            with contextlib.suppress(BootseerError):
                Log.open(log_file, mountpoint).say(answer["text"])
    finally:
        os._exit(code)


def send_answer(pipe: int, answer: Answer) -> None:
    """Write one answer into the pipe that `receive_answer` reads."""
    os.write(pipe, json.dumps(answer).encode() + b"\n")


def send_waiting(send: Send, why: str, tries: int, left_s: float) -> None:
    """Report that a try failed and another one follows; raises nothing."""
    with contextlib.suppress(OSError):  # the other process has ended
        send({WAITING: {"why": why[:_MAX_REASON_CHARS], "tries": tries, "left_s": left_s}})


def receive_answer(pipe: int, wait: Wait, *, mountpoint: str, advice: str = UNLOGGED) -> Answer:
    """The answer of a server being started, which may be an error.

    Raises StoreUnavailableError, with `advice`, when `wait` has none in time.
    """
    data = b""
    # Not to the end of the pipe: the server's processes keep it open.
    while True:
        line, newline, rest = data.partition(b"\n")
        if newline:
            answer: Answer = json.loads(line)
            if WAITING not in answer:
                return answer
            wait.note_try(**answer[WAITING])
            data = rest
            continue
        if not wait.for_more(pipe):
            raise StoreUnavailableError(f"mounting at {mountpoint} took too long; {advice}")
        more = os.read(pipe, 1 << 16)
        if not more:
            raise StoreUnavailableError(
                f"the server of {mountpoint} ended before it served; {advice}"
            )
        data += more


class Wait:
    """A wait for one answer, which is reported from time to time once it is long.

    `tries` is the number of the try that is under way, 0 where that is not known.
    """

    def __init__(self, waits_for: str, limit_s: float, tries: int) -> None:
        self._waits_for, self._tries, self._why = waits_for, tries, ""
        self._began_s = time.monotonic()
        self._end_s = self._last_try_s = self._began_s + limit_s
        self._report_s = self._began_s + REPORT_AFTER_S

    def note_try(self, why: str, tries: int, left_s: float) -> None:
        """Note that a try failed and another one follows."""
        self._why, self._tries = why, tries + 1
        self._last_try_s = min(self._end_s, time.monotonic() + left_s)

    def for_more(self, pipe: int) -> bool:
        """Wait until there is something to be read; False once the limit has passed."""
        while True:
            pause_s = min(self._report_s, self._end_s) - time.monotonic()
            if readable(pipe, timeout_s=pause_s):
                return True
            now_s = time.monotonic()
            if now_s >= self._end_s:
                return False
            if now_s >= self._report_s:
                self._report(now_s)
                self._report_s = now_s + REPORT_EVERY_S

    def _report(self, now_s: float) -> None:
        import logging  # takes ten milliseconds, and most mounts do without

        logging.getLogger(__name__).warning(
            "bootseer: waiting for %s for %d s now, and for up to %d s more%s%s",
            self._waits_for,
            now_s - self._began_s,
            max(0.0, self._last_try_s - now_s),
            f" (try {self._tries})" if self._tries else "",
            f": {self._why}" if self._why else "",
        )


def run_in_child(
    check: Callable[[], None],
    limit_s: float = math.inf,
    what: str = "looking",
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Run `check`, which may start threads, in a process of its own; raises what it raised.

    After `limit_s` the process is killed, and `what` names it in a DeadlineError. `meanwhile` is
    called here while it runs.
    """
    readable_end, writable_end = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    pid = fork()
    if pid == 0:
        answer: Answer = {}
        try:
            os.close(readable_end)
            check()
        except BaseException as error:  # a border: the parent raises it
            answer = encode_error(error)
        finally:
            with contextlib.suppress(OSError):
                os.write(writable_end, json.dumps(answer).encode())
            os._exit(0)
    os.close(writable_end)
    data = b""
    try:
        if meanwhile is not None:
            meanwhile()
        if not readable(readable_end, timeout_s=None if limit_s == math.inf else limit_s):
            raise DeadlineError(f"{what}: no answer for {limit_s:g} s")
        while more := os.read(readable_end, 1 << 16):
            data += more
    except BaseException:  # an interrupt too: no child outlives the wait for it
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(readable_end)
        _reap(pid)
    answer = json.loads(data or b'{"error": "StoreUnavailableError", "text": "looking failed"}')
    if answer:
        raise decode_error(answer)


def _reap(pid: int) -> None:
    """Collect a child that has answered or was killed, but not one that the kernel holds."""
    end_s = time.monotonic() + REAP_S
    while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < end_s:
        time.sleep(0.001)


def encode_error(error: BaseException) -> Answer:
    """An error as an answer to another process."""
    if isinstance(error, OSError) and not isinstance(error, BootseerError):
        error = from_os_error(error, "mount")
    if isinstance(error, BootseerError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "BootseerError", "text": f"mounting failed: {describe(error)}"}


def decode_error(answer: Answer) -> BootseerError:
    """The error that another process answered with."""
    from bootseer import errors

    kind: type[BootseerError] = getattr(errors, str(answer.get("error")), BootseerError)
    return kind(answer.get("text"))
