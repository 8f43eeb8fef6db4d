"""`bootseer event`: write one event from a script. Parsed by hand; click only for the help."""

from __future__ import annotations

import os
import sys

from bootseer import events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

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
    """The command line cannot be used; the message says why."""


class Options:
    """What the command line and BOOTSEER_EVENT_* ask for."""

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
    """Parse the words after `event`; raises EventUsageError or run's RunUsageError."""
    from bootseer.entrypoint.run import attribute_pair

    options = Options(environ)
    words = list(arguments)
    plain: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        name, equals, value = word.partition("=")
        if name in ("-h", "--help"):
            options.help = True
        elif name == "--wait":
            options.attributes["bootseer.wait"] = True
        elif name == "--":
            plain, words = plain + words, []
        elif name not in ("--events", "--attr", "--status", "--span"):
            raise EventUsageError(f"event: unknown option {name}; see `bootseer event --help`")
        else:
            if not equals and words:
                value = words.pop(0)
            if not value:
                raise EventUsageError(f"event: {name} needs a value")
            if name == "--attr":
                key, shown = attribute_pair(value, "event: --attr")
                options.attributes[key] = shown
            else:
                setattr(options, name[2:], value)
    if not options.help:
        _check(options, plain)
    return options


def _check(options: Options, plain: list[str]) -> None:
    options.kind = plain[0] if plain else ""
    if options.kind not in KINDS:
        raise EventUsageError("event: say begin, end or point; see `bootseer event --help`")
    options.name = plain[1] if len(plain) > 1 else ""
    if len(plain) > 2:
        raise EventUsageError(f"event: one name at a time, '{plain[2]}' is too much")
    if not options.name and not (options.kind == "end" and options.span):
        raise EventUsageError(f"event: {options.kind} needs a NAME")
    if options.status not in STATUSES:
        raise EventUsageError(f"event: status is '{options.status}'; use ok, error or fallback")
    span = options.span
    if span and (len(span) != 16 or span.strip("0123456789abcdef")):
        raise EventUsageError(f"event: --span '{span}' is not what `event begin` printed")


def _caller() -> str:
    """Name the shell that called us, the same as long as that process lives, and different from
    any other on this machine."""
    from bootseer.events import resource
    from bootseer.system.processes import start_ticks

    try:
        ticks = start_ticks(os.getppid())
    except TimeoutError:
        ticks = 0
    return f"{os.getppid()}:{ticks}:{resource.boot_id()}"


class _OpenSpans:
    """The spans that one shell has open, in a small file beside the events.

    The file is gone with the last of them. Where it cannot be kept, all spans of a name share one
    id, which is right as long as the name comes once.
    """

    def __init__(self, target: str, caller: str, trace_id: str) -> None:
        from bootseer.events import resource

        folder = os.path.dirname(target) if target.endswith(".jsonl") else target
        self._key = f"{trace_id}:{caller}"
        self._path = os.path.join(folder, ".open", resource.digest(self._key)[:16])

    def _shared(self, name: str) -> str:
        from bootseer.events import resource

        return resource.digest(f"{self._key}:{name}")[:16]

    def begin(self, name: str) -> str:
        """Return the id of a new span."""
        span = os.urandom(8).hex()
        line = f"{span} {_one_line(name)}\n".encode("utf-8", "replace")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            fd = os.open(self._path, flags, 0o666)
            try:
                return span if os.write(fd, line) == len(line) else self._shared(name)
            finally:
                os.close(fd)
        except OSError:
            return self._shared(name)

    def end(self, span: str, name: str) -> tuple[str, str]:
        """Forget a span, named by its id, else the last begun of its name; return id and name."""
        try:
            with open(self._path, "r+", encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
                for number in range(len(lines) - 1, -1, -1):
                    known, _, shown = lines[number].partition(" ")
                    if known == span if span else shown == _one_line(name):
                        del lines[number]
                        file.seek(0)
                        file.write("".join(line + "\n" for line in lines))
                        file.truncate()
                        span, name = known, name or shown
                        break
            if not lines:
                os.unlink(self._path)
        except OSError:
            pass  # nothing was begun here, or it could not be kept
        return span or self._shared(name), name or "unnamed"


def _one_line(name: str) -> str:
    return " ".join(name.split())


def write(options: Options, environ: dict[str, str]) -> str:
    """Write the event; return the span id of a begin, else nothing.

    A begin has an id even where events have no place: the script goes on to give it to `end`.
    """
    from bootseer.events import resource

    nothing = (options.span or os.urandom(8).hex()) if options.kind == "begin" else ""
    if not options.events and not environ.get("BOOTSEER_EVENTS"):
        return nothing
    caller = _caller()
    if "BOOTSEER_TRACEPARENT" not in environ and not resource.job_uid(environ):
        parent = resource.digest(f"parent:{caller}")[:16]
        trace = f"00-{resource.digest(caller)}-{parent}-01"
        environ = {**environ, "BOOTSEER_TRACEPARENT": trace}
    with events.open_writer(options.events or None, environ) as writer:
        if not isinstance(writer, events.Writer):
            return nothing
        attributes = {"bootseer.source": "phase", **options.attributes}
        if options.kind == "point":
            writer.point(options.name, options.status, attributes)
            return ""
        spans = _OpenSpans(writer.target, caller, writer.trace_id)
        if options.kind == "begin":
            span = options.span or spans.begin(options.name)
            return writer.begin(options.name, attributes, span_id=span)
        span, name = spans.end(options.span, options.name)
        writer.end(span, name, options.status, attributes)
    return ""


def main(arguments: Sequence[str]) -> int:
    """Run `bootseer event` with the words after it; return the exit code."""
    from bootseer.entrypoint.run import RunUsageError

    environ = dict(os.environ)
    try:
        options = parse(arguments, environ)
    except (EventUsageError, RunUsageError) as error:
        sys.stderr.write(f"bootseer: {error}\n")
        return 2
    if options.help:
        sys.stdout.write(HELP)
        return 0
    span = write(options, environ)
    if span:
        sys.stdout.write(span + "\n")
    return 0


def __getattr__(name: str) -> Any:
    if name != "command":
        raise AttributeError(name)
    from bootseer.cli.shared.hand_parsed_help import command_of

    return command_of("event", "Write one event from a script.", HELP, main)
