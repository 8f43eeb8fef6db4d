"""Lines, ranks, times and durations read from log bytes: pure and bounded.

Python 3.9, standard library only. Terms: a *line* ends at a line feed or a carriage return
(progress bars redraw themselves with the latter); a *lane* is the source within one stream that a
launcher's prefix names, such as `[rank3]:` or torchrun's `[default3]:`; a *stamp* is the time that
a container's log puts before a line, as opposed to the program's own timestamp within it.
"""

from __future__ import annotations

import calendar
import datetime
import re
import time
from typing import List, Optional, Tuple

LINE_MAX_BYTES = 8192
"""Of a longer line only this many bytes are matched; the rest is skipped, never kept."""

SECOND_NS = 1_000_000_000
_MAX_TIME_NS = 1 << 62

_DAY_CODES = ("%d", "%j", "%c", "%x")
_YEAR_CODES = ("%Y", "%y", "%c", "%x")
"""Codes of strptime formats that give a day, and those that give a year."""

_LINE_END = re.compile(rb"[\r\n]")
# ECMA-48 control sequences, operating-system commands (titles, links) and two-byte escapes.
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -Z\\^_])")
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")

# `[rank0]:` is a global rank, written by torch itself, with or without a space after it;
# `[default0]:` is torchrun's role name and local rank (--tee;
# torch/distributed/elastic/multiprocessing/tail_log.py; some scripts name the role `HOST:`);
# `[1,0]<stderr>:` is job and rank of mpirun --tag-output. The latter two add no space, so one that
# follows belongs to the line. `srun -l` writes a task's number, right-aligned; Ray and vLLM
# `(Name pid=1, ip=…) `; `kubectl logs --prefix` the pod and its container; `docker compose logs`
# the container, `NAME-1  | ` (before 2.0 `NAME_1  | `; with `container_name` any name, which only
# the time that `--timestamps` adds after it distinguishes from a line of a table); torchx (and
# NeMo-Run) a role's replica, `NAME/0 `, before others.
_PREFIX = re.compile(
    r"\[rank(?P<rank>\d{1,7})\]: ?"
    r"|\[(?P<role>[A-Za-z](?:[A-Za-z_.-]{0,30}|[\w-]{0,60}\d:)\d{1,7})\]:"
    r"|\[\d+,(?P<mpi>\d{1,7})\]<std\w+>:"
    r"| {0,6}(?P<task>\d{1,6}): "
    r"|\((?P<actor>[A-Za-z][\w.:-]{0,60}(?: [\w=]{1,20}){0,2} pid=\d{1,10}(?:, ip=[\w.:]+)?)\) "
    r"|\[(?P<pod>pod/[\w.-]{1,253}/[\w.-]{1,63})\] "
    r"|(?P<replica>[A-Za-z][\w.-]{0,62}/\d{1,5}) "
    r"(?=\[[A-Za-z][\w:-]{0,60}\d\]:|\([A-Za-z][\w.:-]{0,60} pid=)"
    r"|(?P<service>[a-z0-9][\w.-]{0,62}[-_]\d{1,4}) {1,40}\| "
    r"|(?P<container>[A-Za-z0-9][\w.-]{0,62}) {1,40}\| (?=\d{4}-\d\d-\d\dT\d\d:)"
)
_PREFIXES_MAX = 3
# The name of an actor, which may change during its life: vLLM's `Worker` becomes `Worker_TP0`.
_ACTOR_NAME = re.compile(r"(?:^|(?<= ))[A-Za-z][\w.:-]*(?: [\w=]+){0,2} (?=pid=\d)")

# `kubectl logs --timestamps` (RFC 3339 with nanoseconds), the container runtime's own files, and
# the variants of CI systems and loggers: brackets, a space for the T, a zone without colon.
_STAMP = re.compile(
    r"\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d))\]? "
    r"(?:std(?:out|err) [FP] )?"
)

_UNITS_PER_SECOND = {"unix": 1.0, "unix_ms": 1e3, "unix_us": 1e6, "unix_ns": 1e9}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(h|ms|m|µs|us|ns|s)")
_DURATION_NS = {"h": 3600e9, "m": 60e9, "s": 1e9, "ms": 1e6, "us": 1e3, "µs": 1e3, "ns": 1.0}


