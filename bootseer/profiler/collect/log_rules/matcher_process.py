"""The process that matches a running job's output against log rules, so that the job never waits.

Python 3.9, standard library only. `run` copies output through and hands the matcher what passed,
as frames on a pipe that it writes without blocking: a frame that does not fit is dropped and its
bytes are counted in a later `encode_dropped` frame. The matcher writes events and nothing else; it
ends when the pipe does, and ignores the signals that a terminal sends to all processes of a job.

Frame, network byte order: payload length (uint32, at most FRAME_MAX_BYTES), stream id (uint8),
arrival as Unix and as monotonic nanoseconds (uint64 each), payload. Stream DROPPED_STREAM is ours:
its payload is the stream id (uint8) and the count of bytes dropped from it (uint64).

One match that burns more than SEARCH_LIMIT_S of CPU is broken off by a timer signal (CPython's
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

from bootseer.profiler.collect.log_rules import engine as logengine
from bootseer.profiler.collect.log_rules import lines
from bootseer.profiler.collect.log_rules import rules as logrules

if TYPE_CHECKING:
    from bootseer.events.writer import NullWriter, Writer

FRAME_MAX_BYTES = 1 << 16
DROPPED_STREAM = 255
SEARCH_LIMIT_S = 0.1
"""CPU time of one search; what exceeds it is stopped within twice as much."""

_HEADER = struct.Struct("!IBQQ")
_DROPPED = struct.Struct("!BQ")
_READ_BYTES = 1 << 18
_NICE = 10
_PACKAGE_PARENT = os.path.abspath(__file__)
for _ in range(5):
    _PACKAGE_PARENT = os.path.dirname(_PACKAGE_PARENT)
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from bootseer.profiler.collect.log_rules.matcher_process import main; "
    "sys.exit(main(sys.argv[1:]))"
)

Frame = Tuple[int, int, int, bytes]
"""(stream id, Unix nanoseconds, monotonic nanoseconds, payload)"""


class FrameError(ValueError):
    """Bytes that no `encode_frame` made; the stream cannot be followed any further."""


def encode_frame(stream: int, time_unix_nano: int, mono_nano: int, data: bytes) -> bytes:
    """One frame; `data` holds at most FRAME_MAX_BYTES, `stream` is 0 to 254."""
    if len(data) > FRAME_MAX_BYTES:
        raise FrameError(f"a frame holds at most {FRAME_MAX_BYTES} bytes, not {len(data)}")
    return _HEADER.pack(len(data), stream, time_unix_nano, mono_nano) + data


def encode_dropped(stream: int, count_bytes: int) -> bytes:
    """The frame that says how many bytes of a stream were dropped at this place."""
    return _HEADER.pack(_DROPPED.size, DROPPED_STREAM, 0, 0) + _DROPPED.pack(stream, count_bytes)


class FrameParser:
    """Bytes in, whole frames out; holds at most one unfinished frame."""

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
    """The command line of a matcher process: isolated, so that nothing of the job's runs in it.

    `rules` are rule files or shipped names, `events` is as in `events.open_writer`.
    """
    words = [python or sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE_PARENT]
    for rule in rules:
        words += ["--rules", rule]
    return words + (["--events", events] if events else [])


class SearchLimit:
    """Context manager whose `search` raises TooSlow after too much CPU time in one search.

    Uses SIGVTALRM and the virtual interval timer; only in the main thread. A process that is
    stopped or starved burns no CPU time, so a busy machine makes no rule look slow.
    """

    def __init__(self, limit_s: float = SEARCH_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._serial = 0
        self._active = 0
        self._seen = 0
        self._former: Any = None

    def __enter__(self) -> SearchLimit:
        self._former = signal.signal(signal.SIGVTALRM, self._tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s, self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, self._former or signal.SIG_DFL)

    def search(self, pattern: Pattern[str], text: str) -> Optional[Match[str]]:
        self._serial += 1
        self._active = self._serial
        try:
            return pattern.search(text)
        finally:
            self._active = 0

    def _tick(self, *_: object) -> None:
        if self._active and self._active == self._seen:
            self._active = 0  # before raising: nothing outside a search may be interrupted
            raise logengine.TooSlow
        self._seen = self._active


class Sink:
    """Writes what the engine found; remembers the span ids of open phases."""

    def __init__(self, writer: Writer | NullWriter) -> None:
        self._writer = writer
        self._spans: Dict[Tuple[str, str], str] = {}

    def write(self, found: Iterable[logengine.Found]) -> None:
        for one in found:
            self._write(one)

    def _write(self, one: logengine.Found) -> None:
        unix_ns, mono_ns = one.time_unix_nano, one.mono_nano
        if one.kind == "begin":
            span = self._writer.begin(one.name, one.attributes, None, unix_ns, mono_ns)
            self._spans[one.key] = span
        elif one.kind == "end":
            span = self._spans.pop(one.key)
            self._writer.end(span, one.name, one.status, one.attributes, unix_ns, mono_ns)
        else:
            self._writer.point(one.name, one.status, one.attributes, None, unix_ns, mono_ns)


class Matcher:
    """Frames in, events out: splitters by stream, one engine, counts of what was dropped."""

    def __init__(self, engine: logengine.Engine, sink: Sink) -> None:
        self._engine, self._sink = engine, sink
        self._splitters: Dict[int, lines.LineSplitter] = {}
        self._dropped_bytes = 0
        self._last_ns: Tuple[Optional[int], Optional[int]] = (None, None)

    def frame(self, frame: Frame) -> None:
        stream, unix_ns, mono_ns, data = frame
        if stream == DROPPED_STREAM:
            if len(data) != _DROPPED.size:
                raise FrameError(f"a count of dropped bytes has {_DROPPED.size} bytes")
            stream, count = _DROPPED.unpack(data)
            self._dropped_bytes += count
            self._splitter(stream).gap()
            return
        self._last_ns = (unix_ns, mono_ns)
        for line in self._splitter(stream).feed(data):
            self._sink.write(self._engine.line(line, unix_ns, mono_ns))

    def close(self) -> None:
        """End of all streams: match unfinished lines, say what was lost."""
        unix_ns, mono_ns = self._last_ns
        for splitter in self._splitters.values():
            for line in splitter.flush():
                self._sink.write(self._engine.line(line, unix_ns or 0, mono_ns))
        rest = self._engine.close()
        if self._engine.lines and not self._engine.matched:
            rest.append(unmatched_point(self._engine.lines, unix_ns or 0, mono_ns))
        if self._dropped_bytes:
            rest.append(dropped_point(self._dropped_bytes, unix_ns or 0, mono_ns))
        self._sink.write(rest)

    def _splitter(self, stream: int) -> lines.LineSplitter:
        if stream not in self._splitters:
            self._splitters[stream] = lines.LineSplitter()
        return self._splitters[stream]


def unmatched_point(
    count_lines: int, time_unix_nano: int, mono_nano: Optional[int]
) -> logengine.Found:
    """The `log_rules` event for output in which no rule found anything."""
    attributes = {
        "bootseer.source": "log",
        "bootseer.reason": f"no log rule matched any of {count_lines} lines of output",
    }
    return logengine.Found(
        "point", "log_rules", ("", ""), time_unix_nano, mono_nano, "fallback", attributes
    )


def dropped_point(
    count_bytes: int, time_unix_nano: int, mono_nano: Optional[int]
) -> logengine.Found:
    """The `log_rules` event for output that the rules never saw."""
    attributes = {
        "bootseer.source": "log",
        "bootseer.bytes": count_bytes,
        "bootseer.reason": f"the log rules could not keep up: {count_bytes} bytes of output "
        "were not matched",
    }
    key = ("", "")
    return logengine.Found(
        "point", "log_rules", key, time_unix_nano, mono_nano, "fallback", attributes
    )


def _arguments(argv: List[str]) -> Tuple[List[str], Optional[str]]:
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


def _detach() -> None:
    """Outlive the job's signals, to write what its last lines say; let the job go first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)


def _pump(descriptor: int, matcher: Matcher) -> None:
    parser = FrameParser()
    while True:
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            break
        for frame in parser.feed(data):
            matcher.frame(frame)
    matcher.close()


def main(argv: List[str]) -> int:
    """Match frames from standard input until it ends: 0, or 1 after a fault written as event."""
    from bootseer import events

    _detach()
    rule_files, target = _arguments(argv)
    with events.open_writer(target) as writer:
        try:
            rules = [rule for file in rule_files for rule in logrules.load(file)]
            with SearchLimit() as limit:
                engine = logengine.Engine(rules, search=limit.search)
                _pump(0, Matcher(engine, Sink(writer)))
        except Exception as error:  # fall-back border: nobody reads our traceback, the report does
            reason = {"bootseer.source": "log", "bootseer.reason": str(error)}
            writer.point("log_rules", "fallback", {**reason, "error.type": type(error).__name__})
            return 1
    return 0
