"""One part of a large analysis in a forked process, while the caller goes on with another.

The result must be plain records that can be pickled. Only speed depends on it: where there is one
processor, or a thread besides (a fork would lose it), or where the process did not hand its result
over because it was killed or failed, the caller computes it itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from bootseer.system.fork import fork as fork_process

_Result = TypeVar("_Result")

_LENGTH = struct.Struct("<Q")


def may_fork() -> bool:
    """Whether another process of this program would help, and lose nothing."""
    return len(os.sched_getaffinity(0)) > 1 and len(os.listdir("/proc/self/task")) == 1


@contextlib.contextmanager
def computed(compute: Callable[[], _Result], *, fork: bool) -> Iterator[Callable[[], _Result]]:
    """Give a function that waits for the result of `compute`, which a process of its own works
    out meanwhile; without `fork`, or where none can be had, that function calls `compute`."""
    with contextlib.ExitStack() as stack:
        answer: BinaryIO | None = None
        if fork and may_fork():
            with contextlib.suppress(OSError):  # no process, or no pipe, to be had
                answer = stack.enter_context(_started(compute))
        yield lambda: _received(answer, compute)


@contextlib.contextmanager
def _started(compute: Callable[[], object]) -> Iterator[BinaryIO]:
    source, sink = os.pipe()
    with open(source, "rb") as answer:
        with open(sink, "wb") as out:
            child = fork_process()
            if not child:
                _serve(compute, out)
        try:
            yield answer
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _serve(compute: Callable[[], object], out: BinaryIO) -> None:
    """Write the result into the pipe, and end this process."""
    try:
        send(out, pickle.dumps(compute(), pickle.HIGHEST_PROTOCOL))
        out.flush()
        os._exit(0)
    except BaseException:  # the caller computes it, and meets the same error if there is one
        os._exit(1)


def _received(answer: BinaryIO | None, compute: Callable[[], _Result]) -> _Result:
    data = b"" if answer is None else receive(answer)
    if not data:
        return compute()
    found: _Result = pickle.loads(data)
    return found


def send(out: BinaryIO, data: bytes) -> None:
    """Write one message, which `receive` tells from a part of one."""
    out.write(_LENGTH.pack(len(data)))
    out.write(data)


def receive(pipe: BinaryIO) -> bytes:
    """The next message of a pipe, whole; b"" where its writer ended before it was."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    return data if len(data) == length else b""
