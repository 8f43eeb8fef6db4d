"""A server that whoever mounted leaves running in the background."""

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
from bootseer.system.fork import fork
from bootseer.system.paths import is_within
from bootseer.system.proc_files import call_within
from bootseer.system.readiness import readable

USERS_NAMED = 5
END_S = 10.0
TELL_AFTER_S, TELL_EVERY_S = 5.0, 30.0
"""Who waits so long for a mount is told; the server that waits for the store has no streams."""

LOG_LIMIT_S = 1.0
UNLOGGED = "give --log-file FILE to see why"
WAITING = "waiting"
"""Key of what a server may tell, any number of times, before its answer: `why` its last try failed,
how many `tries` did, and for how many seconds more (`left_s`) there will be others."""
_SHOWN = 500  # characters of a reason; what a pipe takes whole is more

Tell = Callable[[dict[str, Any]], None]


class Log:
    """Lines with their time, appended to a file or written to standard error.

    `about` stands before each, where several servers share a file. A file system that hangs is
    waited for a second: it must not keep a mount's users.
    """

    def __init__(self, path: str, about: str = "") -> None:
        self._fd = 2
        self._lock, self._hung_in = _thread.allocate_lock(), 0
        self._about = about if about.isprintable() else repr(about)
        if path:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            try:
                self._fd = call_within(LOG_LIMIT_S, os.open, path, flags, 0o644)
            except (TimeoutError, RuntimeError) as error:  # the latter: no thread can be started
                raise DeadlineError(f"cannot write the log {path}: {error}") from error
            except OSError as error:
                raise from_os_error(error, f"write the log {path}") from error

    def say(self, text: str) -> None:
        """One line. What cannot be written is dropped silently, and so is what comes meanwhile."""
        about = f"{self._about}: " if self._about else ""
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {about}{text}\n"
        with self._lock:
            if self._hung_in == os.getpid():  # not of the process that forked us, which goes on
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
    serve: Callable[[Tell], None],
    *,
    what: str,
    limit_s: float,
    waits_for: str = "",
    tries: int = 0,
    log_file: str = "",
    unlogged: str = UNLOGGED,
    keep: Sequence[int] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Have a child of this process `serve`; returns what it told first, and leaves it running.

    `what` is where it mounts, and `waits_for` who must answer before it can. `tries` is 1 where it
    tells of each try that failed (`WAITING`), and 0 where it does not.

    The child is a session of its own, in `/`, with nothing open that a terminal would wait for.
    `serve` calls its argument once, when the mount answers. Raises what `serve` raised before
    that; what it raises later goes to `log_file`, and who has none is told what to do instead
    (`unlogged`). StoreUnavailableError after `limit_s`: then,
    and when this process is interrupted, the child is asked to end (SIGTERM). With
    `keep`, the child has no other descriptors of this process than these: it would hold others'
    pipes and locks for as long as it lives. `meanwhile` is called here while the child comes up.
    Call it in a process that has one thread.
    """
    told, tell = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(told)
        _background(serve, tell, log_file, what, keep)
    os.close(tell)
    wait = _Wait(waits_for or f"the mount at {what}", limit_s, tries)
    try:
        if meanwhile is not None:
            meanwhile()
        answer = _received(told, what, wait, f"see {log_file}" if log_file else unlogged)
    except BaseException as error:  # an interrupt too: no server that nobody asked for
        try:
            if log_file and isinstance(error, StoreUnavailableError):
                with contextlib.suppress(BootseerError):  # it names the log: something stands there
                    Log(log_file, what).say(f"not mounted, waited for {wait.waits_for}: {error}")
        finally:
            _end(pid)
        raise
    finally:
        os.close(told)
    return _checked(answer)


def _end(pid: int) -> None:
    """Ask a child that nobody waits for any more to end, and give it the time to clean up."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)  # not reaped yet, so the number is still its own
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            readable(process, timeout_s=END_S)
        finally:
            os.close(process)


def _background(
    serve: Callable[[Tell], None],
    tell: int,
    log_file: str,
    what: str,
    keep: Sequence[int] | None,
) -> NoReturn:
    code, waiting = 1, True
    try:
        os.setsid()
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # or who reads the caller's output would wait for our end
            os.dup2(null, descriptor)
        if keep is not None:
            _forget_all_but({0, 1, 2, tell, *keep}, null)

        def ready(answer: dict[str, Any]) -> None:
            nonlocal waiting
            waiting = waiting and WAITING in answer
            write_answer(tell, answer)

        serve(ready)
        code = 0
    except BaseException as error:  # a border: this process must end here, and the caller hear why
        answer = packed(error)
        if waiting:
            with contextlib.suppress(OSError):
                write_answer(tell, answer)
        else:
            with contextlib.suppress(BootseerError):
                Log(log_file, what).say(answer["text"])
    finally:
        os._exit(code)


