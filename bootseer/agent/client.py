"""Asks the node's image agent to run a command, in place of a Python that has yet to import it.

Imports next to nothing: this is what a mount's first milliseconds go to.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

SOCKET = "images/agent.sock"
ANSWER_BYTES = 1
REFUSED = 255
"""What the agent says instead of an exit code when the command must run elsewhere."""
MOUNTING = ["image", "mounting"]
"""No command line of anybody's: settings as text follow, and the answer is a line of JSON."""


INTERRUPTED = 130
_PATIENCE_S = 10.0


def command(args: list[str]) -> int | None:
    """As `ask`, for a whole command line: an interrupt is an exit code too."""
    try:
        return ask(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def ask(args: list[str], output: int = 1) -> int | None:
    """The exit code of a command that the agent ran; None where no agent can run it.

    It runs with these arguments, this process's environment, working directory and standard
    streams; `output` takes the place of standard output. When this process is interrupted, the
    command is too.
    """
    from bootseer.config.paths import default_runtime

    runtime = _option(args, "--runtime") or default_runtime()
    path = os.path.join(runtime, SOCKET)
    if not _is_trusted(path):
        return None
    from _socket import AF_UNIX, SOCK_STREAM, socket  # `socket` itself costs 5 ms

    link = socket(AF_UNIX, SOCK_STREAM)
    try:
        link.connect(path)
    except OSError:
        return None  # one that was killed
    try:
        answer = _answer(link, args, output)
    except OSError:
        answer = b""
    except BaseException:  # an interrupt: the agent's process takes back what it has begun
        _hang_up(link)
        raise
    finally:
        link.close()
    if not answer:
        sys.stderr.write(f"bootseer: the agent at {path} died meanwhile; look at the mount\n")
        return 5
    return None if answer[0] == REFUSED else answer[0]


def stands_by(runtime: str) -> bool:
    """Whether an agent may be asked; one that was killed is taken for one that stands by."""
    from bootseer.config.paths import default_runtime

    return _is_trusted(os.path.join(runtime or default_runtime(), SOCKET))


def _answer(link: socket, args: list[str], output: int) -> bytes:
    from _socket import SOL_SOCKET

    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        request = message(args, dict(os.environ))
        numbers = b"".join(n.to_bytes(4, sys.byteorder) for n in (0, output, 2, here))
        sent = link.sendmsg([request], [(SOL_SOCKET, _SCM_RIGHTS, numbers)])
        link.sendall(request[sent:])
        return link.recv(ANSWER_BYTES)
    finally:
        os.close(here)


def _hang_up(link: socket) -> None:
    """Tell the agent's process that nobody waits, and wait for its end."""
    from _socket import SHUT_WR

    try:
        link.shutdown(SHUT_WR)
        link.settimeout(_PATIENCE_S)
        link.recv(ANSWER_BYTES)
    except OSError:
        pass  # it ends without us


_SCM_RIGHTS = 1


def _is_trusted(path: str) -> bool:
    """Whether there is a socket of root's or our own: it hears our environment, secrets too."""
    try:
        return os.stat(path).st_uid in (0, os.geteuid())
    except OSError:
        return False


def message(args: list[str], environ: dict[str, str]) -> bytes:
    """A request as bytes: its length, then the parts, each ended by a zero byte."""
    parts = [str(len(args)), *args, *(f"{k}={v}" for k, v in environ.items())]
    body = b"".join(os.fsencode(part) + b"\0" for part in parts)
    return len(body).to_bytes(4, sys.byteorder) + body


def parse(body: bytes) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a request's body; ValueError when it is none."""
    count, *rest = [os.fsdecode(part) for part in body.split(b"\0")[:-1]]
    number = int(count)
    if not 0 <= number <= len(rest):
        raise ValueError("a request with fewer words than it says")
    pairs = (text.partition("=") for text in rest[number:])
    return rest[:number], {name: value for name, _, value in pairs}


def _option(args: list[str], name: str) -> str:
    """The value of an option among words that nobody has parsed yet."""
    for number, word in enumerate(args):
        if word.startswith(f"{name}="):
            return word[len(name) + 1 :]
        if word == name and number + 1 < len(args):
            return args[number + 1]
    return ""
