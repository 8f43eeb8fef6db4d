"""The process that matches a running job's output against log rules, so that the job never waits.

Python 3.9, standard library only. `run` copies the output through and sends it to the matcher as
frames on a pipe that it writes without blocking: a frame that does not fit is dropped and its
bytes are counted in a later `encode_dropped` frame. The matcher writes events and nothing else; it
exits when the pipe ends, and ignores the signals that a terminal sends to all processes of a job.

Frame, network byte order: payload length (uint32, at most FRAME_MAX_BYTES), stream id (uint8),
arrival as Unix and as monotonic nanoseconds (uint64 each), payload. Stream DROPPED_STREAM carries
counts: its payload is a stream id (uint8) and the count of bytes dropped from that stream (uint64).

One match that uses more than SEARCH_LIMIT_S of CPU time is interrupted by a timer signal (CPython's
regular expressions check for signals while they backtrack), its rule is not used again, and a
`log_rules` event with status=fallback names it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Match, Optional, Pattern, Tuple

from bootseer.profiler.collect.log_rules.engine import Engine, PhaseEvent, TooSlow, make_fallback
from bootseer.profiler.collect.log_rules.lines import LineSplitter
from bootseer.profiler.collect.log_rules.rules import load as load_rules

if TYPE_CHECKING:
    from bootseer.events.writer import NullWriter, Writer

FRAME_MAX_BYTES = 1 << 16
DROPPED_STREAM = 255
SEARCH_LIMIT_S = 0.1
"""CPU time of one search; a longer one is interrupted within twice this time."""

_HEADER = struct.Struct("!IBQQ")
_DROPPED = struct.Struct("!BQ")
_READ_BYTES = 1 << 18
_NICE = 10
_PACKAGE_PARENT = os.path.abspath(__file__)
for _ in range(5):
    _PACKAGE_PARENT = os.path.dirname(_PACKAGE_PARENT)
_START_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from bootseer.profiler.collect.log_rules.matcher_process import main; "
    "sys.exit(main(sys.argv[1:]))"
)

Frame = Tuple[int, int, int, bytes]
"""(stream id, Unix nanoseconds, monotonic nanoseconds, payload)"""


class FrameError(ValueError):
    """Bytes are not a frame; the rest of the stream cannot be read either."""


def encode_frame(stream: int, time_unix_nano: int, mono_nano: int, data: bytes) -> bytes:
    """Return one frame; `stream` is 0 to 254.

    Raises FrameError if `data` is longer than FRAME_MAX_BYTES.
    """
    if len(data) > FRAME_MAX_BYTES:
        raise FrameError(f"a frame holds at most {FRAME_MAX_BYTES} bytes, not {len(data)}")
    return _HEADER.pack(len(data), stream, time_unix_nano, mono_nano) + data


def encode_dropped(stream: int, count_bytes: int) -> bytes:
    """Return the frame that says how many bytes of a stream were dropped at this place."""
    return _HEADER.pack(_DROPPED.size, DROPPED_STREAM, 0, 0) + _DROPPED.pack(stream, count_bytes)


class FrameParser:
    """Parses a byte stream into frames; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> List[Frame]:
        """Return the frames that `data` completes; raises FrameError for an impossible length."""
        self._buffer += data
        frames: List[Frame] = []
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            length, stream, unix_ns, mono_ns = _HEADER.unpack_from(self._buffer, position)
            if length > FRAME_MAX_BYTES:
                raise FrameError(f"a frame claims {length} bytes")
            end = position + _HEADER.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[position + _HEADER.size : end])
            frames.append((stream, unix_ns, mono_ns, payload))
            position = end
        del self._buffer[:position]
        return frames


def command(
    rules: Iterable[str], events: Optional[str] = None, python: Optional[str] = None
) -> List[str]:
    """Return the command line of a matcher process, isolated from the job's Python settings.

    `rules` are rule files or shipped names, `events` is as in `events.open_writer`.
    """
    words = [python or sys.executable, "-I", "-S", "-c", _START_CODE, _PACKAGE_PARENT]
    for rule in rules:
        words += ["--rules", rule]
    return words + (["--events", events] if events else [])


