"""The outermost layer of `bootseer start`: the job starts, whatever part of bootseer is broken.

An ordinary command line is parsed here, which saves every start of a job the time to import click,
and settings are read only if there are any; click parses the rest (help, checks, mistakes). A
job's Python path or an old image can put a broken click, or a Python that is too old, in front of
bootseer: then the command line is parsed here after all, and if that fails too, the job is started
without bootseer. Must stay importable on Python 3.9.
"""

from __future__ import annotations

import os
import sys

from bootseer.entrypoint import exec_program, job_process, start_unconfigured

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_VALUES = ("-c", "--config", "--events", "--store", "--cache", "--set")
_KEYS = {"--events": "job.events", "--store": "deps.store", "--cache": "deps.cache"}


def main(words: list[str], by_click: Callable[[list[str]], int]) -> int:
    """Run `bootseer start` with the arguments after it; return the exit code if the job is over.

    `by_click` runs any bootseer command line through click.
    """
    options, job = split_arguments(words)
    if sys.version_info < (3, 11):
        return _start_job_alone(job, "`start` needs Python 3.11 or newer")
    try:
        if job and _is_ordinary(options):
            given = dict(options)
            names_a_file = given.keys() & {"-c", "--config"}
            if not names_a_file and start_unconfigured.is_unconfigured(os.environ):
                events = given.get("--events", "")
                return start_unconfigured.start(job, events, job_process.original_environment())
            code = _start_image_only(given, job) if len(given) == len(options) else None
            return _start_without_click(options, job, "") if code is None else code
        return by_click(["start", *words])
    except Exception as error:  # the border
        fault = _describe(error)
    try:
        if job:
            return _start_without_click(options, job, fault)
    except Exception as error:  # the border
        fault = _describe(error)
    return _start_job_alone(job, fault)


def split_arguments(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options before the job, as pairs of name and value, and the job."""
    options = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, equals, value = rest.pop(0).partition("=")
        if name in _VALUES and not equals:
            value = rest.pop(0) if rest else ""
        elif name.startswith("-c") and len(name) > 2:  # `-cFILE`
            name, value = "-c", name[2:] + equals + value
        options.append((name, value))
    return options, rest[1:] if rest[:1] == ["--"] else rest


def _is_ordinary(options: list[tuple[str, str]]) -> bool:
    """Whether no option needs click, to answer it or to report what is wrong with it."""
    if any(name.startswith("BOOTSEER_START_") for name in os.environ):
        return False
    # A `--set` can be wrong, which click reports.
    return all(name in _VALUES and name != "--set" and value for name, value in options)


def _start_image_only(given: dict[str, str], job: list[str]) -> int | None:
    """Become the job if it needs nothing before it but the image's files read ahead.

    Returns None if the options or settings ask for more.
    """
    if given.keys() - {"-c", "--config", "--events"} or given.keys() >= {"-c", "--config"}:
        return None
    from bootseer.entrypoint import start_image_only

    named = given.get("-c") or given.get("--config") or os.environ.get("BOOTSEER_CONFIG")
    path = named or start_image_only.DEFAULT_FILE
    request = start_image_only.read_plain_request(path, os.environ)
    if request is None:
        return None
    events, environ = given.get("--events", ""), job_process.original_environment()
    if not request:
        return start_unconfigured.start(job, events, environ)
    return start_image_only.start(request, job, events, environ)


def _start_without_click(options: list[tuple[str, str]], job: list[str], fault: str) -> int:
    """Run a complete start without click. Raises only before anything has begun."""
    from bootseer.config import loading
    from bootseer.entrypoint import start

    path = os.environ.get("BOOTSEER_CONFIG") or None
    flags = {}
    for name, value in options:
        if name in ("-c", "--config"):
            path = value
        elif name == "--set":
            key, parsed = loading.parse_flag(value)
            flags[key] = parsed
        elif name in _KEYS:
            flags[_KEYS[name]] = value
    loaded = loading.load_tolerantly(path, None, flags)
    if fault:
        job_process.say(f"warning: {fault}; going on without it")
    return start.start(loaded, job, job_process.original_environment())


def _start_job_alone(job: list[str], fault: str) -> int:
    """Report the fault and become the job, without any part of bootseer."""
    if not job:
        job_process.say(f"{fault}; nothing was started")
        return 7
    job_process.say(f"warning: {fault}; starting the job alone")
    return exec_program.execute(job, job_process.original_environment())


def _describe(error: Exception) -> str:
    text, name = " ".join(str(error).split()), type(error).__name__
    return f"{name}: {text}" if text else name
