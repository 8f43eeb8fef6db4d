"""pip's log file and uv's output, taken apart into resolve, download, build and install.

Python 3.9, standard library only. pip writes a log file with a local timestamp on each line when
asked by `--log` or PIP_LOG (pip/_internal/utils/logging.py; format of the stamps as of pip 8 to
26). The lines read here come from operations/prepare.py, operations/build/*, wheel_builder.py,
commands/install.py and cli/spinners.py.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Pattern, Tuple

from bootseer.profiler.collect.log_rules import lines as loglines

PREFIX = "deps.install."
LOG_MAX_BYTES = 256 << 20
"""What of a log file is read at most."""

SubPhase = Tuple[str, int, int, Dict[str, Any]]
"""(name, begin and end as Unix nanoseconds, attributes)"""

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[,.]\d{1,6}) ?(.*)")
_TASK = re.compile(r"\s*(\S.*?)(?: \([^()]*\))?: (started|finished with status '(\w+)')$")
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)(?: \((\d{1,9}(?:\.\d{1,9})?) ?(bytes|[kMGT]?B)\))?$")
_BUILD = re.compile(r"Building wheels? for collected packages: (.*)")
_INSTALL = re.compile(r"Installing collected packages: (.*)")
_PROGRESS = re.compile(r"\s*(?:━|\||\d+%|-{3})")
_DONE = re.compile(r"(?:Successfully (?:built|installed)|Failed to build) ")
_ERROR = re.compile(r"ERROR: (.*)")
# Decimal units: pip/_internal/utils/misc.py, format_size.
_UNITS = {"bytes": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UV_LINE = re.compile(
    r"(Resolved|Prepared|Downloaded|Uninstalled|Installed|Audited|Checked) "
    r"(\d+) packages? in ([\dhmsnuµ. ]+)"
)
_UV_PHASES = {
    "Resolved": "resolve",
    "Prepared": "download",
    "Downloaded": "download",
    "Uninstalled": "install",
    "Installed": "install",
    "Audited": "resolve",
    "Checked": "resolve",
}


class _Step(NamedTuple):
    """What a line of pip's log makes the current phase; None: no change."""

    phase: Optional[str]
    attributes: Dict[str, Any]


class _Reader:
    """pip's state, line by line. Output of pip's own child processes counts as building."""

    def __init__(self) -> None:
        self._task = ""
        self._task_depth = 0
        self._within = "resolve"

    def step(self, text: str, current: str) -> _Step:
        task = _TASK.match(text)
        if task:
            return self._task_step(task.group(1), task.group(2) == "started", task.group(3))
        if self._task_depth:
            return _Step(None, {})
        download = _DOWNLOAD.match(text)
        if download:
            return self._download(*download.groups())
        for pattern, phase in ((_BUILD, "build"), (_INSTALL, "install")):
            found = pattern.match(text)
            if found:
                self._within = phase
                return _Step(phase, {"log.packages": len(found.group(1).split(", "))})
        error = _ERROR.match(text)
        if error:
            return _Step(current, {"error.type": "pip", "log.message": error.group(1)[:200]})
        if _DONE.match(text):
            installed = text.startswith("Successfully installed")
            return _Step("" if installed else "resolve", {})
        if current == "download" and not _PROGRESS.match(text):
            return _Step(self._within, {})
        return _Step(None, {})

    def _download(self, name: str, size: Optional[str], unit: Optional[str]) -> _Step:
        if name.endswith(".metadata"):
            return _Step("resolve", {})
        attributes: Dict[str, Any] = {"log.files": 1}
        if size and unit:
            attributes["bootseer.bytes"] = round(float(size) * _UNITS[unit])
        return _Step("download", attributes)

    def _task_step(self, name: str, started: bool, status: Optional[str]) -> _Step:
        if self._task_depth:
            # pip in a build environment writes the same messages, its parent repeats them.
            if name == self._task:
                self._task_depth += 1 if started else -1
            if self._task_depth:
                return _Step(None, {})
            failed = {} if status == "done" else {"error.type": f"build {status}"}
            return _Step(self._within, failed)
        if started:
            self._task, self._task_depth = name, 1
            return _Step("build", {})
        return _Step(None, {})


