"""Processes that read event files, for the one process that joins what they read.

What a file holds follows from the file alone, except for what it shares with others (span ids, a
boot's clock). So forked processes take turns at reading files, and hand each one over as plain
values, in the order of the files. Only speed depends on them. The caller reads a file itself where
forking does not help or is not possible (one processor, little to read, or several threads, all but
one of which a fork would lose), and where a reader was killed before it handed the file over.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, BinaryIO

from bootseer.profiler.report.load.columns import Spans
from bootseer.profiler.report.load.forked_call import may_fork, receive_message, send_message
from bootseer.profiler.report.load.segments import Segment
from bootseer.profiler.report.load.spans import Identity
from bootseer.system.child_processes import fork

PackedFile = tuple[list[tuple[str, int]], list[Segment], list[Identity]]
"""A file's problems (kind and count), its segments, and the identity of each segment's writer."""

LEAST_BYTES = 16 << 20
"""Less than this is read sooner than processes are started for it."""

_MAX_PROCESSES = 8
_CHUNK_FILES = 32


@contextlib.contextmanager
def pack_files(
    files: Sequence[str], size: int, pack: Callable[[str], PackedFile | None]
) -> Iterator[Iterator[PackedFile | None]]:
    """Give `pack`'s result for each of `files` in turn, or None where the caller must read it.

    `size` is the total size of the files in bytes.
    """
    count = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
    chunks = [files[begin : begin + _CHUNK_FILES] for begin in range(0, len(files), _CHUNK_FILES)]
    if size < LEAST_BYTES or len(chunks) < 2 or not may_fork():
        yield repeat(None, len(files))
        return
    pipes: list[BinaryIO] = []
    children: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_kill_all, children)
        try:
            for number in range(count):
                source, sink = os.pipe()
                pipes.append(stack.enter_context(open(source, "rb")))
                with open(sink, "wb") as out:
                    child = fork()
                    if not child:
                        _send_files(chunks[number::count], out, pipes, pack)
                    children.append(child)
        except OSError:  # out of processes or descriptors
            yield repeat(None, len(files))
        else:
            yield _receive_files(chunks, pipes)


def _kill_all(children: Sequence[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _send_files(
    chunks: Sequence[Sequence[str]],
    out: BinaryIO,
    pipes: Sequence[BinaryIO],
    pack: Callable[[str], PackedFile | None],
) -> None:
    """Write what the chunks hold into the pipe, and end this process."""
    try:
        for pipe in pipes:  # a reader that keeps its own pipe open never sees its end
            os.close(pipe.fileno())
        for chunk in chunks:
            packed = [pack(path) for path in chunk]
            send_message(out, marshal.dumps([each and _to_plain(each) for each in packed]))
        out.flush()
        os._exit(0)
    except BaseException:  # the caller reads the rest, and meets the same error if there is one
        os._exit(1)


_NOTHING: dict[str, object] = {}


def _to_plain(packed: PackedFile) -> tuple[list[Any], ...]:
    """Values that `marshal` can write, without the resource lines: the identities say the same."""
    problems, segments, writers = packed
    rows = [
        tuple(segment._replace(resource=_NOTHING, spans=segment.spans.to_plain()))  # type: ignore[arg-type]
        for segment in segments
    ]
    return problems, rows, [tuple(writer) for writer in writers]


def _from_plain(plain: tuple[list[Any], ...]) -> PackedFile:
    problems, rows, writers = plain
    segments = []
    for row in rows:
        segment = Segment(*row)
        segments.append(segment._replace(spans=Spans.from_plain(segment.spans)))  # type: ignore[arg-type]
    return problems, segments, [Identity(*writer) for writer in writers]


def _receive_files(
    chunks: Sequence[Sequence[str]], pipes: Sequence[BinaryIO]
) -> Iterator[PackedFile | None]:
    """Give the processes' results in the order of the files; None for each that is missing."""
    for number, chunk in enumerate(chunks):
        data = receive_message(pipes[number % len(pipes)])
        if not data:
            yield from repeat(None, len(chunk))
            continue
        for plain in marshal.loads(data):
            yield None if plain is None else _from_plain(plain)
