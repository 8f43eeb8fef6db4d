"""A process that has imported what its tasks need, and forks for each request."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bootseer.agent.client import INTERRUPTED
from bootseer.agent.protocol import DESCRIPTORS, REFUSED, TASK_WORDS, Request, receive_request
from bootseer.system.child_processes import silence_streams
from bootseer.system.file_lock import FileLock
from bootseer.system.readiness import readable

_RECEIVE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class TaskTable:
    """What a server can do: functions by the names of their tasks, as "package.module:function".

    A function takes the words of a request and returns an exit code. It runs in a process of its
    own, which has one thread and the environment, working directory and standard streams of the
    client. A KeyboardInterrupt means that the client no longer waits: what was begun is taken back.
    `modules` are imported before the first request, as are those of the functions.
    """

    functions: Mapping[str, str]
    modules: Sequence[str] = ()

    def load(self) -> None:
        """Import all that the tasks need. Raises what importing raises."""
        for name in self.modules:
            importlib.import_module(name)
        for function in self.functions.values():
            pkgutil.resolve_name(function)


@dataclass(frozen=True, slots=True)
class ForkServer:
    """Runs tasks for every client that is admitted.

    `accept` gives the next connection, without waiting once `source` is readable, or None when no
    more will come; an OSError costs that connection alone. A child closes `source` and `lock`, for
    what a task starts outlives the server.
    """

    tasks: TaskTable
    source: socket.socket
    accept: Callable[[], socket.socket | None]
    admits: Callable[[socket.socket], bool] = lambda _: True
    lock: FileLock | None = None

    def serve(self) -> None:
        """Serve until SIGTERM, SIGINT or the last connection, in a process that has one thread.

        Whatever becomes of a request's child, the server goes on; the children of one that ends
        finish their tasks.
        """
        gc.collect()
        gc.freeze()  # or the first collection in each child would copy all that was imported
        signalled, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        while True:
            ready = readable(self.source.fileno(), signalled)
            if signalled in ready and set(os.read(signalled, 4096)) != {signal.SIGCHLD}:
                return
            _reap()
            if self.source.fileno() in ready:
                with contextlib.suppress(OSError):
                    link = self.accept()
                    if link is None:
                        return
                    with link:
                        if os.fork() == 0:
                            self._answer(link)

    def _answer(self, link: socket.socket) -> NoReturn:
        """Run the task of one request, in a child of the server."""
        exit_code = REFUSED
        try:
            self.source.close()
            if self.lock is not None:
                self.lock.close()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exit_code = self._run(link)
        except (KeyboardInterrupt, SystemExit, BrokenPipeError):  # the client no longer waits
            exit_code = INTERRUPTED
        except BaseException as error:  # a border: this process ends here, and the client hears
            exit_code = 1
            with contextlib.suppress(OSError):
                os.write(2, f"bootseer: the agent failed: {error!r}\n".encode())
        finally:
            try:
                for number in (signal.SIGIO, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(AttributeError, OSError, ValueError):
                        stream.flush()
                with contextlib.suppress(OSError):
                    link.sendall(bytes([exit_code & 255]))
            finally:
                os._exit(0)

    def _run(self, link: socket.socket) -> int:
        link.settimeout(_RECEIVE_S)
        request = receive_request(link)
        link.settimeout(None)
        name = " ".join(request.words[:TASK_WORDS])
        if (
            name not in self.tasks.functions
            or len(request.descriptors) != DESCRIPTORS
            or not self.admits(link)
        ):
            return REFUSED
        _take_place_of_client(request)
        _interrupt_on_hang_up(link)
        task: Callable[[list[str]], int] = pkgutil.resolve_name(self.tasks.functions[name])
        return task(request.words)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _take_place_of_client(request: Request) -> None:
    """Have the environment, working directory and standard streams of a request."""
    os.environ.clear()
    os.environ.update(request.environ)
    *streams, directory = request.descriptors
    os.fchdir(directory)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in request.descriptors:
        os.close(descriptor)


def _interrupt_on_hang_up(link: socket.socket) -> None:
    """Raise KeyboardInterrupt, once, in whatever this process does when the client hangs up.

    Its streams are closed first: their readers wait until the last process has closed them.
    """

    def look(*_: object) -> None:
        try:
            if link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            return  # the client waits
        except OSError:
            pass  # the connection was reset
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        silence_streams()
        raise KeyboardInterrupt

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
    look()  # it may have hung up before
