"""Progress of a transfer on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from bootseer.cli.shared.size_text import format_size
from bootseer.stripedfs.progress import SILENT, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


REPORT_INTERVAL_S = 30.0


class _LogLines:
    """`Progress` as lines of a log; a transfer shorter than the interval prints none.

    A thread of its own prints them, so that a slow or hanging transfer is reported as well.
    """

    def __init__(self, title: str) -> None:
        self._title = title if title.isprintable() else repr(title)
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="progress", daemon=True)

    def __enter__(self) -> _LogLines:
        with suppress(RuntimeError):  # no thread can be started: no reason to end the transfer
            self._reporter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # without joining the thread: its write may block for ever

    def expect(self, size_bytes: int) -> None:
        with self._lock:
            self._total += size_bytes

    def advance(self, size_bytes: int) -> None:
        with self._lock:
            self._done += size_bytes

    def _report(self) -> None:
        while not self._ended.wait(REPORT_INTERVAL_S):
            with self._lock:
                done, total = self._done, self._total
            amount = f"{format_size(done)} of {format_size(total)}" if total else "nothing yet"
            elapsed_s = time.monotonic() - self._began_s
            if not _can_write_stderr():
                continue
            with suppress(OSError, ValueError):  # its reader was closed
                click.echo(f"bootseer: {self._title}: {amount}, for {elapsed_s:.0f} s", err=True)


def _can_write_stderr() -> bool:
    """Whether a line can be written to standard error without blocking.

    A write to a full pipe would block, and with it the end of the command.
    """
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # no stream, or not a file
        return sys.stderr is not None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return poll.poll(0) == [(descriptor, select.POLLOUT)]


class _Bar:
    """`Progress` as a bar of rich, which can be updated from any thread."""

    def __init__(self, bars: Bars, task: TaskID) -> None:
        self._bars, self._task = bars, task
        self._total = 0

    def expect(self, size_bytes: int) -> None:
        self._total += size_bytes
        self._bars.update(self._task, total=self._total)

    def advance(self, size_bytes: int) -> None:
        self._bars.update(self._task, advance=size_bytes)


def is_bar_shown() -> bool:
    """Whether `show_progress` draws a bar: standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def show_progress(title: str) -> Iterator[Progress]:
    """Show the progress of the block inside: a bar on a terminal, else a line each 30 seconds."""
    if not is_bar_shown():
        if sys.stderr is None:
            yield SILENT
            return
        with _LogLines(title) as lines:
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
