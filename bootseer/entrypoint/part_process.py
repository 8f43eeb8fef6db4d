"""The process of one part: reads its request from a socket and reports back over it.

Started by `start` with the socket as descriptor 3, or forked by a process that has imported much of
what it needs (`fork_part`): one JSON request, then end of file; back come JSON lines (`began`,
`ended`, and last `result` or `fault`). A process that ends without the last message is a fault of
ours, whatever its exit code: the exit code of an install command cannot be mistaken for a crash of
ours.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from collections.abc import Mapping
from typing import NoReturn

from bootseer import events
from bootseer.entrypoint import process_groups
from bootseer.entrypoint.process_groups import ProcessGroup
from bootseer.errors import describe
from bootseer.system.child_processes import end_with_parent
from bootseer.system.processes import fill_streams

SOCKET_FD = 3


class _Reporter:
    """The `Progress` of a part, and its last message, `result` or `fault`."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def _send(self, message: dict[str, object]) -> None:
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # `start` has ended, or closed its end: it knows all it needs

    def command_began(self) -> None:
        self._send({"began": True})

    def command_ended(self, exit_code: int) -> None:
        self._send({"ended": exit_code})

    def result(self, exit_code: int) -> None:
        self._send({"result": exit_code})

    def fault(self, text: str) -> None:
        self._send({"fault": text})


def main() -> int:
    """Run or repair the part that the request names; returns 0 after a last message."""
    fill_streams()
    link = socket.socket(fileno=SOCKET_FD)
    link.set_inheritable(False)  # an install command must not hold it open
    return _serve(link)


def fork_part(message: Mapping[str, object], environ: Mapping[str, str]) -> ProcessGroup:
    """As `process_groups.spawn_part`, but forked, in a process that has one thread.

    For a part that starts no command: the marker does not tell what it starts.
    """
    given = dict(environ)  # perhaps `os.environ` itself

    def run(link: socket.socket) -> None:
        gc.enable()  # a server that it leaves behind may live for weeks
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _end)  # so that who waits for a server ends it
        os.environ.clear()
        os.environ.update(given)
        _serve(link)

    return process_groups.start_part(message, lambda link: process_groups.fork_group(link, run))


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _serve(link: socket.socket) -> int:
    reporter = _Reporter(link)
    data = b""
    while chunk := link.recv(65536):
        data += chunk
    try:
        message = json.loads(data)
        _end_with_parent(message["parent"])
        from bootseer.entrypoint.parts import all_parts  # imports what no forking process needs

        part = all_parts.get_part(message["part"])
        if message["action"] == "repair":
            part.repair(message["request"])
            reporter.result(0)
        else:
            with events.open_writer() as writer:
                reporter.result(part.run(message["request"], writer, reporter))
    except Exception as error:  # the border: after any fault of ours the plain way follows
        reporter.fault(describe(error))
        os._exit(0)  # the plain way waits for our end, and threads may hang in a store client
    return 0


def _end_with_parent(parent: int) -> None:
    """Have this process end with `start`, even if that is killed with SIGKILL."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
