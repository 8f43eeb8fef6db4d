"""The process of one part: reads its request from a socket, reports back over it.

Started by `start` with the socket as descriptor 3: one JSON request, then end of file; back come
JSON lines (`began`, `ended`, and last `result` or `fault`). A process that dies without the last
one is a fault of ours, whatever its exit code: an install command's exit code cannot be mistaken
for our own crash.
"""

from __future__ import annotations

import json
import os
import signal
import socket

from bootseer import events
from bootseer.entrypoint.parts import all_parts
from bootseer.errors import describe
from bootseer.system.fork import end_with_parent

SOCKET_FD = 3


class _Reporter:
    """The `Progress` of a part, and its last word."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def _send(self, message: dict[str, object]) -> None:
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # `start` is gone; its other end tells it all it needs

    def command_began(self) -> None:
        self._send({"began": True})

    def command_ended(self, exit_code: int) -> None:
        self._send({"ended": exit_code})

    def result(self, exit_code: int) -> None:
        self._send({"result": exit_code})

    def fault(self, text: str) -> None:
        self._send({"fault": text})


def main() -> int:
    """Run or repair the part that the request names; 0 when a last word could be said."""
    link = socket.socket(fileno=SOCKET_FD)
    link.set_inheritable(False)  # an install command must not hold it open
    reporter = _Reporter(link)
    data = b""
    while chunk := link.recv(65536):
        data += chunk
    message = json.loads(data)
    _die_with(message["parent"])
    part = all_parts.by_name(message["part"])
    try:
        if message["action"] == "repair":
            part.repair(message["request"])
            reporter.result(0)
        else:
            with events.open_writer() as writer:
                reporter.result(part.run(message["request"], writer, reporter))
    except Exception as error:  # the border: any fault of ours sends the job the plain way
        reporter.fault(describe(error))
        os._exit(0)  # the plain way waits for our end, and threads may hang in a store's client
    return 0


def _die_with(parent: int) -> None:
    """A `start` killed with SIGKILL must not leave us working on a job that is gone."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
