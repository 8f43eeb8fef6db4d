"""Resolve, download, build and install phases from pip's log file.

Python 3.9, standard library only. pip writes a log file with a local timestamp on each line when
`--log` or PIP_LOG asks for it (pip/_internal/utils/logging.py; format of the timestamps as of pip 8
to 26). The lines read here come from operations/prepare.py, operations/build/*, wheel_builder.py,
commands/install.py and cli/spinners.py.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from bootseer.profiler.collect.log_rules import lines as log_lines

PREFIX = "deps.install."
LOG_MAX_BYTES = 256 << 20
"""At most this many bytes of a log file are read."""

SubPhase = Tuple[str, int, int, Dict[str, Any]]
"""(name, begin and end as Unix nanoseconds, attributes)"""

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[,.]\d{1,6}) ?(.*)")
_TASK = re.compile(r"\s*(\S.*?)(?: \([^()]*\))?: (started|finished with status '(\w+)')$")
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)(?: \((\d{1,9}(?:\.\d{1,9})?) ?(bytes|[kMGT]?B)\))?$")
_BUILD = re.compile(r"Building wheels? for collected packages: (.*)")
_INSTALL = re.compile(r"Installing collected packages: (.*)")
_PROGRESS = re.compile(r"\s*(?:━|\||\d+%|-{3})")
_DONE = re.compile(r"(?:Successfully (?:built|installed)|Failed to build) ")
_ERROR = re.compile(r"ERROR: (.*)")
# Decimal units: pip/_internal/utils/misc.py, format_size.
_UNITS = {"bytes": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class _Change(NamedTuple):
    """The phase that begins with a line of pip's log, "" for none; None = no change."""

    phase: Optional[str]
    attributes: Dict[str, Any]


class _LogReader:
    """pip's state, line by line. Output of pip's own child processes counts as building."""

    def __init__(self) -> None:
        self._task = ""
        self._task_depth = 0
        self._enclosing_phase = "resolve"

    def read_line(self, text: str, current: str) -> _Change:
        """Return the change that a line makes while `current` is the phase."""
        task = _TASK.match(text)
        if task:
            return self._read_task(task.group(1), task.group(2) == "started", task.group(3))
        if self._task_depth:
            return _Change(None, {})
        download = _DOWNLOAD.match(text)
        if download:
            return self._read_download(*download.groups())
        for pattern, phase in ((_BUILD, "build"), (_INSTALL, "install")):
            packages = pattern.match(text)
            if packages:
                self._enclosing_phase = phase
                return _Change(phase, {"log.packages": len(packages.group(1).split(", "))})
        error = _ERROR.match(text)
        if error:
            return _Change(current, {"error.type": "pip", "log.message": error.group(1)[:200]})
        if _DONE.match(text):
            installed = text.startswith("Successfully installed")
            return _Change("" if installed else "resolve", {})
        if current == "download" and not _PROGRESS.match(text):
            return _Change(self._enclosing_phase, {})
        return _Change(None, {})

    def _read_download(self, name: str, size: Optional[str], unit: Optional[str]) -> _Change:
        if name.endswith(".metadata"):
            return _Change("resolve", {})
        attributes: Dict[str, Any] = {"log.files": 1}
        if size and unit:
            attributes["bootseer.bytes"] = round(float(size) * _UNITS[unit])
        return _Change("download", attributes)

    def _read_task(self, name: str, started: bool, status: Optional[str]) -> _Change:
        if self._task_depth:
            # pip in a build environment writes the same messages, and its parent repeats them.
            if name == self._task:
                self._task_depth += 1 if started else -1
            if self._task_depth:
                return _Change(None, {})
            error = {} if status == "done" else {"error.type": f"build {status}"}
            return _Change(self._enclosing_phase, error)
        if started:
            self._task, self._task_depth = name, 1
            return _Change("build", {})
        return _Change(None, {})


def sub_phases(path: str) -> List[SubPhase]:
    """Return the sub-phases of one pip run from its log file.

    A truncated or foreign file gives those that can be read. Sub-phases do not overlap: a download
    during resolving splits it. Sizes in `bootseer.bytes` are as rounded as pip writes them. Raises
    OSError for an unreadable file.
    """
    with open(path, "rb") as stream:
        data = stream.read(LOG_MAX_BYTES)
    return parse_log(data.decode("utf-8", "replace").splitlines())


def parse_log(lines: Iterable[str]) -> List[SubPhase]:
    """Return the sub-phases of one pip run from the lines of its log, as `sub_phases` does."""
    reader = _LogReader()
    phases: List[SubPhase] = []
    current, begin, last = "resolve", "", ""
    attributes: Dict[str, Any] = {}
    for timestamp, text in _split_timestamps(lines):
        begin = begin or timestamp
        change = reader.read_line(text, current)
        if change.phase is None or (change.phase == current and current != "download"):
            _merge_attributes(attributes, change.attributes)
        else:
            next_attributes = dict(change.attributes)
            if "error.type" in next_attributes:  # of a failed task: belongs to the phase that ends
                _merge_attributes(attributes, next_attributes)
                next_attributes = {}
            _add_phase(phases, current, begin, timestamp, attributes)
            current, begin, attributes = change.phase, timestamp, next_attributes
        last = timestamp
    _add_phase(phases, current, begin, last, attributes)
    return phases


def _split_timestamps(lines: Iterable[str]) -> Iterator[Tuple[str, str]]:
    """Yield (timestamp, text) of each line that has a timestamp."""
    for line in lines:
        match = _TIMESTAMP.match(line)
        if match:
            yield match.group(1), match.group(2)


def _merge_attributes(attributes: Dict[str, Any], more: Dict[str, Any]) -> None:
    """Add `more` to `attributes`: numbers are summed, other values replaced."""
    for name, value in more.items():
        is_sum = isinstance(value, int) and name in attributes
        attributes[name] = attributes[name] + value if is_sum else value


def _add_phase(
    phases: List[SubPhase], phase: str, begin: str, end: str, attributes: Dict[str, Any]
) -> None:
    """Append a sub-phase, or extend the last one where it continues the same phase."""
    begin_ns, end_ns = (log_lines.parse_time_ns(text, "iso", None, 0) for text in (begin, end))
    if not phase or begin_ns is None or end_ns is None or (end_ns <= begin_ns and not attributes):
        return
    end_ns = max(begin_ns, end_ns)  # the clock may have been set back
    name = PREFIX + phase
    if phases and phases[-1][0] == name and phases[-1][2] == begin_ns:
        _, former_begin_ns, _, former_attributes = phases.pop()
        _merge_attributes(former_attributes, attributes)
        phases.append((name, former_begin_ns, end_ns, former_attributes))
    else:
        phases.append((name, begin_ns, end_ns, {"bootseer.source": "pip", **attributes}))
