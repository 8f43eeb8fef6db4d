"""A start for which nothing is configured: it is told, and the job begins.

`start` does the same, but what it reads settings and runs parts with takes four times as long to
load as all of this. Importable on Python 3.9.
"""

from __future__ import annotations

import os

from bootseer import events
from bootseer.entrypoint import exec_program, transparent_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

_HARMLESS = frozenset(
    (
        "BOOTSEER_CACHE",
        "BOOTSEER_EVENTS",
        "BOOTSEER_INJECTED",
        "BOOTSEER_JOB_UID",
        "BOOTSEER_STORE",
        "BOOTSEER_TRACEPARENT",
    )
)
"""Variables that give no part anything to do. Any other may: then the settings are read."""


def is_all(environ: Mapping[str, str]) -> bool:
    """Whether nothing but this is asked for: no `bootseer.toml` here, no variable that may ask."""
    return is_harmless(environ) and not os.path.exists("bootseer.toml")


def is_harmless(environ: Mapping[str, str], *more: str) -> bool:
    """Whether no variable, those named in `more` apart, gives a part anything to do."""
    for name, value in environ.items():
        if name.startswith("BOOTSEER_") and name not in _HARMLESS and name not in more and value:
            return False
    return True


def start(job: Sequence[str], events_target: str, environ: MutableMapping[str, str]) -> int:
    """Replace this process by the job; returns its exit code only where that fails."""
    given = dict(environ)
    try:
        target = events_target or environ.get("BOOTSEER_EVENTS")
        default = events.default_directory(environ)
        with events.open_writer(target or None, environ, default) as writer:
            announce(writer, job, environ)
    except Exception as error:  # the border: events must not keep a job from starting
        transparent_child.say(f"warning: {type(error).__name__}: {error}; starting the plain way")
        return exec_program.execute(job, given)
    return exec_program.execute(job, environ)


def announce(
    writer: events.AnyWriter, job: Sequence[str], environ: MutableMapping[str, str]
) -> None:
    """Tell that a start begins, and make its events the parents of the job's."""
    if "BOOTSEER_TRACEPARENT" not in environ and isinstance(writer, events.Writer):
        from bootseer.events import resource

        if resource.in_container():
            from bootseer.entrypoint.container_start import write_container_start

            write_container_start(writer)
    environ.update(events.child_environment(writer, None, environ))
    writer.point("start", attributes={"bootseer.command": events.redact(job)})
