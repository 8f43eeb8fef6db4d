"""Start a job at once whose settings ask for nothing but reading ahead the image's files.

`start` reads all settings and plans parts, which takes as long to load as a small job runs.
Here nothing has to be ready before the job, so a few plain lines are read by hand. A file that is
not plain is left to `start`, which understands it or reports its fault.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping, Sequence

from bootseer import events
from bootseer.entrypoint import detached, exec_program, job_process, start_unconfigured

PART, PHASE = "image", "image.replay"
MODULE = "bootseer.imageprefetch.filemode.background_recorder"
DEFAULT_FILE = "bootseer.toml"
_MAX_FILE_BYTES = 1 << 16
_S_IFMT, _S_IFREG = 0o170000, 0o100000  # as in the module `stat`, which is not loaded
_HEADER = "[image]"
_FIELDS = {"traces": "place", "image": "image", "workload": "workload", "record": "record"}
_RECORD = ("auto", "always", "never")


def read_plain_request(path: str, environ: Mapping[str, str]) -> dict[str, str] | None:
    """The request for `background_recorder`, if the settings are plain and ask nothing else.

    Empty if they ask nothing at all. None if they have to be read in full.
    """
    if not start_unconfigured.has_only_harmless_variables(environ, "BOOTSEER_CONFIG"):
        return None
    try:
        if os.stat(path).st_mode & _S_IFMT != _S_IFREG:
            return None  # `-c <(…)`, say, can be read once
        with open(path, "rb", buffering=0) as file:
            text = file.read(_MAX_FILE_BYTES).decode("ascii")
    except (OSError, ValueError):
        return None
    values = parse_plain_settings(text) if len(text) < _MAX_FILE_BYTES else None
    if not values:
        return values
    if not values.get("traces") or values.get("record", "auto") not in _RECORD:
        return None
    return {_FIELDS[key]: value for key, value in values.items()}


def parse_plain_settings(text: str) -> dict[str, str] | None:
    """The texts of a settings file with the section `[image]` alone; None for any other file."""
    values: dict[str, str] = {}
    has_header = False
    for raw_line in text.split("\n"):
        line = raw_line.strip(" \t\r")
        if not line or line[0] == "#":
            continue
        if line == _HEADER and not has_header:
            has_header = True
            continue
        key, _, rest = line.partition("=")
        key, value = key.strip(" \t"), _parse_string(rest.strip(" \t"))
        if not has_header or key not in _FIELDS or key in values or value is None:
            return None
        values[key] = value
    return values if has_header else None


def _parse_string(text: str) -> str | None:
    """The text of a basic TOML string without escapes and without a comment, else None."""
    value = text[1:-1]
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return None
    return value if value.isprintable() and '"' not in value and "\\" not in value else None


def start(
    request: Mapping[str, str],
    job: Sequence[str],
    events_target: str,
    environ: MutableMapping[str, str],
) -> int:
    """Have the image's files read ahead alongside the job, and become the job.

    As PID 1 stay in front of it, to collect the process alongside. Returns the exit code if the job
    has ended or could not be started.
    """
    given = dict(environ)
    try:
        target = events_target or environ.get("BOOTSEER_EVENTS")
        default = events.default_directory(environ)
        with events.open_writer(target or None, environ, default) as writer:
            start_unconfigured.announce_start(writer, job, environ)
            _begin_replay(request, writer, environ)
    except Exception as error:  # the border: no fault of ours may keep a job from starting
        job_process.say(f"warning: {type(error).__name__}: {error}; starting the plain way")
        return exec_program.execute(job, given)
    if os.getpid() == 1:
        return job_process.mirror_result(job_process.run_command(job, environ, {}))
    return exec_program.execute(job, environ)


def _begin_replay(
    request: Mapping[str, str], writer: events.AnyWriter, environ: Mapping[str, str]
) -> None:
    try:
        detached.start_detached(PART, MODULE, {**request, "began_ns": time.time_ns()}, environ)
    except OSError as error:
        reason = f"its process could not be started: {error.strerror}"
        writer.point(PHASE, "fallback", {"bootseer.reason": reason})
