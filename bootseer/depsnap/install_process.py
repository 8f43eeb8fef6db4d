"""Run the install command as if we were not there.

Its standard streams are ours, untouched. Signals that reach us are passed on, those of a terminal
excepted, which it gets by itself. Its exit code is returned as a shell would: 128+N after signal
N, 127 for a command that is not found, 126 for one that cannot be run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import types
from collections.abc import Iterator, Mapping, Sequence

FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT),
)
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})


class TerminatedError(BaseException):
    """A signal told us to end; not an Exception, so that no fall-back swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Turn the signals that end a process into TerminatedError, so that cleaning up happens.

    An ignored signal (as under nohup) stays ignored. Outside the main thread nothing changes.
    """

    def end(number: int, _frame: types.FrameType | None) -> None:
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)  # a second one must not cut the cleaning short
        raise TerminatedError(number)

    with _handling(ENDING, end):
        yield


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: object) -> Iterator[None]:
    before: dict[int, object] = {}
    try:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)  # type: ignore[arg-type]
    except ValueError:
        pass  # not the main thread: whoever runs us there handles signals
    try:
        yield
    finally:
        for changed, old in before.items():
            signal.signal(changed, old)  # type: ignore[arg-type]


def run(
    command: Sequence[str], environ: Mapping[str, str], received: list[int] | None = None
) -> int:
    """Run to its end and return its exit code; our own faults in starting it say so on stderr.

    The numbers of signals that came meanwhile to end it are added to `received`.
    """
    import subprocess  # a start that restores never pays for it

    child: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _frame: types.FrameType | None) -> None:
        if received is not None and number in ENDING:
            received.append(number)
        if not child:
            early.append(number)
        elif not (number in _FROM_TERMINAL and _has_our_terminal()):
            child[0].send_signal(number)

    with _handling(FORWARDED, forward):
        try:
            # Descriptors of whoever started us pass through as well; ours close on exec.
            child.append(subprocess.Popen(list(command), env=dict(environ), close_fds=False))
        except FileNotFoundError:
            return _cannot(command, "command not found", 127)
        except OSError as error:
            return _cannot(command, error.strerror or str(error), 126)
        for number in early:
            child[0].send_signal(number)
        code = child[0].wait()
    return 128 - code if code < 0 else code


def _has_our_terminal() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _cannot(command: Sequence[str], why: str, code: int) -> int:
    sys.stderr.write(f"bootseer: {command[0]}: {why}\n")
    return code
