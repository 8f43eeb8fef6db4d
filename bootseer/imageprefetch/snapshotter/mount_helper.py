"""A process with one thread that mounts: the snapshotter has many, and mounting forks.

Requests come as datagrams with a pipe for the answer; each is done by a forked child, so they run
side by side and what they import was imported before. When the snapshotter ends, however it does,
the helper reads the end of its socket and ends too; what it mounted is served on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import threading
from typing import Any

from bootseer.errors import BootseerError, DeadlineError, StoreUnavailableError
from bootseer.fuse.serve import daemon
from bootseer.imageprefetch.mount.mount import START_LIMIT_S, MountSettings, encoded
from bootseer.system.interpreter import command_for
from bootseer.system.readiness import readable

_MOST_BYTES = 1 << 16
_ANSWER_S = START_LIMIT_S + 10.0
_TRIES = 3


class Helper:
    """Starts the process when first needed, and again when it died. Any thread may mount.

    What it mounts writes events to `events_dir`; with "" where this process's environment says.
    """

    def __init__(self, events_dir: str = "") -> None:
        self._events_dir = os.path.abspath(events_dir) if events_dir else ""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have it ready before the first mount; nothing raises."""
        with contextlib.suppress(OSError), self._lock:
            self._connected()

    @property
    def pid(self) -> int:
        """The process's id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def mount(self, settings: MountSettings) -> dict[str, Any]:
        """Mount; what was mounted as `mounting.Mounted` has it. Raises as `mounting.mount`."""
        request = encoded(settings).encode()
        for _ in range(_TRIES):
            told, tell = os.pipe()
            try:
                try:
                    self._send(request, tell)
                finally:
                    os.close(tell)
                answer = _answer(told, settings.directory)
            finally:
                os.close(told)
            if answer is not None:
                return answer
            with self._lock:
                self._disconnect()
        raise StoreUnavailableError(f"what mounts at {settings.directory} keeps dying")

    def _send(self, request: bytes, tell: int) -> None:
        try:
            with self._lock:
                try:
                    socket.send_fds(self._connected(), [request], [tell])
                except OSError:  # it died since
                    self._disconnect()
                    socket.send_fds(self._connected(), [request], [tell])
        except OSError as error:
            raise StoreUnavailableError(f"cannot start what mounts images: {error}") from error

    def _connected(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = command_for(__name__)
                events = {"BOOTSEER_EVENTS": self._events_dir} if self._events_dir else {}
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), env={**os.environ, **events}
                )
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
        """End the process; mounts stay. Twice is safe."""
        with self._lock:
            self._disconnect()


def _answer(told: int, directory: str) -> dict[str, Any] | None:
    """One line: the server in the background keeps the pipe's other end open.

    None when the helper was killed with the request.
    """
    data = b""
    while not data.endswith(b"\n"):
        if not readable(told, timeout_s=_ANSWER_S):
            raise DeadlineError(f"mounting at {directory} took more than {_ANSWER_S:.0f} s")
        more = os.read(told, _MOST_BYTES)
        if not more:
            return None
        data += more
    answer: dict[str, Any] = json.loads(data)
    if "error" in answer:
        raise daemon.decode_error(answer)
    return answer


def _serve(requests: socket.socket) -> None:
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 1)
        if not request:
            return
        for fd in fds:
            if os.fork() == 0:
                _mount_and_exit(requests, request, fd)
            os.close(fd)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _mount_and_exit(requests: socket.socket, request: bytes, fd: int) -> None:
    from bootseer.imageprefetch.mount import mount as mounting

    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        try:
            answer = dataclasses.asdict(mounting.mount(mounting.decoded(request)))
        except BaseException as error:  # the border: this child ends here, who asked hears why
            answer = daemon.encode_error(error)
        os.write(fd, json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def main() -> None:
    """Serve standard input, a socket, until its other end is closed."""
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    with contextlib.suppress(BootseerError, ImportError):
        _import_early()
    signal.signal(signal.SIGCHLD, _reap)
    with requests:
        _serve(requests)


def _import_early() -> None:
    """What every mount imports takes longer than a mount."""
    import bootseer.fuse.serve.handover
    import bootseer.imageprefetch.mount.mount_worker
    import bootseer.storage.oci.registry_repository  # noqa: F401
