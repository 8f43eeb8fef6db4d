"""Run the install command as a child that behaves as if there were no parent.

Its standard streams are ours, untouched. Signals that reach us are passed on, except those of a
terminal, which the child gets by itself. Its exit code is returned as a shell would: 128+N after
signal N, 127 for a command that is not found, 126 for one that cannot be run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import types
from collections.abc import Iterator, Mapping, Sequence

from bootseer.system.readiness import readable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

_FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT),
)
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_LOOK_S = 1.0
"""How soon a signal is handled that did not interrupt the wait for the child."""
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})


class TerminatedError(BaseException):
    """A signal asked this process to end; not an Exception, so that no fall-back swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Turn the signals that end a process into TerminatedError, so that it cleans up.

    An ignored signal (as under nohup) stays ignored. Outside the main thread nothing changes.
    """

    def end(number: int, _frame: types.FrameType | None) -> None:
        for other in _ENDING:
            signal.signal(other, signal.SIG_IGN)  # a second one must not interrupt the cleaning
        raise TerminatedError(number)

    with _handling(_ENDING, end):
        yield


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: object) -> Iterator[None]:
    before: dict[int, object] = {}
    try:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)  # type: ignore[arg-type]
    except ValueError:
        pass  # not the main thread, which handles signals in its own way
    try:
        yield
    finally:
        for changed, old in before.items():
            signal.signal(changed, old)  # type: ignore[arg-type]


def run(
    command: Sequence[str], environ: Mapping[str, str], received: list[int] | None = None
) -> int:
    """Run a command to its end and return its exit code; why it cannot be started is on stderr.

    The numbers of signals that asked it to end are added to `received`.
    """
    import subprocess  # a start that restores never pays for it

    child: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _frame: types.FrameType | None) -> None:
        if received is not None and number in _ENDING:
            received.append(number)
        if not child:
            early.append(number)
        elif not (number in _FROM_TERMINAL and _is_in_foreground()):
            child[0].send_signal(number)

    with _handling(_FORWARDED, forward):
        try:
            # Descriptors that our parent opened are passed on as well; ours close on exec.
            child.append(subprocess.Popen(list(command), env=dict(environ), close_fds=False))
        except FileNotFoundError:
            return _report_failure(command, "command not found", 127)
        except OSError as error:
            return _report_failure(command, error.strerror or str(error), 126)
        for number in early:
            child[0].send_signal(number)
        code = _wait(child[0])
    return 128 - code if code < 0 else code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a child once it has ended; signals are handled meanwhile.

    A signal that arrives just before a wait begins, or in another thread, does not interrupt it.
    """
    with contextlib.suppress(OSError, AttributeError):  # a kernel, sandbox or Python without pidfds
        process = os.pidfd_open(child.pid)
        try:
            while not readable(process, timeout_s=_LOOK_S):
                pass
        finally:
            os.close(process)
    return child.wait()


def _is_in_foreground() -> bool:
    """Whether the terminal sends its signals to the child as well: it is in our process group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _report_failure(command: Sequence[str], why: str, code: int) -> int:
    sys.stderr.write(f"bootseer: {command[0]}: {why}\n")
    return code
