"""A command that runs on a mounted image's tree in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import from_os_error

if TYPE_CHECKING:
    from bootseer.storage.oci.config import ImageConfig

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EVENTS_INSIDE = "/.bootseer-events"
"""The directory of events in a container: in its root, where no link of the image is on the way."""
GRACE_S = 10.0  # between SIGTERM and a kill
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05


class RunProgram(Protocol):
    """What runs a program in the foreground: see `run_foreground`."""

    def __call__(
        self,
        words: Sequence[str],
        on_signal: Callable[[int], None] = ...,
        *,
        on_begun: Callable[[], None] = ...,
    ) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command for the tree at `tree`, which sees the directory `events_dir` for its events.

    `options` are podman's, for a command that podman runs.
    """

    tree: str
    words: Sequence[str]
    config: ImageConfig
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    events_dir: str = ""
    options: Sequence[str] = ()

    def variables(self, of_image: Sequence[str] | None = None) -> dict[str, str]:
        """The image's variables, then ours, then those of `environment`.

        Podman has a PATH of its own; for it, `of_image` replaces the image's variables.
        """
        pairs = [f"PATH={DEFAULT_PATH}", *self.config.env] if of_image is None else of_image
        own = dict(pair.partition("=")[::2] for pair in pairs)
        events = {"BOOTSEER_EVENTS": EVENTS_INSIDE} if self.events_dir else {}
        return {**own, **events, **self.environment}


def run_foreground(
    words: Sequence[str],
    on_signal: Callable[[int], None] = lambda _: None,
    environ: Mapping[str, str] | None = None,
    *,
    on_begun: Callable[[], None] = lambda: None,
) -> int:
    """Run a program to its end, with our terminal and streams; returns a shell's exit code.

    `on_signal` is called, any number of times, with a signal that is passed on to it, `on_begun`
    once it has begun; neither may raise. Without `environ` it has this process's environment.
    """
    import subprocess  # takes milliseconds, for which no mount waits

    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # the kernel would keep no exit code
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with signals_passed_on(on_signal) as pass_on_to:
        try:
            process = subprocess.Popen(list(words), env=environ)
        except OSError as error:
            raise from_os_error(error, f"run {words[0]}") from error
        pass_on_to(process.pid)
        on_begun()
        return await_end(process.pid, None, lambda: None)


@contextlib.contextmanager
def signals_passed_on(
    on_signal: Callable[[int], None] = lambda _: None,
) -> Iterator[Callable[[int], None]]:
    """Pass signals on to the child whose process id is given to what this yields.

    Those that come before are held back for it; where there never is a child, they are our own.
    """
    child = 0
    held: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if not child:
            held.append(number)
            return
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)
        on_signal(number)

    def pass_on_to(pid: int) -> None:
        nonlocal child
        child = pid
        while held:
            pass_on(held.pop(0), None)

    with _signals_blocked():
        old_handlers = {
            number: signal.signal(number, pass_on)
            for number in PASSED_ON
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup's wish is the command's too
        }
    try:
        yield pass_on_to
    finally:
        with _signals_blocked():
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
        for missed in held:
            signal.raise_signal(missed)


def await_end(pid: int, until: Callable[[], bool] | None, kill: Callable[[], None]) -> int:
    """Wait for a child; returns its exit code as a shell has it.

    Once `until` answers True, the child gets a SIGTERM, and `kill` is called when that does not
    end it.
    """
    asked_s = 0.0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG if until is not None else 0)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if until is not None and not asked_s and until():
            os.kill(pid, signal.SIGTERM)
            asked_s = time.monotonic()
        if asked_s and time.monotonic() - asked_s > GRACE_S:
            kill()
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Neither handler that is being replaced runs meanwhile, nor raises in between.

    That holds in a process of one thread: another one may take the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # what came before may raise here
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
