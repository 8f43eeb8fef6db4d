"""`bootseer run`: one command as one measured phase, run as `job_process` does.

The command line is parsed by hand and with few imports, because this stands in front of every
process of a job. No fault of the events may affect the job.
"""

from __future__ import annotations

import os
import sys

from bootseer import events
from bootseer.entrypoint import job_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from bootseer.events.writer import AnyWriter
    from bootseer.profiler.collect.private_pip_log import PrivatePipLog

HELP = """\
Usage: bootseer run [OPTIONS] [--] COMMAND [ARGUMENT]...

Run COMMAND as one measured phase. Standard input, output and error, the terminal, signals and
the exit code (128+N after signal N, 126 not executable, 127 not found) are the command's own. One
difference: a signal that a process sends to the whole group (kill -- -GROUP) reaches it twice.
Killed by SIGKILL, this program leaves COMMAND running.

Options, each with the environment variable that does the same (lists split at commas, colons):
  --phase NAME      name of the phase, `job` by default        BOOTSEER_RUN_PHASE
  --events PATH     directory or .jsonl file for the events    BOOTSEER_EVENTS
  --attr KEY=VALUE  attribute of the phase; repeatable         BOOTSEER_RUN_ATTR
  --wait            the phase is time spent waiting for others BOOTSEER_RUN_WAIT=1
  --log-rules RULES find phases in the command's output by the rules of a file, or by shipped
                    ones named here; repeatable                BOOTSEER_RUN_LOG_RULES
  --import-times    record the heaviest imports of Python      BOOTSEER_RUN_IMPORT_TIMES=1
  -h, --help        show this text
Without --events, events go to ${XDG_STATE_HOME:-~/.local/state}/bootseer/events.
"""


class RunUsageError(Exception):
    """The command line cannot be used; the message says why."""


class Options:
    """What the command line and BOOTSEER_RUN_* ask for."""

    __slots__ = ("attributes", "command", "events", "help", "import_times", "log_rules", "phase")

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.phase = environ.get("BOOTSEER_RUN_PHASE") or "job"
        self.events = environ.get("BOOTSEER_EVENTS") or ""
        self.attributes: dict[str, Any] = {}
        for pair in filter(None, environ.get("BOOTSEER_RUN_ATTR", "").split(",")):
            self.add_attribute(pair, "BOOTSEER_RUN_ATTR")
        if flag(environ, "BOOTSEER_RUN_WAIT"):
            self.attributes["bootseer.wait"] = True
        rules = environ.get("BOOTSEER_RUN_LOG_RULES", "")
        self.log_rules = [rule for rule in rules.split(":") if rule]
        self.import_times = flag(environ, "BOOTSEER_RUN_IMPORT_TIMES")
        self.help = False
        self.command: Sequence[str] = ()

    def add_attribute(self, pair: str, where: str) -> None:
        key, value = attribute_pair(pair, where)
        self.attributes[key] = value


def flag(environ: Mapping[str, str], name: str) -> bool:
    """Parse a boolean variable: 1, true, yes, on and their opposites, or RunUsageError."""
    value = environ.get(name, "").lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise RunUsageError(f"{name} is '{value}'; use 1 or 0")


def attribute_pair(pair: str, where: str) -> tuple[str, Any]:
    """Split KEY=VALUE; true, false and whole numbers are converted, other values stay text.

    Raises RunUsageError for another form; `where` names the option or variable in it.
    """
    key, equals, text = pair.partition("=")
    if not equals or not key:
        raise RunUsageError(f"{where} needs KEY=VALUE, not '{pair}'")
    if text in ("true", "false"):
        return key, text == "true"
    if text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 19:
        return key, int(text)
    return key, text


_SWITCHES = ("-h", "--help", "--wait", "--import-times")
_VALUES = ("--phase", "--events", "--attr", "--log-rules")


