"""The node's agent: a fork server that listens at a socket in the runtime directory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import bootseer
from bootseer.agent import drain
from bootseer.agent.client import socket_path
from bootseer.agent.drain import CREDENTIALS
from bootseer.agent.fork_server import ForkServer, TaskTable
from bootseer.agent.protocol import PING, VERSION, Request
from bootseer.agent.sweeper import Sweeper
from bootseer.agent.task_counts import TaskCounts
from bootseer.errors import BusyError, StoreUnavailableError, from_os_error
from bootseer.system import file_lock
from bootseer.system.file_lock import FileLock

YOUNG_S = 5.0
LOADED_VERSION = "--loaded-version"
"""What makes the program load what it needs, and write its version to standard output."""
_LOAD_S = 30.0
_NAMESPACES = ("mnt", "net", "pid", "user")


def serve(
    runtime: str,
    tasks: TaskTable,
    *,
    listen: str = "",
    collect: str = "",
    for_pods: bool = False,
    sweepers: Sequence[Sweeper] = (),
    idle_exit_s: float = 0.0,
    program: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM, SIGINT or (if not 0) `idle_exit_s` seconds without a request that
    is not refused.

    With `idle_exit_s` only processes in the control groups of this one are served. Raises BusyError
    where an agent serves already.

    `program` is the command line of this process: when another version is installed and asks, the
    process goes on as that, and mounts, which others serve, stay. With an address to `listen` at,
    health and metrics are served there: see `endpoint`. `for_pods`: processes without privilege may
    have FUSE mounts made for them, see `pod_mounts`. `sweepers` are done meanwhile.
    """
    tasks.load()
    namespaces, groups = _namespaces_of("self") or [], _groups_of("self")

    def is_ours(link: socket.socket) -> bool:
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, uid, _ = CREDENTIALS.unpack(credentials)
        if uid != os.geteuid() or _namespaces_of(pid) != namespaces:
            return False
        return not idle_exit_s or _groups_of(pid) == groups

    is_own = False  # of the request that this process was forked for

    def admits(link: socket.socket, request: Request) -> bool:
        nonlocal is_own
        is_own = is_ours(link)  # before the answer: a client that was refused may end at once
        is_same = request.environ.get(VERSION) == bootseer.__version__
        return is_same and is_own and not drain.is_draining(runtime)

    def is_replaced(link: socket.socket, request: Request) -> bool:
        version = request.environ.get(VERSION, bootseer.__version__)
        return (
            version != bootseer.__version__
            and (is_own or is_ours(link))
            and not drain.is_draining(runtime)
            and _is_installed(version, program)
        )

    runtime, counts = os.path.abspath(runtime), TaskCounts()
    tasks = replace(tasks, functions={**tasks.functions, PING: f"{__name__}:answer_ping"})
    with _listening(socket_path(runtime)) as (listener, lock):
        helpers = Helpers()
        if for_pods:
            from bootseer.agent import pod_mounts  # opens FUSE to processes without privilege

            helpers.start("the mounts for pods", lambda: pod_mounts.start(runtime))
        if listen:
            from bootseer.agent.endpoint import Endpoint  # an HTTP server, for those who want it

            endpoint = Endpoint(listen, runtime, collect)
            helpers.start("health and metrics", lambda: endpoint.start(counts))
        for sweeper in sweepers:
            helpers.start(", ".join(sweeper.functions), sweeper.start)
        server = ForkServer(
            tasks,
            listener,
            lambda: listener.accept()[0],
            admits,
            lock,
            counts,
            on_other_end=helpers.restart,
            is_replaced=is_replaced,
            idle_exit_s=idle_exit_s or None,
        )
        if not server.serve():
            return
        helpers.end()  # this process goes on as another program, and so would they
    os.execv(program[0], list(program))


class Helpers:
    """Processes that serve beside the agent, by what they serve; started again when they end."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, Callable[[], int], float]] = {}

    def start(self, what: str, start: Callable[[], int]) -> None:
        """Start one by a function that returns its process id. Raises what that raises."""
        self._running[start()] = (what, start, time.monotonic())

    def restart(self, process: int) -> None:
        """Start one again that has ended; does nothing for any other process.

        Raises StoreUnavailableError for one that ended within seconds: then the whole agent is to
        be started again, by who looks after it.
        """
        if process not in self._running:
            return
        what, start, since_s = self._running.pop(process)
        if time.monotonic() - since_s < YOUNG_S:
            raise StoreUnavailableError(f"what serves {what} keeps dying; see its messages above")
        self.start(what, start)

    def end(self) -> None:
        """End all of them."""
        for process in self._running:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        self._running.clear()


def _is_installed(version: str, program: Sequence[str]) -> bool:
    """Whether the program is of a version now, and works: it may be half installed."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, IndexError):
        done = subprocess.run(
            [*program, LOADED_VERSION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOAD_S,
            check=False,
        )
        return done.returncode == 0 and done.stdout.decode().strip() == version
    return False


def answer_ping(_: list[str]) -> int:
    """The task that shows that tasks are run."""
    return 0


@contextlib.contextmanager
def _listening(path: str) -> Iterator[tuple[socket.socket, FileLock]]:
    """A socket that listens at `path` until the end of the block, and the lock on that path."""
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            try:
                lock = stack.enter_context(file_lock.acquire(f"{path}.lock", limit_s=0))
            except BlockingIOError as error:
                raise BusyError(f"an agent serves at {path} already; end that one first") from error
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            umask = os.umask(0o177)
            try:
                listener.bind(path)
            finally:
                os.umask(umask)
            stack.callback(_unlink, path)
            listener.listen(64)
        except OSError as error:
            raise from_os_error(error, f"listen at {path}") from error
        yield listener, lock


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _groups_of(pid: int | str) -> bytes:
    """A process's control groups; "" where they are not known.

    An agent that a command has left behind ends with the unit or the job of that command, and what
    serves a container must not end with another one's.
    """
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _namespaces_of(pid: int | str) -> list[int] | None:
    """What a task does must be what its client would do: it sees the same mounts, network,
    processes and users. None where that is not known.
    """
    try:
        return [os.stat(f"/proc/{pid}/ns/{name}").st_ino for name in _NAMESPACES]
    except OSError:
        return None
