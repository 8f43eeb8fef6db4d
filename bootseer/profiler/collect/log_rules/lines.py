"""From log bytes to clean lines, ranks and times: pure, bounded, on Python 3.9 and newer.

Terms: a *line* ends at a line feed or a carriage return (progress bars redraw themselves with the
latter); a *lane* is the source within one stream that a launcher's prefix names, such as
`[rank3]:` or torchrun's `[default3]:`.
"""

from __future__ import annotations

import calendar
import datetime
import re
import time
from typing import List, Optional, Tuple

LINE_MAX_BYTES = 8192
"""Longer lines are matched by their first so many bytes; the rest is skipped, never kept."""

SECOND_NS = 1_000_000_000
_MAX_TIME_NS = 1 << 62

_DAY_CODES = ("%d", "%j", "%c", "%x")
_YEAR_CODES = ("%Y", "%y", "%c", "%x")
"""Of strptime formats: those that give a day, and those that give a year."""

_ENDS = re.compile(rb"[\r\n]")
# ECMA-48 control sequences, operating-system commands (titles, links) and two-byte escapes.
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -Z\\^_])")
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")

# `[rank0]:` is a global rank, written by torch itself, with or without a blank; `[default0]:` is
# torchrun's role name and local rank (--tee;
# torch/distributed/elastic/multiprocessing/tail_log.py; some scripts name the role `HOST:`) and
# `[1,0]<stderr>:` mpirun --tag-output's job and rank: these two put no blank, so one that follows
# is the line's own. `srun -l` writes a task's number, right-aligned; Ray and vLLM `(Name pid=1,
# ip=…) `; `kubectl logs --prefix` the pod and its container; `docker compose logs` the container,
# `NAME-1  | ` (before 2.0 `NAME_1  | `, with `container_name` any name, which only the time that
# `--timestamps` puts after it tells from a line of a table); torchx (and NeMo-Run) a role's
# replica, `NAME/0 `, before others.
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
# The name of an actor, which a process may change: vLLM's `Worker` becomes `Worker_TP0`.
_ACTOR_NAME = re.compile(r"(?:^|(?<= ))[A-Za-z][\w.:-]*(?: [\w=]+){0,2} (?=pid=\d)")

# `kubectl logs --timestamps` (RFC 3339 with nanoseconds), the container runtime's own files, and
# what CI systems and loggers write in its place: brackets, a blank for the T, a zone without colon.
_STAMP = re.compile(
    r"\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d))\]? "
    r"(?:std(?:out|err) [FP] )?"
)

_UNIX_UNITS = {"unix": 1.0, "unix_ms": 1e3, "unix_us": 1e6, "unix_ns": 1e9}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(h|ms|m|µs|us|ns|s)")
_DURATION_NS = {"h": 3600e9, "m": 60e9, "s": 1e9, "ms": 1e6, "us": 1e3, "µs": 1e3, "ns": 1.0}


class LineSplitter:
    """Cuts a byte stream into lines, holding at most `limit_bytes` of an unfinished one.

    The result does not depend on how the stream was cut into chunks. Empty lines are left out.
    A line longer than the limit is given out, cut, as soon as the limit is passed.
    """

    def __init__(self, limit_bytes: int = LINE_MAX_BYTES) -> None:
        self._limit = limit_bytes
        self._partial = b""
        self._skipping = False

    def feed(self, data: bytes) -> List[bytes]:
        """Return the lines that `data` completes, without their ends."""
        lines: List[bytes] = []
        start = 0
        for found in _ENDS.finditer(data):
            self._add(data[start : found.start()], lines)
            if self._partial:
                lines.append(self._partial)
            self._partial, self._skipping = b"", False
            start = found.end()
        self._add(data[start:], lines)
        return lines

    def flush(self) -> List[bytes]:
        """Return the unfinished line, if any, and forget it (end of the stream)."""
        last = [self._partial] if self._partial else []
        self._partial, self._skipping = b"", False
        return last

    def gap(self) -> None:
        """Bytes were lost here: what follows up to the next line end belongs to no known line."""
        self._partial, self._skipping = b"", True

    def _add(self, piece: bytes, lines: List[bytes]) -> None:
        if self._skipping or not piece:
            return
        self._partial += piece[: self._limit + 1 - len(self._partial)]
        if len(self._partial) > self._limit:
            lines.append(self._partial[: self._limit])
            self._partial, self._skipping = b"", True


def clean(raw: bytes) -> str:
    """Text of a line: terminal escapes and control bytes removed, bad UTF-8 replaced."""
    if b"\x1b" in raw:
        raw = _ANSI.sub(b"", raw)
    return _CONTROL.sub(b"", raw).decode("utf-8", "replace")


def split_prefix(text: str) -> Tuple[str, str]:
    """Split the launchers' prefixes off: (lane, rest). The lane is "" without one.

    A lane reads `rank3` for a global rank, role and local rank, such as `default3`, or the actor
    or container; of nested prefixes, all with blanks between.
    """
    lane, _, rest = split_line(text, stamped=False)
    return lane, rest