def parse_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse the words after `run`; raises RunUsageError."""
    options = Options(environ)
    words = list(arguments)
    rules: list[str] = []
    while words and words[0].startswith("-") and words[0] != "-":
        name, equals, value = words.pop(0).partition("=")
        if name == "--":
            break
        if name in _SWITCHES:
            if equals:
                raise RunUsageError(f"run: {name} takes no value")
            _set_switch(options, name)
            continue
        if name not in _VALUES:
            raise RunUsageError(f"run: unknown option {name}; see `bootseer run --help`")
        if not equals and words:
            value = words.pop(0)
        if not value:
            raise RunUsageError(f"run: {name} needs a value")
        if name == "--log-rules":
            rules.append(value)
        elif name == "--attr":
            options.add_attribute(value, "run: --attr")
        else:
            setattr(options, name[2:], value)
    options.log_rules = rules or options.log_rules
    options.command = words
    if not words and not options.help:
        raise RunUsageError("run: no command given; use `bootseer run [OPTIONS] -- COMMAND`")
    return options


def _set_switch(options: Options, name: str) -> None:
    if name == "--wait":
        options.attributes["bootseer.wait"] = True
    elif name == "--import-times":
        options.import_times = True
    else:
        options.help = True


def is_pip(command: Sequence[str]) -> bool:
    """Whether a command is pip, called by its name or as `python -m pip`."""
    name = os.path.basename(command[0])
    if name.startswith("python"):
        return list(command[1:3]) == ["-m", "pip"]
    return name.startswith("pip") and not name[3:].strip("0123456789.")


def _make_end_attributes(result: job_process.Result) -> dict[str, Any]:
    attributes: dict[str, Any] = {"process.exit.code": result.code}
    if result.error:
        attributes["error.type"] = "not_found" if result.code == 127 else "not_executable"
    elif result.signal:
        attributes["error.type"] = f"signal_{result.signal}"
    elif result.code:
        attributes["error.type"] = "exit_code"
    return attributes


class _PhaseEvents:
    """The span around one command, and the variables for it. No method raises."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self.added: dict[str, str] = {}
        self.span = ""
        self.pip_log: PrivatePipLog | None = None
        self.name = options.phase
        self.writer: AnyWriter = events.NullWriter()
        try:
            self._begin(options, environ)
        except Exception:  # a fault of the events must not keep the job from starting
            pass

    def _begin(self, options: Options, environ: Mapping[str, str]) -> None:
        default = events.default_directory(environ)
        self.writer = writer = events.open_writer(options.events or None, environ, default)
        if isinstance(writer, events.Writer) and "BOOTSEER_TRACEPARENT" not in environ:
            from bootseer.events import resource

            if resource.in_container():
                from bootseer.entrypoint.container_start import write_container_start

                write_container_start(writer)
        attributes = {"bootseer.source": "run", "bootseer.command": events.redact(options.command)}
        self.span = writer.begin(self.name, {**attributes, **options.attributes})
        self.added = events.child_environment(writer, self.span, environ)
        if not isinstance(writer, events.Writer):
            return
        if is_pip(options.command) and "PIP_LOG" not in environ:
            # A module less for all other commands.
            from bootseer.profiler.collect.private_pip_log import VARIABLE, PrivatePipLog

            self.pip_log = PrivatePipLog.create(environ)
            self.added[VARIABLE] = self.pip_log.path
        if options.import_times:
            from bootseer.profiler.collect import import_hook

            self.added.update(import_hook.environment({**environ, **self.added}))

    def _write_pip_phase(
        self, name: str, begin_ns: int, end_ns: int, attributes: dict[str, Any]
    ) -> None:
        status = "error" if "error.type" in attributes else "ok"
        span = self.writer.begin(name, {"bootseer.source": "pip"}, self.span, begin_ns)
        self.writer.end(span, name, status, attributes, end_ns, parent=self.span)

    def end(self, result: job_process.Result) -> None:
        try:
            if self.pip_log:
                self.pip_log.finish(self._write_pip_phase)
            status = "error" if result.code else "ok"
            self.writer.end(self.span, self.name, status, _make_end_attributes(result))
        except Exception:  # the job has ended: its exit code counts, not our events
            pass


def run_measured(options: Options, environ: Mapping[str, str]) -> job_process.Result:
    """Run the command of `options` as a measured phase."""
    phase_events = _PhaseEvents(options, environ)
    run_tapped = _load_tap(phase_events.writer) if options.log_rules else None
    try:
        if run_tapped:
            result = run_tapped(
                options.command, environ, phase_events.added, options.log_rules, phase_events.writer
            )
        else:
            result = job_process.start(options.command, environ, phase_events.added).wait()
    except OSError as error:
        result = job_process.make_failure(options.command, error)
    phase_events.end(result)
    return result


def _load_tap(writer: AnyWriter) -> Callable[..., job_process.Result] | None:
    try:
        from bootseer.entrypoint import output_tap
    except Exception as error:  # the job runs without the rules, and the report says why
        reason = f"the command's output cannot be read: {error}"
        writer.point("log_rules", "fallback", {"bootseer.source": "log", "bootseer.reason": reason})
        return None
    return output_tap.run_tapped


def main(arguments: Sequence[str]) -> int:
    """Run `bootseer run` with its arguments; return the exit code."""
    environ = job_process.original_environment()
    try:
        options = parse_arguments(arguments, environ)
    except RunUsageError as fault:
        job_process.say(str(fault))
        return 2
    if options.help:
        if sys.stdout is not None:
            sys.stdout.write(HELP)
        return 0
    return job_process.mirror_result(run_measured(options, environ))
