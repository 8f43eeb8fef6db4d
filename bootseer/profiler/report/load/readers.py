"""Several processes that read event files, for one that joins what they found.

What a file holds can be told from the file alone, up to what it shares with others (span ids, a
boot's clock). So forked processes read files in turn, and hand each over as plain values, in the
order of the files. Only speed depends on them: where there is one processor, little to read, or
a thread besides (a fork would lose it), and for whatever a process did not hand over because it
was killed, the caller reads the file itself.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, BinaryIO

from bootseer.profiler.report.forked import may_fork, receive, send
from bootseer.profiler.report.load.columns import Spans
from bootseer.profiler.report.load.segments import Segment
from bootseer.profiler.report.load.spans import Identity
from bootseer.system.fork import fork

Packed = tuple[list[tuple[str, int]], list[Segment], list[Identity]]
"""What was noted of a file (kind of problem, how often), its segments, and who wrote each."""

LEAST_BYTES = 16 << 20
"""Less than this is read sooner than processes are made for it."""

_MOST_PROCESSES = 8
_CHUNK_FILES = 32


@contextlib.contextmanager
def packed_files(
    files: Sequence[str], size: int, pack: Callable[[str], Packed | None]
) -> Iterator[Iterator[Packed | None]]:
    """For each of `files` what `pack` gives, or None where the caller has to read it.

    `size` is what the files hold together, in bytes.
    """
    count = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    chunks = [files[place : place + _CHUNK_FILES] for place in range(0, len(files), _CHUNK_FILES)]
    if size < LEAST_BYTES or len(chunks) < 2 or not may_fork():
        yield repeat(None, len(files))
        return
    pipes: list[BinaryIO] = []
    children: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, children)
        try:
            for number in range(count):
                source, sink = os.pipe()
                pipes.append(stack.enter_context(open(source, "rb")))
                with open(sink, "wb") as out:
                    child = fork()
                    if not child:
                        _serve(chunks[number::count], out, pipes, pack)
                    children.append(child)
        except OSError:  # no process, or no pipe, to be had
            yield repeat(None, len(files))
        else:
            yield _received(chunks, pipes)


def _end(children: Sequence[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(
    chunks: Sequence[Sequence[str]],
    out: BinaryIO,
    pipes: Sequence[BinaryIO],
    pack: Callable[[str], Packed | None],
) -> None:
    """Write what the chunks hold into the pipe, and end this process."""
    try:
        for pipe in pipes:  # else the last reader's end would go unnoticed
            os.close(pipe.fileno())
        for chunk in chunks:
            found = [pack(path) for path in chunk]
            send(out, marshal.dumps([each and _plain(each) for each in found]))
        out.flush()
        os._exit(0)
    except BaseException:  # the caller reads the rest, and meets the same error if there is one
        os._exit(1)


_NOTHING: dict[str, object] = {}


def _plain(packed: Packed) -> tuple[list[Any], ...]:
    """The same without the resource lines, which tell no more than who wrote it."""
    noted, segments, writers = packed
    rows = [
        tuple(segment._replace(resource=_NOTHING, spans=segment.spans.to_plain()))  # type: ignore[arg-type]
        for segment in segments
    ]
    return noted, rows, [tuple(writer) for writer in writers]


def _packed(plain: tuple[list[Any], ...]) -> Packed:
    noted, rows, writers = plain
    segments = []
    for row in rows:
        segment = Segment(*row)
        segments.append(segment._replace(spans=Spans.from_plain(segment.spans)))  # type: ignore[arg-type]
    return noted, segments, [Identity(*writer) for writer in writers]


def _received(
    chunks: Sequence[Sequence[str]], pipes: Sequence[BinaryIO]
) -> Iterator[Packed | None]:
    """What the processes hand over, in order; None for all that one of them did not."""
    for number, chunk in enumerate(chunks):
        data = receive(pipes[number % len(pipes)])
        if not data:
            yield from repeat(None, len(chunk))
            continue
        for found in marshal.loads(data):
            yield None if found is None else _packed(found)
