"""How the tasks of a fork server ended, in memory that processes forked from it can read."""

from __future__ import annotations

import mmap
from typing import Literal

Ending = Literal["done", "failed", "refused", "killed"]
ENDINGS: tuple[Ending, ...] = ("done", "failed", "refused", "killed")
DONE, FAILED, REFUSED = 0, 1, 2
"""Exit codes of a task's process; any other, and a signal, count as `killed`."""


class TaskCounts:
    """One process counts, any other reads."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def count(self, exit_code: int) -> None:
        """Count a task whose process ended so (negative: by a signal)."""
        is_told = DONE <= exit_code <= REFUSED
        self._numbers[exit_code if is_told else ENDINGS.index("killed")] += 1

    def read(self) -> dict[Ending, int]:
        """The counts so far."""
        return {ending: self._numbers[number] for number, ending in enumerate(ENDINGS)}
