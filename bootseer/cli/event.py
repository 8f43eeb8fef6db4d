"""`bootseer event`: write one event from a script. Parses its own arguments."""

from __future__ import annotations

import os
import sys

from bootseer import events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from bootseer.system.file_lock import FileLock

_LOCK_S = 1.0
HELP = """\
Usage: bootseer event begin NAME [--attr KEY=VALUE]... [--wait]
       bootseer event end   NAME [--span ID] [--status STATUS] [--attr KEY=VALUE]...
       bootseer event end   --span ID [NAME]
       bootseer event point NAME [--status STATUS] [--attr KEY=VALUE]...

Write one event. `begin` prints the span's id, to be given to `end --span`; without --span, `end`
closes the open phase of that name that this shell began last. Nothing is written, and the exit
code is 0, where events have no place: set BOOTSEER_EVENTS or give --events.

Options, each with the environment variable that does the same:
  --events PATH     directory or .jsonl file for the events    BOOTSEER_EVENTS
  --attr KEY=VALUE  attribute; repeatable                      BOOTSEER_EVENT_ATTR
  --status STATUS   ok (default), error or fallback            BOOTSEER_EVENT_STATUS
  --span ID         the span to end                            BOOTSEER_EVENT_SPAN
  --wait            the phase is time spent waiting for others BOOTSEER_EVENT_WAIT=1
  -h, --help        show this text
"""
KINDS = ("begin", "end", "point")
STATUSES = ("ok", "error", "fallback")


class EventUsageError(Exception):
    """The command line is wrong; the message says why."""


class Options:
    """The arguments of one call, with defaults from the BOOTSEER_EVENT_* variables."""

    __slots__ = ("attributes", "events", "help", "kind", "name", "span", "status")

    def __init__(self, environ: dict[str, str]) -> None:
        from bootseer.entrypoint.run import attribute_pair, flag

        self.kind = self.name = ""
        self.events = environ.get("BOOTSEER_EVENTS") or ""
        self.status = environ.get("BOOTSEER_EVENT_STATUS") or "ok"
        self.span = environ.get("BOOTSEER_EVENT_SPAN") or ""
        pairs = filter(None, environ.get("BOOTSEER_EVENT_ATTR", "").split(","))
        self.attributes: dict[str, Any] = dict(
            attribute_pair(pair, "BOOTSEER_EVENT_ATTR") for pair in pairs
        )
        if flag(environ, "BOOTSEER_EVENT_WAIT"):
            self.attributes["bootseer.wait"] = True
        self.help = False


def parse(arguments: Sequence[str], environ: dict[str, str]) -> Options:
    """Parse the arguments after `event`. Raises EventUsageError or run's RunUsageError."""
    from bootseer.entrypoint.run import attribute_pair

    options = Options(environ)
    words = list(arguments)
    operands: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            operands.append(word)
            continue
        name, equals, value = word.partition("=")
        if name in ("-h", "--help"):
            options.help = True
        elif name == "--wait":
            options.attributes["bootseer.wait"] = True
        elif name == "--":
            operands, words = operands + words, []
        elif name not in ("--events", "--attr", "--status", "--span"):
            raise EventUsageError(f"event: unknown option {name}; see `bootseer event --help`")
        else:
            if not equals and words:
                value = words.pop(0)
            if not value:
                raise EventUsageError(f"event: {name} needs a value")
            if name == "--attr":
                key, attribute = attribute_pair(value, "event: --attr")
                options.attributes[key] = attribute
            else:
                setattr(options, name[2:], value)
    if not options.help:
        _take_operands(options, operands)
    return options


def _take_operands(options: Options, operands: list[str]) -> None:
    """Take kind and name from the operands; check them, the status and the span."""
    options.kind = operands[0] if operands else ""
    if options.kind not in KINDS:
        raise EventUsageError("event: say begin, end or point; see `bootseer event --help`")
    options.name = operands[1] if len(operands) > 1 else ""
    if len(operands) > 2:
        raise EventUsageError(f"event: one name at a time, '{operands[2]}' is too much")
    if not options.name and not (options.kind == "end" and options.span):
        raise EventUsageError(f"event: {options.kind} needs a NAME")
    if options.status not in STATUSES:
        raise EventUsageError(f"event: status is '{options.status}'; use ok, error or fallback")
    span = options.span
    if span and (len(span) != 16 or span.strip("0123456789abcdef")):
        raise EventUsageError(f"event: --span '{span}' is not what `event begin` printed")


def _identify_caller() -> str:
    """Return an identifier of the parent process, the shell that runs this command.

    It is the same as long as that process lives, and unique on this machine.
    """
    from bootseer.events import resource
    from bootseer.system.processes import find_start_ticks

    try:
        ticks = find_start_ticks(os.getppid())
    except TimeoutError:
        ticks = None
    return f"{os.getppid()}:{ticks}:{resource.boot_id()}"