def sub_phases(path: str) -> List[SubPhase]:
    """Sub-phases of one pip run from its log file; a torn or foreign file gives what it can.

    Times follow each other without overlap: downloads in the midst of resolving split it. Sizes
    in `bootseer.bytes` are as rounded as pip writes them. Raises OSError for an unreadable file.
    """
    with open(path, "rb") as stream:
        data = stream.read(LOG_MAX_BYTES)
    return parse_log(data.decode("utf-8", "replace").splitlines())


def parse_log(lines: Iterable[str]) -> List[SubPhase]:
    """As `sub_phases`, from the file's lines."""
    reader = _Reader()
    out: List[SubPhase] = []
    current, begin, attributes = "resolve", "", {}  # type: str, str, Dict[str, Any]
    last = ""
    for stamp, text in _stamped(lines):
        begin = begin or stamp
        step = reader.step(text, current)
        if step.phase is None or (step.phase == current and current != "download"):
            _merge(attributes, step.attributes)
        else:
            following = dict(step.attributes)
            if "error.type" in following:  # a failed task: said of what ends here
                _merge(attributes, following)
                following = {}
            _close(out, current, begin, stamp, attributes)
            current, begin, attributes = step.phase, stamp, following
        last = stamp
    _close(out, current, begin, last, attributes)
    return out


def _stamped(lines: Iterable[str]) -> Iterator[Tuple[str, str]]:
    for line in lines:
        found = _STAMP.match(line)
        if found:
            yield found.group(1), found.group(2)


def _merge(into: Dict[str, Any], more: Dict[str, Any]) -> None:
    for key, value in more.items():
        into[key] = into[key] + value if isinstance(value, int) and key in into else value


def _close(
    out: List[SubPhase], phase: str, begin: str, end: str, attributes: Dict[str, Any]
) -> None:
    """Append a span, or lengthen the last one where it goes on in the same phase."""
    times = [loglines.parse_time_ns(text, "iso", None, 0) for text in (begin, end)]
    begin_ns, end_ns = times
    if not phase or begin_ns is None or end_ns is None or (end_ns <= begin_ns and not attributes):
        return
    end_ns = max(begin_ns, end_ns)  # the clock was set back meanwhile
    name = PREFIX + phase
    if out and out[-1][0] == name and out[-1][2] == begin_ns:
        former = out.pop()
        _merge(former[3], attributes)
        out.append((name, former[1], end_ns, former[3]))
    else:
        out.append((name, begin_ns, end_ns, {"bootseer.source": "pip", **attributes}))


def uv_sub_phases(text: str, end_ns: int) -> List[SubPhase]:
    """Sub-phases from uv's output (also `-v`), which states durations but no times.

    uv's stages follow each other, so they are laid end to end before `end_ns`, the end of the
    command. Preparing is downloading and building in one; it is given as download.
    """
    found: List[Tuple[str, int, int]] = []
    pattern: Pattern[str] = _UV_LINE
    for line in text.splitlines():
        match = pattern.match(loglines.clean(line.encode("utf-8", "replace")).strip())
        duration_ns = loglines.parse_duration_ns(match.group(3)) if match else None
        if match and duration_ns is not None:
            found.append((_UV_PHASES[match.group(1)], int(match.group(2)), duration_ns))
    out: List[SubPhase] = []
    for phase, packages, duration_ns in reversed(found):
        attributes = {"bootseer.source": "uv", "log.packages": packages}
        out.append((PREFIX + phase, end_ns - duration_ns, end_ns, attributes))
        end_ns -= duration_ns
    return out[::-1]
