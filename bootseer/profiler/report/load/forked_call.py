"""A function call in a forked process, while the caller does something else.

The result must be plain records that can be pickled. Only speed depends on the fork. The caller
makes the call itself where there is one processor, or a second thread (which a fork would lose),
and where the process was killed or failed before it handed the result over.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from bootseer.system.child_processes import fork as fork_process

_Result = TypeVar("_Result")

_LENGTH = struct.Struct("<Q")


def may_fork() -> bool:
    """Whether a second process of this program would be faster, and lose no thread."""
    return len(os.sched_getaffinity(0)) > 1 and len(os.listdir("/proc/self/task")) == 1


@contextlib.contextmanager
def call_forked(compute: Callable[[], _Result], *, fork: bool) -> Iterator[Callable[[], _Result]]:
    """Give a function that waits for the result of `compute`, which runs in a forked process.

    Without `fork`, or where no process can be started, that function calls `compute` itself.
    """
    with contextlib.ExitStack() as stack:
        answer: BinaryIO | None = None
        if fork and may_fork():
            with contextlib.suppress(OSError):  # out of processes or descriptors
                answer = stack.enter_context(_start_process(compute))
        yield lambda: _receive_result(answer, compute)


@contextlib.contextmanager
def _start_process(compute: Callable[[], object]) -> Iterator[BinaryIO]:
    source, sink = os.pipe()
    with open(source, "rb") as answer:
        with open(sink, "wb") as out:
            child = fork_process()
            if not child:
                _send_result(compute, out)
        try:
            yield answer
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _send_result(compute: Callable[[], object], out: BinaryIO) -> None:
    """Write the result into the pipe, and end this process."""
    try:
        send_message(out, pickle.dumps(compute(), pickle.HIGHEST_PROTOCOL))
        out.flush()
        os._exit(0)
    except BaseException:  # the caller calls it, and meets the same error if there is one
        os._exit(1)


def _receive_result(answer: BinaryIO | None, compute: Callable[[], _Result]) -> _Result:
    data = b"" if answer is None else receive_message(answer)
    if not data:
        return compute()
    result: _Result = pickle.loads(data)
    return result


def send_message(out: BinaryIO, data: bytes) -> None:
    """Write one message, with its length ahead, so that a truncated one is noticed."""
    out.write(_LENGTH.pack(len(data)))
    out.write(data)


def receive_message(pipe: BinaryIO) -> bytes:
    """Read the next message of a pipe; b"" where its writer ended before it was complete."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    return data if len(data) == length else b""