class LineSplitter:
    """Splits a byte stream into lines, holding at most `limit_bytes` of an unfinished one.

    The result does not depend on how the stream was divided into chunks. Empty lines are left out.
    A line longer than the limit is truncated and returned as soon as the limit is exceeded.
    """

    def __init__(self, limit_bytes: int = LINE_MAX_BYTES) -> None:
        self._limit = limit_bytes
        self._partial = b""
        self._skipping = False

    def feed(self, data: bytes) -> List[bytes]:
        """Return the lines that `data` completes, without their ends."""
        lines: List[bytes] = []
        start = 0
        for line_end in _LINE_END.finditer(data):
            self._extend_line(data[start : line_end.start()], lines)
            if self._partial:
                lines.append(self._partial)
            self._partial, self._skipping = b"", False
            start = line_end.end()
        self._extend_line(data[start:], lines)
        return lines

    def flush(self) -> List[bytes]:
        """Return the unfinished line, if any, and forget it (end of the stream)."""
        last = [self._partial] if self._partial else []
        self._partial, self._skipping = b"", False
        return last

    def mark_gap(self) -> None:
        """Drop the unfinished line and its rest up to the next line end, as bytes were lost."""
        self._partial, self._skipping = b"", True

    def _extend_line(self, piece: bytes, lines: List[bytes]) -> None:
        if self._skipping or not piece:
            return
        self._partial += piece[: self._limit + 1 - len(self._partial)]
        if len(self._partial) > self._limit:
            lines.append(self._partial[: self._limit])
            self._partial, self._skipping = b"", True


def clean(raw: bytes) -> str:
    """Return a line's text: terminal escapes and control bytes removed, bad UTF-8 replaced."""
    if b"\x1b" in raw:
        raw = _ANSI.sub(b"", raw)
    return _CONTROL.sub(b"", raw).decode("utf-8", "replace")


def split_line(text: str, *, stamped: bool = True) -> Tuple[str, Optional[int], str]:
    """Split the launchers' prefixes and the stamp off: (lane, stamp in Unix ns, rest).

    The stamp is None where there is none, or where `stamped` is false: then it stays in the rest.
    """
    lanes: List[str] = []
    stamp_ns: Optional[int] = None
    for _ in range(_PREFIXES_MAX):
        stamp = _STAMP.match(text) if stamped and stamp_ns is None else None
        if stamp is not None:
            stamp_ns = parse_time_ns(stamp.group(1), "iso", 0, 0)
            text = text[stamp.end() :]
        prefix = _PREFIX.match(text)
        if prefix is None:
            break
        text = text[prefix.end() :]
        rank = prefix.group("rank") or prefix.group("mpi") or prefix.group("task")
        groups = ("role", "actor", "pod", "replica", "service", "container")
        name = next(filter(None, prefix.group(*groups)), "")
        if prefix.group("service", "container") != (None, None):
            name += "/"  # a container's number is no rank
        lanes.append(f"rank{int(rank)}" if rank else name)
    return " ".join(lanes), stamp_ns, text


def lane_process(lane: str) -> str:
    """Return the part of a lane that stays while its process runs: all but an actor's name."""
    return _ACTOR_NAME.sub("", lane) if "pid=" in lane else lane


def lane_rank(lane: str) -> Tuple[Optional[int], Optional[int]]:
    """Return the (global rank, local rank) that a lane names; None for each that it does not."""
    lane = lane.rpartition(" ")[2]
    digits = lane[len(lane.rstrip("0123456789")) :]
    if not digits or "/" in lane or "=" in lane:
        return None, None
    number = int(digits)
    return (number, None) if lane == f"rank{number}" else (None, number)


def parse_duration_ns(text: str) -> Optional[int]:
    """Return the nanoseconds of `123ms`, `1.2s`, `1m 02s`, `4.5µs`; None without a duration."""
    parts = _DURATION.findall(text)
    if not parts:
        return None
    try:
        return round(sum(float(number) * _DURATION_NS[unit] for number, unit in parts))
    except OverflowError:  # hundreds of digits
        return None


