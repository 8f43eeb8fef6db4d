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
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bootseer.agent import task_counts
from bootseer.agent.client import INTERRUPTED
from bootseer.agent.client_programs import ClientPrograms
from bootseer.agent.protocol import (
    ANSWER_BYTES,
    BEGUN,
    DECLINED,
    DESCRIPTORS,
    ENDED,
    REFUSED,
    TASK_WORDS,
    VERSION,
    Request,
    receive_request,
    send_descriptors,
)
from bootseer.agent.task_counts import TaskCounts
from bootseer.errors import NotSupportedError
from bootseer.system.child_processes import silence_streams
from bootseer.system.file_lock import FileLock
from bootseer.system.readiness import readable

_RECEIVE_S = 5.0
_ENDINGS = {0: task_counts.DONE, DECLINED: task_counts.REFUSED}
_REPLACED = 64
"""Exit code of a request's process: a newer program is to take the server's place."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class TaskTable:
    """What a server can do: functions by the names of their tasks, as "package.module:function".

    A function takes the words of a request and returns an exit code. It runs in a process of its
    own, which has one thread and the environment, working directory and standard streams of the
    client. A KeyboardInterrupt means that the client no longer waits: what was begun is taken back.
    One that returns DECLINED has done nothing. Those in `with_programs` are called with a
    `ClientPrograms` besides. `modules` are imported before the first request, as are those of the
    functions; one whose extra is not installed is left to the task that needs it, which says so.
    """

    functions: Mapping[str, str]
    modules: Sequence[str] = ()
    with_programs: Collection[str] = ()

    def load(self) -> None:
        """Import all that the tasks need. Raises what importing raises."""
        for name in self.modules:
            with contextlib.suppress(NotSupportedError):
                importlib.import_module(name)
        for function in self.functions.values():
            pkgutil.resolve_name(function)


@dataclass(frozen=True, slots=True)
class ForkServer:
    """Runs tasks for every client that is admitted.

    `accept` gives the next connection, without waiting once `source` is readable, or None when no
    more will come; an OSError costs that connection alone. A child closes `source` and `lock`, for
    what a task starts outlives the server. `counts` is told how the children ended, and
    `on_other_end` of children that are no task's. `is_replaced` is asked, in a child, about a
    request that was not admitted: whether a program that admits it can take the server's place.
    """

    tasks: TaskTable
    source: socket.socket
    accept: Callable[[], socket.socket | None]
    admits: Callable[[socket.socket, Request], bool] = lambda *_: True
    lock: FileLock | None = None
    counts: TaskCounts | None = None
    on_other_end: Callable[[int], None] = lambda _: None
    is_replaced: Callable[[socket.socket, Request], bool] = lambda *_: False
    idle_exit_s: float | None = None

    def serve(self) -> bool:
        """Serve until SIGTERM, SIGINT or the last connection, in a process that has one thread.

        With `idle_exit_s`, until so many seconds have passed as well without a request that is not
        refused. True where another program is to take its place. Whatever becomes of a request's
        child, the server goes on; the children of one that ends finish their tasks.
        """
        gc.collect()
        gc.freeze()  # or the first collection in each child would copy all that was imported
        running: dict[int, float] = {}  # when each was asked for
        served_s = time.monotonic()
        signalled, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        while True:
            left_s = None
            if self.idle_exit_s is not None:
                asked_s = max([served_s, *running.values()])
                left_s = max(0.0, asked_s + self.idle_exit_s - time.monotonic())
            ready = readable(self.source.fileno(), signalled, timeout_s=left_s)
            if not ready:
                return False
            if signalled in ready and set(os.read(signalled, 4096)) != {signal.SIGCHLD}:
                return False
            is_replaced, ended_s = self._reap(running)
            served_s = max(served_s, ended_s)
            if is_replaced:
                return True
            if self.source.fileno() in ready:
                with contextlib.suppress(OSError):
                    link = self.accept()
                    if link is None:
                        return False
                    with link:
                        child = os.fork()
                        if child == 0:
                            self._answer(link)
                        running[child] = time.monotonic()

    def _answer(self, link: socket.socket) -> NoReturn:
        """Run the task of one request, in a child of the server."""
        exit_code, ending, programs = DECLINED, 0, ClientPrograms(link)
        try:
            self.source.close()
            if self.lock is not None:
                self.lock.close()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            link.settimeout(_RECEIVE_S)
            request = receive_request(link)
            if self._is_known(request) and self.admits(link, request):
                exit_code = self._run(link, request, programs)
            else:
                link.sendall(bytes([REFUSED]))  # what follows takes a while
                ending = _REPLACED if self.is_replaced(link, request) else 0
        except (KeyboardInterrupt, SystemExit, BrokenPipeError):  # the client no longer waits
            exit_code = INTERRUPTED
        except BaseException as error:  # a border: this process ends here, and the client hears
            exit_code = 1
            with contextlib.suppress(OSError):
                os.write(2, f"bootseer: the agent failed: {error!r}\n".encode())
        finally:
            try:
                for number in (signal.SIGIO, signal.SIGALRM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(AttributeError, OSError, ValueError):
                        stream.flush()
                with contextlib.suppress(OSError):
                    declined = exit_code == DECLINED
                    link.sendall(bytes([REFUSED] if declined else [ENDED, exit_code & 255]))
            finally:
                ours = 0 if programs.has_run else exit_code  # how a program ends is not our doing
                os._exit(ending or _ENDINGS.get(ours, task_counts.FAILED))

    def _reap(self, running: dict[int, float]) -> tuple[bool, float]:
        """Reap children: whether one found a program that is to take the server's place, and when
        the last of those that were not refused was asked for (0.0: there is none).
        """
        is_replaced, served_s = False, 0.0
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if not process:
                    break
                if process not in running:
                    self.on_other_end(process)
                    continue
                asked_s = running.pop(process)
                ending = os.waitstatus_to_exitcode(status)
                is_replaced |= ending == _REPLACED
                if ending != task_counts.REFUSED:
                    served_s = max(served_s, asked_s)
                if self.counts is not None:
                    self.counts.count(task_counts.REFUSED if ending == _REPLACED else ending)
        return is_replaced, served_s

    def _is_known(self, request: Request) -> bool:
        name = " ".join(request.words[:TASK_WORDS])
        return name in self.tasks.functions and len(request.descriptors) == DESCRIPTORS

    def _run(self, link: socket.socket, request: Request, programs: ClientPrograms) -> int:
        _send_begun(link)
        if not link.recv(ANSWER_BYTES):
            raise BrokenPipeError("the client no longer waits")
        link.settimeout(None)
        _take_place_of_client(request)
        _interrupt_on_hang_up(link)
        programs.give_signs_of_life()
        name = " ".join(request.words[:TASK_WORDS])
        task: Callable[..., int] = pkgutil.resolve_name(self.tasks.functions[name])
        if name in self.tasks.with_programs:
            return task(request.words, programs)
        return task(request.words)


def _send_begun(link: socket.socket) -> None:
    try:
        process = os.pidfd_open(os.getpid())
    except OSError:  # no descriptor is free: the client cannot end a task that hangs
        link.sendall(bytes([BEGUN]))
        return
    try:
        send_descriptors(link, bytes([BEGUN]), process)
    finally:
        os.close(process)


def _take_place_of_client(request: Request) -> None:
    """Have the environment, working directory and standard streams of a request."""
    os.environ.clear()
    os.environ.update(request.environ)
    os.environ.pop(VERSION, None)
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
