"""Start a job for which nothing is configured: write the start's event, then become the job.

`start` does the same, but its modules for settings and parts take four times as long to load as
this one. Importable on Python 3.9.
"""

from __future__ import annotations

import os

from bootseer import events
from bootseer.entrypoint import exec_program, job_process

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
"""Variables that give no part anything to do. With any other one the settings have to be read."""


def is_unconfigured(environ: Mapping[str, str]) -> bool:
    """Whether there is no `bootseer.toml` here and no variable that gives a part anything to do."""
    return has_only_harmless_variables(environ) and not os.path.exists("bootseer.toml")


def has_only_harmless_variables(environ: Mapping[str, str], *more: str) -> bool:
    """Whether no variable, except those named in `more`, gives a part anything to do."""
    for name, value in environ.items():
        if name.startswith("BOOTSEER_") and name not in _HARMLESS and name not in more and value:
            return False
    return True


def start(job: Sequence[str], events_target: str, environ: MutableMapping[str, str]) -> int:
    """Replace this process by the job; returns an exit code only if that fails."""
    given = dict(environ)
    try:
        target = events_target or environ.get("BOOTSEER_EVENTS")
        default = events.default_directory(environ)
        with events.open_writer(target or None, environ, default) as writer:
            announce_start(writer, job, environ)
    except Exception as error:  # the border: no fault of the events may keep a job from starting
        job_process.say(f"warning: {type(error).__name__}: {error}; starting the plain way")
        return exec_program.execute(job, given)
    return exec_program.execute(job, environ)


def announce_start(
    writer: events.AnyWriter,
    job: Sequence[str],
    environ: MutableMapping[str, str],
    *,
    makes_container: bool = False,
) -> None:
    """Write the event of a start, and set the variables that make the job's events belong to it.

    `makes_container`: the job gets a container of its own, and the one that this process may be in
    began before the start.
    """
    is_first = "BOOTSEER_TRACEPARENT" not in environ and not makes_container
    if is_first and isinstance(writer, events.Writer):
        from bootseer.events import resource

        if resource.in_container():
            from bootseer.entrypoint.container_start import write_container_start

            write_container_start(writer)
    environ.update(events.child_environment(writer, None, environ))
    writer.point("start", attributes={"bootseer.command": events.redact(job)})
