"""Programs that a task has its client run: children of whoever asked, with its terminal.

The task waits meanwhile. One whose client was killed ends as if it had been killed too, and undoes
nothing: the program may go on. A client that has hung up, and still listens, has not begun it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

from bootseer.agent import task_counts
from bootseer.agent.protocol import ALIVE, ALIVE_S, ENDED, Program, receive_note, send_program

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ClientPrograms:
    """The client at the other end of a task's connection; used by the task's one thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.has_run = False
        """Whether the client has run a program."""

    def give_signs_of_life(self) -> None:
        """Send ALIVE from time to time, from within whatever this process does.

        By a signal, as a task has one thread. Children have no such timer.
        """

        def say(*_: object) -> None:
            with contextlib.suppress(OSError):  # it is full, or the client has hung up: see SIGIO
                self._link.send(bytes([ALIVE]), socket.MSG_DONTWAIT)

        signal.signal(signal.SIGALRM, say)
        signal.setitimer(signal.ITIMER_REAL, ALIVE_S, ALIVE_S)

    def run(
        self,
        words: Sequence[str],
        on_signal: Callable[[int], None] = lambda _: None,
        *,
        on_begun: Callable[[], None] = lambda: None,
    ) -> int:
        """Have the client run what it was asked for to its end, in this process's environment.

        Returns its exit code as a shell has it, which is the client's where this process is killed
        later. `on_signal` is called, any number of times, with a signal that the client has passed
        on, `on_begun` once the client has been asked; neither may raise. Signals to this process
        change nothing.
        """
        return self._run(words, on_signal, on_begun, is_last=True)

    def run_before(
        self,
        words: Sequence[str],
        on_signal: Callable[[int], None] = lambda _: None,
        *,
        on_begun: Callable[[], None] = lambda: None,
    ) -> int:
        """As `run`, for what comes before: where this process is killed later, all begins again."""
        return self._run(words, on_signal, on_begun, is_last=False)

    def _run(
        self,
        words: Sequence[str],
        on_signal: Callable[[int], None],
        on_begun: Callable[[], None],
        *,
        is_last: bool,
    ) -> int:
        with self._waiting():
            try:
                send_program(self._link, Program(list(words), dict(os.environ), is_last=is_last))
            except OSError as error:  # it has ended, and runs nothing
                raise KeyboardInterrupt from error
            self.has_run = True
            on_begun()
            try:
                while True:
                    kind, value = receive_note(self._link)
                    if kind == ENDED:
                        return value
                    on_signal(value)
            except OSError:
                if not self._is_heard():
                    os._exit(task_counts.DONE)
        raise KeyboardInterrupt

    def _is_heard(self) -> bool:
        try:
            return self._link.send(bytes([ALIVE]), socket.MSG_DONTWAIT) == 1
        except OSError:
            return False

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Neither give signs of life, which nobody awaits, nor be interrupted."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        numbers = (signal.SIGIO, *_ENDING)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.setitimer(signal.ITIMER_REAL, ALIVE_S, ALIVE_S)
        signal.raise_signal(signal.SIGIO)  # the client may have hung up meanwhile
