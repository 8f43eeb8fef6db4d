"""Ask the node's agent to run a command, in place of a Python that has yet to import it.

Imports next to nothing: the first milliseconds of each mount pass here.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""
_LOST = 5
_END_S = 10.0


def run_command(words: Sequence[str]) -> int | None:
    """As `ask`, for a command line: its --runtime counts, and an interrupt is an exit code too."""
    try:
        return ask(words, runtime=_option(words, "--runtime"))
    except KeyboardInterrupt:
        return INTERRUPTED


def ask(words: Sequence[str], output: int = 1, *, runtime: str = "") -> int | None:
    """The exit code of a task that the agent ran; None where no agent can run it.

    The task has this process's environment, working directory and standard streams; `output` takes
    the place of standard output. When this process is interrupted, the task is too.
    """
    path = socket_path(runtime)
    if not _is_trusted(path):
        return None
    from _socket import AF_UNIX, SOCK_STREAM, socket  # `socket` itself costs 5 ms

    from bootseer.agent.protocol import ANSWER_BYTES, REFUSED, send_request

    link = socket(AF_UNIX, SOCK_STREAM)
    try:
        link.connect(path)
    except OSError:
        return None  # the agent was killed
    try:
        send_request(link, words, os.environ, (0, output, 2))
        answer = link.recv(ANSWER_BYTES)
    except OSError:
        answer = b""
    except BaseException:  # an interrupt: the task takes back what it has begun
        _hang_up(link)
        raise
    finally:
        link.close()
    if not answer:
        sys.stderr.write(f"bootseer: the agent at {path} died meanwhile; look at the mount\n")
        return _LOST
    return None if answer[0] == REFUSED else answer[0]


def is_available(runtime: str) -> bool:
    """Whether an agent may be asked. One that was killed still looks available."""
    return _is_trusted(socket_path(runtime))


def socket_path(runtime: str) -> str:
    """Where the agent listens; "" is this node's usual runtime directory."""
    if not runtime:
        from bootseer.config.paths import default_runtime

        runtime = default_runtime()
    return os.path.join(runtime, "images/agent.sock")


def _is_trusted(path: str) -> bool:
    """Whether the socket is root's or our own: it is sent our environment, secrets included."""
    try:
        return os.stat(path).st_uid in (0, os.geteuid())
    except OSError:
        return False


def _hang_up(link: socket) -> None:
    """Interrupt the task and wait for its end."""
    from _socket import SHUT_WR

    try:
        link.shutdown(SHUT_WR)
        link.settimeout(_END_S)
        link.recv(1)
    except OSError:
        pass  # it ends without us


def _option(words: Sequence[str], name: str) -> str:
    """The value of an option in a command line that was not parsed yet."""
    for number, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word[len(name) + 1 :]
        if word == name and number + 1 < len(words):
            return words[number + 1]
    return ""
