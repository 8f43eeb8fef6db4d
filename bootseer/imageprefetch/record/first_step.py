"""Watching a directory of event files for a start's first step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

FIRST_STEP = "first_step"
_ENDINGS = ("end", "point")
"""What counts, as in the report: a step that has only begun may yet import and read."""
_MARK = b'"first_step"'  # what no other line of an event file is likely to hold
_MOST_BYTES = 4 << 20  # read of one file at a time


class FirstStepWatch:
    """Looks for `first_step` in what is added to the event files of a directory.

    `read_bytes` is how much of each file is not to be searched: `begin` counts what is there
    already, which is of an earlier attempt. With `after_ns`, earlier steps do not count either.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        read_bytes: Mapping[str, int],
        after_ns: int = 0,
    ) -> None:
        self._directory, self._after_ns = directory, after_ns
        self._read_bytes = dict(read_bytes)

    @classmethod
    def begin(cls, directory: str | os.PathLike[str], after_ns: int = 0) -> FirstStepWatch:
        """Look for steps from now on; with `after_ns` for those since that moment."""
        return cls(directory, dict(_file_sizes(directory, unchanged_since_ns=after_ns)), after_ns)

    def was_reached(self) -> bool:
        """Whether the end of a first step was written since the last look."""
        return any(
            self._search(name, self._read_bytes.get(name, 0), size)
            for name, size in _file_sizes(self._directory)
        )

    def _search(self, name: str, start: int, size: int) -> bool:
        """Search the whole lines that were added to a file."""
        if size < start:
            start = self._read_bytes[name] = 0  # it was replaced
        if size == start:
            return False
        try:
            with open(os.path.join(self._directory, name), "rb", buffering=0) as file:
                file.seek(start)
                added = file.read(_MOST_BYTES)
        except OSError:
            return False
        lines, newline, rest = added.rpartition(b"\n")
        if not newline and len(rest) == _MOST_BYTES:
            lines, newline, rest = rest, b"", b""  # no event is so long
        self._read_bytes[name] = start + len(lines) + len(newline)
        return _MARK in lines and any(
            _is_first_step(line, self._after_ns) for line in lines.split(b"\n")
        )


def _file_sizes(
    directory: str | os.PathLike[str], unchanged_since_ns: int = 0
) -> list[tuple[str, int]]:
    """The files of a directory and their sizes; with a moment, only of those unchanged since."""
    try:
        with os.scandir(directory) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return []  # the first writer may make it later
    return [
        (name, status.st_size)
        for name, status in files
        if not unchanged_since_ns or status.st_mtime_ns < unchanged_since_ns
    ]


def _is_first_step(line: bytes, after_ns: int) -> bool:
    if _MARK not in line:
        return False
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(event, dict) or event.get("name") != FIRST_STEP:
        return False
    if event.get("event") not in _ENDINGS or event.get("status") == "error":
        return False
    at_ns = event.get("time_unix_nano")
    return not after_ns or (isinstance(at_ns, int) and at_ns >= after_ns)