def _forget_all_but(keep: set[int], null: int) -> None:
    """Put `null` in the place of all other descriptors.

    Their numbers stay taken: objects that we inherited may still close them.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in keep and number != null:
            os.dup2(null, number, inheritable=False)


def write_answer(tell: int, answer: dict[str, Any]) -> None:
    """One answer into the pipe that `await_answer` reads."""
    os.write(tell, json.dumps(answer).encode() + b"\n")


def write_waiting(tell: Tell, why: str, tries: int, left_s: float) -> None:
    """Tell that a try failed and another one follows; nothing raises."""
    with contextlib.suppress(OSError):  # nobody waits any more
        tell({WAITING: {"why": why[:_SHOWN], "tries": tries, "left_s": left_s}})


def await_answer(
    told: int, *, what: str, limit_s: float, waits_for: str = "", tries: int = 0
) -> dict[str, Any]:
    """The answer of a server being started; raises the error that it is. Words as in `start`."""
    wait = _Wait(waits_for or f"the mount at {what}", limit_s, tries)
    return _checked(_received(told, what, wait, UNLOGGED))


def _received(told: int, what: str, wait: _Wait, advice: str) -> dict[str, Any]:
    data = b""
    # Not to the end of the pipe: the server's processes keep it open.
    while True:
        line, end, rest = data.partition(b"\n")
        if end:
            answer: dict[str, Any] = json.loads(line)
            if WAITING not in answer:
                return answer
            wait.hear(**answer[WAITING])
            data = rest
            continue
        if not wait.for_more(told):
            raise StoreUnavailableError(f"mounting at {what} took too long; {advice}")
        more = os.read(told, 1 << 16)
        if not more:
            raise StoreUnavailableError(f"the server of {what} ended before it served; {advice}")
        data += more


class _Wait:
    """The wait for one answer: a person who would notice it is told of it, now and then.

    `tries` is the number of the try that is under way, 0 where that is not known.
    """

    def __init__(self, waits_for: str, limit_s: float, tries: int) -> None:
        self.waits_for, self._tries, self._why = waits_for, tries, ""
        self._began_s = time.monotonic()
        self._end_s = self._last_s = self._began_s + limit_s
        self._tell_s = self._began_s + TELL_AFTER_S

    def hear(self, why: str, tries: int, left_s: float) -> None:
        """A try failed, and another one follows."""
        self._why, self._tries = why, tries + 1
        self._last_s = min(self._end_s, time.monotonic() + left_s)

    def for_more(self, told: int) -> bool:
        """Wait until there is something to be read; False once the limit has passed."""
        while True:
            pause_s = min(self._tell_s, self._end_s) - time.monotonic()
            if readable(told, timeout_s=pause_s):
                return True
            now_s = time.monotonic()
            if now_s >= self._end_s:
                return False
            if now_s >= self._tell_s:
                self._say(now_s)
                self._tell_s = now_s + TELL_EVERY_S

    def _say(self, now_s: float) -> None:
        import logging  # ten milliseconds, which nearly every mount can save

        logging.getLogger(__name__).warning(
            "bootseer: waiting for %s for %d s now, and for up to %d s more%s%s",
            self.waits_for,
            now_s - self._began_s,
            max(0.0, self._last_s - now_s),
            f" (try {self._tries})" if self._tries else "",
            f": {self._why}" if self._why else "",
        )


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise unpacked(answer)
    return answer


def in_a_child(
    check: Callable[[], None],
    limit_s: float = math.inf,
    what: str = "looking",
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Do something that may start threads, in a process of its own; raises what it raised.

    After `limit_s` the process is ended, and `what` names it in a DeadlineError. `meanwhile` is
    called here, while that is under way.
    """
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        answer: dict[str, Any] = {}
        try:
            os.close(told)
            check()
        except BaseException as error:  # a border: the parent raises it
            answer = packed(error)
        finally:
            with contextlib.suppress(OSError):
                os.write(tell, json.dumps(answer).encode())
            os._exit(0)
    os.close(tell)
    data = b""
    try:
        if meanwhile is not None:
            meanwhile()
        if not readable(told, timeout_s=None if limit_s == math.inf else limit_s):
            raise DeadlineError(f"{what}: no answer for {limit_s:g} s")
        while more := os.read(told, 1 << 16):
            data += more
    except BaseException:  # an interrupt too: no child that nobody waits for
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(told)
        os.waitpid(pid, 0)
    answer = json.loads(data or b'{"error": "StoreUnavailableError", "text": "looking failed"}')
    if answer:
        raise unpacked(answer)


def packed(error: BaseException) -> dict[str, Any]:
    """An error as another process can be told it."""
    if isinstance(error, OSError) and not isinstance(error, BootseerError):
        error = from_os_error(error, "mount")
    if isinstance(error, BootseerError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "BootseerError", "text": f"mounting failed: {describe(error)}"}


def unpacked(answer: dict[str, Any]) -> BootseerError:
    """The error that another process told."""
    from bootseer import errors

    kind = getattr(errors, str(answer.get("error")), BootseerError)
    found: BootseerError = kind(answer.get("text"))
    return found


def users_of(target: str) -> list[str]:
    """Some processes that have a file or their directory there; only those we may look into."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if len(found) >= USERS_NAMED:
            break
        with contextlib.suppress(OSError):
            links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
            links += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            if any(_below(link, target) for link in links):
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                    found.append(f"{file.read().strip()} (process {pid})")
    return found


def _below(link: str, target: str) -> bool:
    try:
        path = os.readlink(link)
    except OSError:
        return False
    return is_within(path, target)