class SearchLimit:
    """Context manager whose `search` raises TooSlow after too much CPU time in one search.

    Uses SIGVTALRM and the virtual interval timer; only in the main thread. A process that is
    stopped or starved uses no CPU time, so a busy machine makes no rule look slow.
    """

    def __init__(self, limit_s: float = SEARCH_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._serial = 0
        self._active = 0
        self._active_at_last_tick = 0
        self._former_handler: Any = None

    def __enter__(self) -> SearchLimit:
        self._former_handler = signal.signal(signal.SIGVTALRM, self._tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s, self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, self._former_handler or signal.SIG_DFL)

    def search(self, pattern: Pattern[str], text: str) -> Optional[Match[str]]:
        """Search as `pattern.search(text)` does."""
        self._serial += 1
        self._active = self._serial
        try:
            return pattern.search(text)
        finally:
            self._active = 0

    def _tick(self, *_: object) -> None:
        if self._active and self._active == self._active_at_last_tick:
            self._active = 0  # before raising: nothing outside a search may be interrupted
            raise TooSlow
        self._active_at_last_tick = self._active


class Sink:
    """Writes the engine's events; keeps the span ids of open phases."""

    def __init__(self, writer: Writer | NullWriter) -> None:
        self._writer = writer
        self._spans: Dict[Tuple[str, str], str] = {}

    def write(self, events: Iterable[PhaseEvent]) -> None:
        for event in events:
            self._write_event(event)

    def _write_event(self, event: PhaseEvent) -> None:
        name, status, attributes = event.name, event.status, event.attributes
        unix_ns, mono_ns = event.time_unix_nano, event.mono_nano
        if event.kind == "begin":
            span = self._writer.begin(name, attributes, None, unix_ns, mono_ns)
            self._spans[event.key] = span
        elif event.kind == "end":
            span = self._spans.pop(event.key)
            self._writer.end(span, name, status, attributes, unix_ns, mono_ns)
        else:
            self._writer.point(name, status, attributes, None, unix_ns, mono_ns)


class Matcher:
    """Matches the lines of all streams by one engine, and counts the bytes that were dropped."""

    def __init__(self, engine: Engine, sink: Sink) -> None:
        self._engine, self._sink = engine, sink
        self._splitters: Dict[int, LineSplitter] = {}
        self._dropped_bytes = 0
        self._last_ns: Tuple[Optional[int], Optional[int]] = (None, None)

    def match_frame(self, frame: Frame) -> None:
        """Match the lines that a frame completes and write their events."""
        stream, unix_ns, mono_ns, data = frame
        if stream == DROPPED_STREAM:
            if len(data) != _DROPPED.size:
                raise FrameError(f"a count of dropped bytes has {_DROPPED.size} bytes")
            stream, count = _DROPPED.unpack(data)
            self._dropped_bytes += count
            self._get_splitter(stream).mark_gap()
            return
        self._last_ns = (unix_ns, mono_ns)
        for line in self._get_splitter(stream).feed(data):
            self._sink.write(self._engine.match_line(line, unix_ns, mono_ns))

    def close(self) -> None:
        """At the end of all streams, match unfinished lines and report what was not matched."""
        unix_ns, mono_ns = self._last_ns[0] or 0, self._last_ns[1]
        for splitter in self._splitters.values():
            for line in splitter.flush():
                self._sink.write(self._engine.match_line(line, unix_ns, mono_ns))
        reports = self._engine.close()
        if self._engine.lines and not self._engine.matched:
            reason = f"no log rule matched any of {self._engine.lines} lines of output"
            reports.append(make_fallback(reason, unix_ns, mono_ns))
        if self._dropped_bytes:
            reason = (
                f"the log rules could not keep up: {self._dropped_bytes} bytes of output "
                "were not matched"
            )
            attributes = {"bootseer.bytes": self._dropped_bytes}
            reports.append(make_fallback(reason, unix_ns, mono_ns, attributes))
        self._sink.write(reports)

    def _get_splitter(self, stream: int) -> LineSplitter:
        if stream not in self._splitters:
            self._splitters[stream] = LineSplitter()
        return self._splitters[stream]


def _parse_arguments(argv: List[str]) -> Tuple[List[str], Optional[str]]:
    rules: List[str] = []
    events: Optional[str] = None
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--rules" and rest:
            rules.append(rest.pop(0))
        elif word == "--events" and rest:
            events = rest.pop(0)
        else:
            raise SystemExit(2)
    return rules, events


def _detach_from_job() -> None:
    """Ignore the job's signals, so that its last lines are matched, and lower our priority."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)


def _match_stream(descriptor: int, matcher: Matcher) -> None:
    parser = FrameParser()
    while True:
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            break
        for frame in parser.feed(data):
            matcher.match_frame(frame)
    matcher.close()


def main(argv: List[str]) -> int:
    """Match frames from standard input until it ends.

    Returns the exit code: 0, or 1 after a fault that was written as an event.
    """
    from bootseer import events

    _detach_from_job()
    rule_files, target = _parse_arguments(argv)
    with events.open_writer(target) as writer:
        try:
            rules = [rule for file in rule_files for rule in load_rules(file)]
            with SearchLimit() as limit:
                engine = Engine(rules, search=limit.search)
                _match_stream(0, Matcher(engine, Sink(writer)))
        except Exception as error:  # fall-back border: no traceback is read, but the report is
            reason = {"bootseer.source": "log", "bootseer.reason": str(error)}
            writer.point("log_rules", "fallback", {**reason, "error.type": type(error).__name__})
            return 1
    return 0