class _OpenSpans:
    """The spans that one shell has open, kept in a small file next to the event files.

    The file is removed with the last span. If it cannot be written, all spans of one name get the
    same id, which is correct as long as the name is used once.
    """

    def __init__(self, target: str, caller: str, trace_id: str) -> None:
        from bootseer.events import resource

        folder = os.path.dirname(target) if target.endswith(".jsonl") else target
        self._key = f"{trace_id}:{caller}"
        self._path = os.path.join(folder, ".open", resource.digest(self._key)[:16])

    def _derive_id(self, name: str) -> str:
        """Return the id that all spans of a name get if the file cannot be written."""
        from bootseer.events import resource

        return resource.digest(f"{self._key}:{name}")[:16]

    def begin(self, name: str, span: str = "") -> str:
        """Record a new span; return its id, which is `span` where the caller has chosen one."""
        new = span or os.urandom(8).hex()
        line = f"{new} {_join_lines(name)}\n".encode("utf-8", "replace")
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with self._open(os.O_CREAT | os.O_APPEND) as file:
                if os.write(file.descriptor, line) == len(line):
                    return new
        except OSError:
            pass
        return span or self._derive_id(name)

    def end(self, span: str, name: str) -> tuple[str, str]:
        """Remove the span with this id, or without one the latest of this name.

        Returns the span's id and name.
        """
        try:
            with self._open(0) as file:
                fd = file.descriptor
                text = os.read(fd, os.fstat(fd).st_size).decode("utf-8", "replace")
                lines = text.splitlines()
                for number in range(len(lines) - 1, -1, -1):
                    open_span, _, open_name = lines[number].partition(" ")
                    if open_span == span if span else open_name == _join_lines(name):
                        span, name = open_span, name or open_name
                        del lines[number]
                        rest = "".join(line + "\n" for line in lines).encode()
                        os.pwrite(fd, rest, 0)
                        os.ftruncate(fd, len(rest))
                        break
                if not lines:
                    os.unlink(self._path)
        except OSError:
            pass  # no span was begun in this shell, or the file could not be written
        return span or self._derive_id(name), name or "unnamed"

    def _open(self, more_flags: int) -> FileLock:
        """Open the file for this process alone: commands in the background run side by side."""
        from bootseer.system import file_lock

        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | more_flags
        while True:
            file = file_lock.FileLock(os.open(self._path, flags, 0o666))
            try:
                file_lock.lock(file.descriptor, limit_s=_LOCK_S)
            except OSError:  # there are no locks, or its holder does not go on
                return file
            if file.is_named(self._path):
                return file
            file.close()  # another process ended its last span and removed the file


def _join_lines(name: str) -> str:
    return " ".join(name.split())


def write_event(options: Options, environ: dict[str, str]) -> str:
    """Write the event; return the span id of a begin, else "".

    A begin returns an id even if events are not written: the script passes it to `end`.
    """
    from bootseer.events import resource

    unwritten_span = (options.span or os.urandom(8).hex()) if options.kind == "begin" else ""
    if not options.events and not environ.get("BOOTSEER_EVENTS"):
        return unwritten_span
    caller = _identify_caller()
    if "BOOTSEER_TRACEPARENT" not in environ and not resource.job_uid(environ):
        parent = resource.digest(f"parent:{caller}")[:16]
        trace = f"00-{resource.digest(caller)}-{parent}-01"
        environ = {**environ, "BOOTSEER_TRACEPARENT": trace}
    with events.open_writer(options.events or None, environ) as writer:
        if not isinstance(writer, events.Writer):
            return unwritten_span
        attributes = {"bootseer.source": "phase", **options.attributes}
        if options.kind == "point":
            writer.point(options.name, options.status, attributes)
            return ""
        spans = _OpenSpans(writer.target, caller, writer.trace_id)
        if options.kind == "begin":
            span = spans.begin(options.name, options.span)
            return writer.begin(options.name, attributes, span_id=span)
        span, name = spans.end(options.span, options.name)
        writer.end(span, name, options.status, attributes)
    return ""


def main(arguments: Sequence[str]) -> int:
    """Run `bootseer event` with the arguments after it; return the exit code."""
    from bootseer.entrypoint import job_process
    from bootseer.entrypoint.run import RunUsageError

    environ = dict(os.environ)
    try:
        options = parse(arguments, environ)
    except (EventUsageError, RunUsageError) as error:
        job_process.say(str(error))
        return 2
    if options.help:
        if sys.stdout is not None:
            sys.stdout.write(HELP)
        return 0
    span = write_event(options, environ)
    if span and sys.stdout is not None:
        sys.stdout.write(span + "\n")
    return 0


def __getattr__(name: str) -> Any:
    """Return the click command `command`; click is imported only where it is accessed."""
    if name != "command":
        raise AttributeError(name)
    from bootseer.cli.shared.hand_parsed_help import make_command

    return make_command("event", "Write one event from a script.", HELP, main)