def parse_time_ns(
    text: str,
    time_format: str,
    utc_offset_s: Optional[int],
    near_ns: int,
    latest_ns: Optional[int] = None,
) -> Optional[int]:
    """Return the Unix nanoseconds of a log's timestamp.

    None if `text` does not fit the format or lies outside the years 1970 to 2115.

    `time_format` is `iso`, `unix`, `unix_ms`, `unix_us`, `unix_ns` or a strptime format;
    `utc_offset_s` applies to times that carry no zone (None = this machine's zone). For a format
    without year, or without date, the missing part is chosen so that the time lies nearest
    `near_ns`; a year that puts it after `latest_ns` is chosen only where no other is possible.
    """
    try:
        time_ns = _parse_any_time_ns(text, time_format, utc_offset_s, near_ns, latest_ns)
    except (ValueError, OverflowError, OSError):
        return None
    return time_ns if time_ns is not None and 0 <= time_ns < _MAX_TIME_NS else None


def _parse_any_time_ns(
    text: str,
    time_format: str,
    utc_offset_s: Optional[int],
    near_ns: int,
    latest_ns: Optional[int],
) -> Optional[int]:
    if time_format in _UNITS_PER_SECOND:
        return _parse_unix_ns(text, _UNITS_PER_SECOND[time_format])
    if time_format == "iso":
        return _convert_datetime_ns(_parse_iso(text), utc_offset_s)
    if not any(code in time_format for code in _DAY_CODES):
        return _parse_without_day_ns(text, time_format, utc_offset_s, near_ns)
    if not any(code in time_format for code in _YEAR_CODES):
        return _parse_without_year_ns(text, time_format, utc_offset_s, near_ns, latest_ns)
    return _convert_datetime_ns(datetime.datetime.strptime(text, time_format), utc_offset_s)


def _parse_unix_ns(text: str, units_per_second: float) -> int:
    whole, _, fraction = text.strip().partition(".")
    unit_ns = int(1e9 / units_per_second)
    return int(whole) * unit_ns + int(float("0." + (fraction or "0")) * unit_ns)


def _parse_iso(text: str) -> datetime.datetime:
    """Parse ISO 8601 as logs write it; Python 3.9 reads neither `Z`, nor `,`, nor 9 digits."""
    text = text.strip().replace(",", ".")
    text = text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text
    if text[-5:-4] in ("+", "-") and text[-4:].isdigit() and ":" in text:
        text = f"{text[:-2]}:{text[-2:]}"
    fraction = re.search(r"\.(\d+)", text)
    if fraction:
        digits = fraction.group(1)[:6].ljust(6, "0")
        text = f"{text[: fraction.start()]}.{digits}{text[fraction.end() :]}"
    return datetime.datetime.fromisoformat(text)


def _convert_datetime_ns(moment: datetime.datetime, utc_offset_s: Optional[int]) -> int:
    if moment.tzinfo is not None:
        moment = moment.astimezone(datetime.timezone.utc)
        seconds = calendar.timegm(moment.timetuple())
    elif utc_offset_s is not None:
        seconds = calendar.timegm(moment.timetuple()) - utc_offset_s
    else:
        seconds = int(time.mktime(moment.timetuple()))
    return seconds * SECOND_NS + moment.microsecond * 1000


def _parse_without_year_ns(
    text: str,
    time_format: str,
    utc_offset_s: Optional[int],
    near_ns: int,
    latest_ns: Optional[int],
) -> Optional[int]:
    near_year = time.gmtime(near_ns // SECOND_NS).tm_year
    candidates_ns = []
    for year in (near_year - 1, near_year, near_year + 1):
        try:
            moment = datetime.datetime.strptime(f"{year} {text}", f"%Y {time_format}")
        except ValueError:  # 29 February exists in one of the three at most
            continue
        candidates_ns.append(_convert_datetime_ns(moment, utc_offset_s))
    if latest_ns is not None:
        candidates_ns = [ns for ns in candidates_ns if ns <= latest_ns] or candidates_ns
    return min(candidates_ns, key=lambda ns: abs(ns - near_ns)) if candidates_ns else None


def _parse_without_day_ns(
    text: str, time_format: str, utc_offset_s: Optional[int], near_ns: int
) -> int:
    clock = datetime.datetime.strptime(text, time_format)
    today = datetime.datetime.fromtimestamp(near_ns // SECOND_NS)
    days = [today.date() + datetime.timedelta(days=shift) for shift in (-1, 0, 1)]
    candidates_ns = [
        _convert_datetime_ns(datetime.datetime.combine(day, clock.timetz()), utc_offset_s)
        for day in days
    ]
    return min(candidates_ns, key=lambda ns: abs(ns - near_ns))
