"""`bootseer start`: prepare a job's inputs, then become the job."""

from __future__ import annotations

import click

from bootseer.config import loading
from bootseer.config.values import Value


@click.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    help="""Start a job: make its inputs ready through the parts of bootseer, then become the job.

    JOB is the job's command with its arguments, after `--`. A fault of ours never keeps it from
    starting: the part in question goes the plain way, and the report has the reason. A failed
    install command ends the start with its exit code, as `INSTALL && JOB` would.
    """,
)
@click.option(
    "-c",
    "--config",
    "path",
    metavar="FILE",
    envvar="BOOTSEER_CONFIG",
    help="Settings; default: bootseer.toml of the working directory, if there.",
)
@click.option(
    "--events",
    envvar="BOOTSEER_EVENTS",
    metavar="PATH",
    help="Where events go: overrides job.events.",
)
@click.option(
    "--store", envvar="BOOTSEER_STORE", metavar="DIR", help="Snapshots: overrides deps.store."
)
@click.option(
    "--cache", envvar="BOOTSEER_CACHE", metavar="DIR", help="This node's: overrides deps.cache."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override any setting; may be repeated.",
)
@click.option(
    "--check", is_flag=True, help="Only check the settings: name the first fault, exit with code 2."
)
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
def command(
    path: str | None,
    events: str | None,
    store: str | None,
    cache: str | None,
    assignments: tuple[str, ...],
    check: bool,
    job: tuple[str, ...],
) -> int:
    options = {"job.events": events, "deps.store": store, "deps.cache": cache}
    flags: dict[str, Value] = {key: value for key, value in options.items() if value}
    # `--set` comes last: it overrides the options above, which the environment may have set.
    flags.update(loading.parse_flag(assignment) for assignment in assignments)
    if check:
        loading.load_strictly(path, None, flags)
        return 0
    if not job:
        raise click.UsageError(
            "no job given; write it after `--`: bootseer start -- python train.py"
        )
    from bootseer.entrypoint import job_process, start

    return start.start(
        loading.load_tolerantly(path, None, flags), job, job_process.original_environment()
    )
