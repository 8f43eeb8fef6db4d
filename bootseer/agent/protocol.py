"""The messages between a client and a fork server: one request and one answer a connection.

A request is, all integers in the machine's byte order:

    length    4 bytes: how many bytes follow
    count     how many words there are, in decimal digits, and a zero byte
    words     each ended by a zero byte; the first two are the name of the task
    environ   the client's environment, each NAME=VALUE ended by a zero byte

With its first byte come four descriptors (SCM_RIGHTS): standard input, output and error of the
task, and its working directory. It is sent once the server has said, by one byte (READY), that it
receives: descriptors in the queue of a server that was stopped would stay open, and those who read
from them would wait.

The answer is one byte: BEGUN, or REFUSED, which says that it must be carried out elsewhere. With
BEGUN comes a descriptor of the task's process (a pidfd). The client confirms BEGUN by one byte, and
then the task begins: a client that no longer waits has nothing begun behind its back. While the
task works it sends a byte every `ALIVE_S` (ALIVE); ENDED and its exit code follow, two bytes, or
REFUSED from a task that has done nothing. A connection that ends before BEGUN says that nothing was
begun; after it, that the task's process was killed. A client that closes the connection, or shuts
down its side of it, meanwhile interrupts the task.

A task may have its client run programs: it sends RUN, or RUN_BEFORE for one that is not yet what
the client was asked to run, a length, and the program's words and environment, packed as those of a
request are. The client sends two bytes for each signal that it passes on to the program, SIGNALLED
and the number, and at last ENDED and the exit code. No sign of life is given meanwhile.
"""

from __future__ import annotations

import os
import sys
import time
from _socket import CMSG_LEN, MSG_CMSG_CLOEXEC, SOL_SOCKET  # `socket` itself costs 5 ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Mapping, Sequence

RUN_BEFORE, RUN, ENDED, ALIVE, READY, BEGUN, REFUSED = 249, 250, 251, 252, 253, 254, 255
SIGNALLED = 1
DECLINED = -1
"""In place of a task's exit code: it has done nothing, and is to be carried out elsewhere."""
ALIVE_S = 0.5
"""How often a task that works says so."""
VERSION = "BOOTSEER_CLIENT_VERSION"
"""In a request's environment: the version of bootseer that asks."""
PING = "agent ping"
"""The name of the task by which a server is asked whether it works."""
ANSWER_BYTES = 1
TASK_WORDS = 2
DESCRIPTORS = 4
MOST_REQUEST_BYTES = 4 << 20

_LENGTH_BYTES = 4
_DESCRIPTOR_BYTES = 4
_PIECE_BYTES = 1 << 16
_SCM_RIGHTS = 1


class Request:
    """A request as it was received; the descriptors are the receiver's to close."""

    __slots__ = ("descriptors", "environ", "words")

    def __init__(self, words: list[str], environ: dict[str, str], descriptors: list[int]) -> None:
        self.words, self.environ, self.descriptors = words, environ, descriptors


class Program:
    """A program that a task has its client run; `is_last` where it is what the client is for."""

    __slots__ = ("environ", "is_last", "words")

    def __init__(self, words: list[str], environ: dict[str, str], *, is_last: bool) -> None:
        self.words, self.environ, self.is_last = words, environ, is_last


def send_request(
    link: socket, words: Sequence[str], environ: Mapping[str, str], streams: tuple[int, int, int]
) -> None:
    """Send a request with this process's working directory, once the server receives.

    Raises OSError.
    """
    if not link.recv(1):
        raise BrokenPipeError("no server")
    message = _with_length(pack(words, environ))
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        sent = send_descriptors(link, message, *streams, directory)
    finally:
        os.close(directory)
    if message[sent:]:  # a server that has refused it, and ended, must not seem to have been killed
        link.sendall(message[sent:])


def confirm_begun(link: socket) -> bool:
    """Await the first answer, and have the task begin; False where it was refused.

    Raises OSError where no answer comes: nothing was begun.
    """
    process = begin(link)
    if process is None:
        return False
    if process >= 0:
        os.close(process)
    return True


def begin(link: socket) -> int | None:
    """As `confirm_begun`; a descriptor of the task's process, -1 for none, None where refused."""
    answer, descriptors = receive_descriptors(link, ANSWER_BYTES, 1)
    process = descriptors[0] if descriptors else -1
    try:
        if not answer:
            raise BrokenPipeError("no answer")
        if answer[0] == BEGUN:
            link.sendall(b"\0")
            return process
    except OSError:
        if process >= 0:
            os.close(process)
        raise
    return None


