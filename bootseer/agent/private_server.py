"""A fork server of one process's own: one with many threads, which must not fork by itself.

The process sends one end of each connection over a socket, the server's standard input. When the
process ends, however it does, the server reads the end of that socket and ends too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from bootseer.agent.fork_server import ForkServer, TaskTable
from bootseer.agent.protocol import (
    REFUSED,
    await_answer,
    confirm_begun,
    receive_descriptors,
    send_descriptors,
    send_request,
)
from bootseer.errors import BootseerError, DeadlineError, StoreUnavailableError
from bootseer.system.child_processes import command_for
from bootseer.system.processes import fill_streams

_TRIES = 3


class PrivateServer:
    """Starts the server when first needed, and again when it died. Any thread may ask.

    `name` says in errors what the tasks do, `limit_s` is how long one may take. They run with this
    process's environment, in which `environ` takes precedence.
    """

    def __init__(
        self, name: str, tasks: TaskTable, *, limit_s: float, environ: Mapping[str, str]
    ) -> None:
        self._name, self._tasks = name, tasks
        self._limit_s, self._environ = limit_s, environ
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have the server ready before the first request; nothing raises."""
        with contextlib.suppress(OSError), self._lock:
            self._connected()

    @property
    def pid(self) -> int:
        """The server's process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def ask(self, words: Sequence[str], output: int, *, what: str = "") -> int:
        """The exit code of a task, which writes to `output`; it runs again when it was killed.

        Raises DeadlineError after `limit_s`, when the task is interrupted, and
        StoreUnavailableError where no server can be started or each try was killed; `what` is the
        task's name in these.
        """
        what = what or self._name
        try:
            for _ in range(_TRIES):
                exit_code = self._answer(words, output)
                if exit_code is not None:
                    return exit_code
                with self._lock:
                    self._disconnect()
        except TimeoutError as error:
            raise DeadlineError(
                f"{what} took more than {self._limit_s:.0f} s; see its log, or try again"
            ) from error
        except OSError as error:
            raise StoreUnavailableError(f"cannot start {self._name}: {error}") from error
        raise StoreUnavailableError(f"{what} keeps dying; see its log, or try again")

    def _answer(self, words: Sequence[str], output: int) -> int | None:
        """The answer to one request; None when the server, or the task, was killed."""
        ours, theirs = socket.socketpair()
        with ours, open(os.devnull, "rb") as null:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(self._limit_s)
            environ = {**os.environ, **self._environ}
            try:
                send_request(ours, words, environ, (null.fileno(), output, 2))
                if not confirm_begun(ours):
                    return REFUSED
                limit_s = self._limit_s
                answer = await_answer(ours, limit_s=limit_s, silent_s=limit_s)
                return answer if isinstance(answer, int) else None
            except ConnectionError:
                return None

    def _hand_over(self, link: socket.socket) -> None:
        with self._lock:
            try:
                send_descriptors(self._connected(), b"\0", link.fileno())
            except OSError:  # the server died since
                self._disconnect()
                send_descriptors(self._connected(), b"\0", link.fileno())

    def _connected(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = command_for(__name__, json.dumps(dataclasses.asdict(self._tasks)))
                self._process = subprocess.Popen(command, stdin=theirs.fileno())
            self._socket = ours
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the server; what its tasks made stays. Twice is safe."""
        with self._lock:
            self._disconnect()


def main() -> None:
    """Serve standard input until its other end is closed."""
    # Or a descriptor that is received takes the number of a standard stream that was closed.
    fill_streams()
    source = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    tasks = TaskTable(**json.loads(sys.argv[1]))
    with contextlib.suppress(BootseerError, ImportError):  # the task itself reports what it lacks
        tasks.load()

    def accept() -> socket.socket | None:
        data, descriptors = receive_descriptors(source, 1, 1)
        if not data:
            return None
        if not descriptors:  # none was free here
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socket(fileno=descriptors[0])

    ForkServer(tasks, source, accept).serve()
