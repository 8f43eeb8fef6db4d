"""A start of which only its image's files are asked: the job begins at once, all else beside it.

`start` reads settings in full and plans parts, which takes as long to load as a small job does.
Here nothing has to be ready before the job, so a few plain lines are read by hand; whatever is
not plain goes the ordinary way, where it is understood or complained about.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping, Sequence

from bootseer import events
from bootseer.entrypoint import detached, exec_program, start_unconfigured, transparent_child

PART, PHASE = "image", "image.replay"
MODULE = "bootseer.imageprefetch.filemode.background_recorder"
DEFAULT_FILE = "bootseer.toml"
_MOST_BYTES = 1 << 16
_KIND, _FILE = 0o170000, 0o100000  # in st_mode; the module `stat` would say S_IFMT and S_IFREG
_HEADER = "[image]"
_FIELDS = {"traces": "place", "image": "image", "workload": "workload", "record": "record"}
_RECORD = ("auto", "always", "never")


def asked(path: str, environ: Mapping[str, str]) -> dict[str, str] | None:
    """What the settings ask of `background_recorder`, if they ask nothing else and are plain.

    Empty: they ask nothing at all. None: they are to be read in full.
    """
    if not start_unconfigured.is_harmless(environ, "BOOTSEER_CONFIG"):
        return None
    try:
        if os.stat(path).st_mode & _KIND != _FILE:
            return None  # `-c <(…)`, say, can be read once
        with open(path, "rb", buffering=0) as file:
            text = file.read(_MOST_BYTES).decode("ascii")
    except (OSError, ValueError):
        return None
    found = plain(text) if len(text) < _MOST_BYTES else None
    if not found:
        return found
    if not found.get("traces") or found.get("record", "auto") not in _RECORD:
        return None
    return {_FIELDS[key]: value for key, value in found.items()}


def plain(text: str) -> dict[str, str] | None:
    """The strings of a settings file that has the section `[image]` alone; None of any other."""
    found: dict[str, str] = {}
    headed = False
    for whole in text.split("\n"):
        line = whole.strip(" \t\r")
        if not line or line[0] == "#":
            continue
        if line == _HEADER and not headed:
            headed = True
            continue
        key, _, rest = line.partition("=")
        key, value = key.strip(" \t"), _string(rest.strip(" \t"))
        if not headed or key not in _FIELDS or key in found or value is None:
            return None
        found[key] = value
    return found if headed else None


def _string(text: str) -> str | None:
    """A TOML string without escapes, and nothing behind it."""
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
    """Have the image's files read ahead beside the job, and become it.

    As process 1 stay in front of it: what goes on beside will be ours to collect. Returns the exit
    code, where the job is over or could not be started.
    """
    given = dict(environ)
    try:
        target = events_target or environ.get("BOOTSEER_EVENTS")
        default = events.default_directory(environ)
        with events.open_writer(target or None, environ, default) as writer:
            start_unconfigured.announce(writer, job, environ)
            _begin(request, writer, environ)
    except Exception as error:  # the border: nothing of this must keep a job from starting
        transparent_child.say(f"warning: {type(error).__name__}: {error}; starting the plain way")
        return exec_program.execute(job, given)
    return _in_front(job, environ) if os.getpid() == 1 else exec_program.execute(job, environ)


def _begin(
    request: Mapping[str, str], writer: events.AnyWriter, environ: Mapping[str, str]
) -> None:
    try:
        detached.begin(PART, MODULE, {**request, "began_ns": time.time_ns()}, environ)
    except OSError as error:
        reason = f"its process could not be started: {error.strerror}"
        writer.point(PHASE, "fallback", {"bootseer.reason": reason})


def _in_front(job: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        return transparent_child.leave(transparent_child.start(job, environ, {}).wait())
    except OSError as error:
        return transparent_child.leave(transparent_child.failure(job, error))
