"""The agent's health and metrics over HTTP, from a process of their own.

| path | answer |
|---|---|
| `/healthz` | 200 while the agent answers a request at its socket within `HEALTH_S` |
| `/readyz` | the same, but 503 while it drains |
| `/metrics` | Prometheus' text format |

The process ends with the agent, which must have one thread and so serves none of this itself.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NoReturn

import bootseer
from bootseer.agent.client import socket_path
from bootseer.agent.drain import is_draining
from bootseer.agent.protocol import ANSWER_BYTES, PING, VERSION, confirm_begun, send_request
from bootseer.agent.task_counts import TaskCounts
from bootseer.errors import UsageError, from_os_error
from bootseer.exposition import CONTENT_TYPE, format_metric
from bootseer.system.child_processes import close_descriptors, end_with_parent, fork, name_thread

HEALTH_S = 5.0
_READ_S = 10.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is served at `address` ("HOST:PORT").

    `collect` names a function ("package.module:function") that takes the runtime directory and
    returns metrics of the node as text.
    """

    address: str
    runtime: str
    collect: str

    def start(self, counts: TaskCounts) -> int:
        """Serve in a new process, which ends with this one; returns its process id.

        Raises UsageError for an invalid address, and the errors of `from_os_error`.
        """
        listener = _listen(self.address)
        agent = os.getpid()
        child = fork()
        if child == 0:
            self._serve(listener, agent, counts)
        listener.close()
        return child

    def _serve(self, listener: socket.socket, agent: int, counts: TaskCounts) -> NoReturn:
        try:
            close_descriptors(0, 1, 2, listener.fileno())  # the agent's place must be free after it
            end_with_parent(signal.SIGKILL)
            name_thread(b"bootseer-http")
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # those are for the agent
            if os.getppid() == agent:
                make_server(self, listener, agent, counts).serve_forever()
        finally:
            os._exit(1)

    def is_healthy(self) -> bool:
        """Whether the agent carries out a request now."""
        with socket.socket(socket.AF_UNIX) as link, open(os.devnull, "r+b") as null:
            link.settimeout(HEALTH_S)
            with contextlib.suppress(OSError):
                link.connect(socket_path(self.runtime))
                environ = {VERSION: bootseer.__version__}
                send_request(link, PING.split(), environ, (null.fileno(),) * 3)
                return not confirm_begun(link) or bool(link.recv(ANSWER_BYTES))
        return False

    def is_ready(self) -> bool:
        """Whether the agent takes on more."""
        return not is_draining(self.runtime) and self.is_healthy()

    def format_metrics(self, agent: int, counts: TaskCounts) -> str:
        """All metrics: the agent's own, and those of the node."""
        ended = [({"result": ending}, number) for ending, number in counts.read().items()]
        collect: Callable[[str], str] = pkgutil.resolve_name(self.collect)
        return "".join(
            [
                format_metric(
                    "agent_info", "1, with its version", [({"version": bootseer.__version__}, 1)]
                ),
                format_metric("agent_ready", "1 unless it drains", [({}, self.is_ready())]),
                format_metric("agent_tasks_total", "Requests by result", ended, kind="counter"),
                format_metric(
                    "agent_resident_bytes", "Memory of the agent", [({}, _resident_bytes(agent))]
                ),
                format_metric(
                    "agent_cpu_seconds_total",
                    "Processor time of the agent",
                    [({}, _cpu_s(agent))],
                    kind="counter",
                ),
                collect(self.runtime),
            ]
        )


def make_server(
    endpoint: Endpoint, listener: socket.socket, agent: int, counts: TaskCounts
) -> ThreadingHTTPServer:
    """An HTTP server on a listening socket."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _READ_S
        server_version = "bootseer"
        sys_version = ""

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, endpoint.format_metrics(agent, counts), CONTENT_TYPE)
            elif self.path in ("/healthz", "/readyz"):
                good = endpoint.is_healthy() if self.path == "/healthz" else endpoint.is_ready()
                self._answer(200 if good else 503, "ok\n" if good else "no\n")
            else:
                self._answer(404, "there are /healthz, /readyz and /metrics\n")

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    return server


def _listen(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"listen at {address}: write HOST:PORT, such as 127.0.0.1:9464")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise from_os_error(error, f"listen at {address}") from error


def _resident_bytes(process: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return None


def _cpu_s(process: int) -> float | None:
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None
