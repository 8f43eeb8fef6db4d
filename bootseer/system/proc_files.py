"""Files of other processes under /proc, read for a limited time.

The kernel keeps some of them (stat, environ, io, maps, pagemap) back while their process is in
execve(2): it holds `exec_update_lock` (fs/proc, fs/exec.c) until it has closed the files that do
not outlive the call, which can take for ever where closing one waits for a FUSE server.

On a start's way, so it imports next to nothing. Importable on Python 3.9.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from typing import Any, TypeVar

    Result = TypeVar("Result")
else:
    import _signal  # `signal` itself imports enum: 2 ms

LIMIT_S = 1.0


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