def split_line(text: str, *, stamped: bool = True) -> Tuple[str, Optional[int], str]:
    """Split prefixes and the time that a container's log adds off: (lane, Unix ns, rest).

    The time is None where there is none, or where `stamped` is false: then it stays in the rest.
    """
    lanes: List[str] = []
    stamp_ns: Optional[int] = None
    for _ in range(_PREFIXES_MAX):
        stamp = _STAMP.match(text) if stamped and stamp_ns is None else None
        if stamp is not None:
            stamp_ns = parse_time_ns(stamp.group(1), "iso", 0, 0)
            text = text[stamp.end() :]
        found = _PREFIX.match(text)
        if found is None:
            break
        text = text[found.end() :]
        rank = found.group("rank") or found.group("mpi") or found.group("task")
        groups = ("role", "actor", "pod", "replica", "service", "container")
        named = next(filter(None, found.group(*groups)), "")
        if found.group("service", "container") != (None, None):
            named += "/"  # a container's number is no rank
        lanes.append(f"rank{int(rank)}" if rank else named)
    return " ".join(lanes), stamp_ns, text


def lane_process(lane: str) -> str:
    """What of a lane stays the same while its process runs: all but an actor's name."""
    return _ACTOR_NAME.sub("", lane) if "pid=" in lane else lane


def lane_rank(lane: str) -> Tuple[Optional[int], Optional[int]]:
    """(global rank, local rank) that a lane names; None where it does not say."""
    lane = lane.rpartition(" ")[2]
    digits = lane[len(lane.rstrip("0123456789")) :]
    if not digits or "/" in lane or "=" in lane:
        return None, None
    number = int(digits)
    return (number, None) if lane == f"rank{number}" else (None, number)


def parse_duration_ns(text: str) -> Optional[int]:
    """Nanoseconds of `123ms`, `1.2s`, `1m 02s`, `4.5µs`; None if nothing in it is a duration."""
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
    """Unix nanoseconds of a log's own timestamp, or None if `text` does not fit or lies outside
    of the years 1970 to 2115.

    `time_format` is `iso`, `unix`, `unix_ms`, `unix_us`, `unix_ns` or a strptime format;
    `utc_offset_s` applies to times that carry no zone (None = this machine's zone). A format
    without year, or without date, takes what is missing so that the time lies nearest `near_ns`;
    a year for which it would lie after `latest_ns` is taken only where no other is possible.
    """
    try:
        found_ns = _moment_ns(text, time_format, utc_offset_s, near_ns, latest_ns)
    except (ValueError, OverflowError, OSError):
        return None
    return found_ns if found_ns is not None and 0 <= found_ns < _MAX_TIME_NS else None


def _moment_ns(
    text: str,
    time_format: str,
    utc_offset_s: Optional[int],
    near_ns: int,
    latest_ns: Optional[int],
) -> Optional[int]:
    if time_format in _UNIX_UNITS:
        return _unix_ns(text, _UNIX_UNITS[time_format])
    if time_format == "iso":
        return _datetime_ns(_iso(text), utc_offset_s)
    if not any(code in time_format for code in _DAY_CODES):
        return _nearest_day(text, time_format, utc_offset_s, near_ns)
    if not any(code in time_format for code in _YEAR_CODES):
        return _nearest_year(text, time_format, utc_offset_s, near_ns, latest_ns)
    return _datetime_ns(datetime.datetime.strptime(text, time_format), utc_offset_s)


def _unix_ns(text: str, per_second: float) -> int:
    whole, _, fraction = text.strip().partition(".")
    scale = int(1e9 / per_second)
    return int(whole) * scale + int(float("0." + (fraction or "0")) * scale)


def _iso(text: str) -> datetime.datetime:
    """ISO 8601 as logs write it; Python 3.9 reads neither `Z`, nor `,`, nor 9 digits."""
    text = text.strip().replace(",", ".")
    text = text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text
    if text[-5:-4] in ("+", "-") and text[-4:].isdigit() and ":" in text:
        text = f"{text[:-2]}:{text[-2:]}"
    fraction = re.search(r"\.(\d+)", text)
    if fraction:
        digits = fraction.group(1)[:6].ljust(6, "0")
        text = f"{text[: fraction.start()]}.{digits}{text[fraction.end() :]}"
    return datetime.datetime.fromisoformat(text)


def _datetime_ns(moment: datetime.datetime, utc_offset_s: Optional[int]) -> int:
    if moment.tzinfo is not None:
        moment = moment.astimezone(datetime.timezone.utc)
        seconds = calendar.timegm(moment.timetuple())
    elif utc_offset_s is not None:
        seconds = calendar.timegm(moment.timetuple()) - utc_offset_s
    else:
        seconds = int(time.mktime(moment.timetuple()))
    return seconds * SECOND_NS + moment.microsecond * 1000


def _nearest_year(
    text: str,
    time_format: str,
    utc_offset_s: Optional[int],
    near_ns: int,
    latest_ns: Optional[int],
) -> Optional[int]:
    year = time.gmtime(near_ns // SECOND_NS).tm_year
    found = []
    for candidate in (year - 1, year, year + 1):
        try:
            moment = datetime.datetime.strptime(f"{candidate} {text}", f"%Y {time_format}")
        except ValueError:  # 29 February exists in one of the three at most
            continue
        found.append(_datetime_ns(moment, utc_offset_s))
    if latest_ns is not None:
        found = [ns for ns in found if ns <= latest_ns] or found
    return min(found, key=lambda ns: abs(ns - near_ns)) if found else None


def _nearest_day(text: str, time_format: str, utc_offset_s: Optional[int], near_ns: int) -> int:
    clock = datetime.datetime.strptime(text, time_format)
    today = datetime.datetime.fromtimestamp(near_ns // SECOND_NS)
    days = [today.date() + datetime.timedelta(days=shift) for shift in (-1, 0, 1)]
    found = [
        _datetime_ns(datetime.datetime.combine(day, clock.timetz()), utc_offset_s) for day in days
    ]
    return min(found, key=lambda ns: abs(ns - near_ns))