def await_answer(link: socket, *, limit_s: float, silent_s: float) -> int | Program | None:
    """The exit code of a task that has begun, or what it wants run; None where it was killed.

    DECLINED where it is to be carried out elsewhere. Raises TimeoutError after `limit_s`, and when
    no sign of life came for `silent_s`.
    """
    end_s = time.monotonic() + limit_s
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the task takes too long")
        link.settimeout(min(left_s, silent_s))
        try:
            answer = link.recv(ANSWER_BYTES)
        except ConnectionError:
            return None
        if not answer:
            return None
        if answer[0] == REFUSED:
            return DECLINED
        if answer[0] != ALIVE:
            return _receive_rest(link, answer[0])


def _receive_rest(link: socket, kind: int) -> int | Program | None:
    """What follows ENDED, RUN or RUN_BEFORE; None where it is cut, or of another version."""
    try:
        if kind == ENDED:
            return _receive_whole(link, 1)[0]
        if kind not in (RUN, RUN_BEFORE):
            return None
        length = _receive_whole(link, _LENGTH_BYTES)
        words, environ = unpack(_receive_whole(link, _length_of(length)))
        return Program(words, environ, is_last=kind == RUN)
    except ConnectionError:
        return None


def send_program(link: socket, program: Program) -> None:
    """Have the client run a program, see `receive_note`. Raises OSError."""
    kind = RUN if program.is_last else RUN_BEFORE
    link.sendall(bytes([kind]) + _with_length(pack(program.words, program.environ)))


def send_note(link: socket, kind: int, value: int) -> None:
    """Tell a task of its program, in the client. Nothing raises: the task may have been killed."""
    try:
        link.sendall(bytes([kind, value]))
    except OSError:
        pass


def receive_note(link: socket) -> tuple[int, int]:
    """What the client says of the program that it runs: SIGNALLED or ENDED, and a number.

    Raises OSError where the client has ended.
    """
    kind, value = _receive_whole(link, 2)
    return kind, value


def receive_request(link: socket) -> Request:
    """Receive a request. Raises OSError for one that is cut, ValueError for one that is none."""
    link.sendall(bytes([READY]))
    data, descriptors = receive_descriptors(link, _PIECE_BYTES, DESCRIPTORS)
    while len(data) < _LENGTH_BYTES or len(data) < _LENGTH_BYTES + _length_of(data):
        if len(data) > MOST_REQUEST_BYTES:
            raise ValueError("a request that has no end")
        more = link.recv(_PIECE_BYTES)
        if not more:
            raise BrokenPipeError("a request that was cut")
        data += more
    words, environ = unpack(data[_LENGTH_BYTES:])
    return Request(words, environ, descriptors)


def pack(words: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """The body of a request."""
    parts = [str(len(words)), *words, *(f"{name}={value}" for name, value in environ.items())]
    return b"".join(os.fsencode(part) + b"\0" for part in parts)


def unpack(body: bytes) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of a request's body; ValueError when it is none."""
    count, *rest = [os.fsdecode(part) for part in body.split(b"\0")[:-1]]
    number = int(count)
    if not 0 <= number <= len(rest):
        raise ValueError("a request with fewer words than it says")
    pairs = (text.partition("=") for text in rest[number:])
    return rest[:number], {name: value for name, _, value in pairs}


def send_descriptors(link: socket, data: bytes, *descriptors: int) -> int:
    """Send descriptors with the first byte of some data; returns how many bytes were sent."""
    numbers = b"".join(one.to_bytes(_DESCRIPTOR_BYTES, sys.byteorder) for one in descriptors)
    return link.sendmsg([data], [(SOL_SOCKET, _SCM_RIGHTS, numbers)])


def receive_descriptors(link: socket, most_bytes: int, most: int) -> tuple[bytes, list[int]]:
    """Receive data and the descriptors that came with it, closed on exec from the start."""
    space = CMSG_LEN(most * _DESCRIPTOR_BYTES)
    data, ancillary, _, _ = link.recvmsg(most_bytes, space, MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, numbers in ancillary:
        if (level, kind) == (SOL_SOCKET, _SCM_RIGHTS):
            whole = len(numbers) - len(numbers) % _DESCRIPTOR_BYTES
            descriptors += memoryview(numbers[:whole]).cast("i")
    return data, descriptors


def _with_length(body: bytes) -> bytes:
    return len(body).to_bytes(_LENGTH_BYTES, sys.byteorder) + body


def _receive_whole(link: socket, size: int) -> bytes:
    """So many bytes. Raises BrokenPipeError where fewer come."""
    data = b""
    while len(data) < size:
        more = link.recv(min(_PIECE_BYTES, size - len(data)))
        if not more:
            raise BrokenPipeError("a message that was cut")
        data += more
    return data


def _length_of(data: bytes) -> int:
    return int.from_bytes(data[:_LENGTH_BYTES], sys.byteorder)
