"""The node's agent: a fork server that listens at a socket in the runtime directory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

from bootseer.agent.client import socket_path
from bootseer.agent.fork_server import ForkServer, TaskTable
from bootseer.errors import BusyError, from_os_error
from bootseer.system import file_lock
from bootseer.system.file_lock import FileLock
from bootseer.system.processes import mount_namespace

_CREDENTIALS = struct.Struct("=3i")


def serve(runtime: str, tasks: TaskTable) -> None:
    """Serve until SIGTERM or SIGINT. Raises BusyError where an agent serves already."""
    tasks.load()
    namespace = mount_namespace()

    def admits(link: socket.socket) -> bool:
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        return uid == os.geteuid() and _lives_in(namespace, pid)

    with _listening(os.path.abspath(socket_path(runtime))) as (listener, lock):
        ForkServer(tasks, listener, lambda: listener.accept()[0], admits, lock).serve()


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


def _lives_in(namespace: int, pid: int) -> bool:
    """Whether a process lives in a mount namespace; False where it is not known."""
    try:
        return mount_namespace(pid) == namespace
    except OSError:
        return False
