"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bootseer.stripedfs.settings import SILENT, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


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


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """Show how far the block inside is; nothing is shown where nobody looks."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield SILENT
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
