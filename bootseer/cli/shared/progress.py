"""How far a transfer is, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from bootseer.cli.shared.size_text import shown
from bootseer.stripedfs.progress import SILENT, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


TELL_EVERY_S = 30.0


class _Lines:
    """`Progress` as lines of a log, which a transfer that ends soon has none of.

    A thread tells them: a transfer that is slow, or hangs, would not do so itself.
    """

    def __init__(self, title: str) -> None:
        self._title = title if title.isprintable() else repr(title)
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> _Lines:
        with suppress(RuntimeError):  # no thread can be started: no reason to end the transfer
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # nobody waits for it: who reads its lines may have stopped to

    def expect(self, size_bytes: int) -> None:
        with self._lock:
            self._total += size_bytes

    def advance(self, size_bytes: int) -> None:
        with self._lock:
            self._done += size_bytes

    def _tell(self) -> None:
        while not self._ended.wait(TELL_EVERY_S):
            with self._lock:
                done, total = self._done, self._total
            far = f"{shown(done)} of {shown(total)}" if total else "nothing yet"
            after_s = time.monotonic() - self._began_s
            if not _takes_a_line():
                continue
            with suppress(OSError, ValueError):  # nobody reads it
                click.echo(f"bootseer: {self._title}: {far}, for {after_s:.0f} s", err=True)


def _takes_a_line() -> bool:
    """Whether standard error takes a line at once.

    A write to a pipe that nobody reads would wait, and the command's end with it.
    """
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # none, or no file
        return sys.stderr is not None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return poll.poll(0) == [(descriptor, select.POLLOUT)]


class _Bar:
    """`Progress` shown by rich, which takes calls from any thread."""

    def __init__(self, bars: Bars, task: TaskID) -> None:
        self._bars, self._task = bars, task
        self._total = 0

    def expect(self, size_bytes: int) -> None:
        self._total += size_bytes
        self._bars.update(self._task, total=self._total)

    def advance(self, size_bytes: int) -> None:
        self._bars.update(self._task, advance=size_bytes)


def has_bar() -> bool:
    """Whether `bar` shows one."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """Show how far the block inside is: by a bar on a terminal, else a line every half minute."""
    if not has_bar():
        if sys.stderr is None:
            yield SILENT
            return
        with _Lines(title) as lines:
            yield lines
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Bar(bars, bars.add_task(title, total=None))
