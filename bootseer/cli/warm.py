"""`bootseer warm`: make a node ready for a job without starting it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import click

from bootseer.cli.image.options import (
    image_cache_option,
    plain_http_option,
    runtime_option,
    workload_option,
)
from bootseer.cli.shared import options as shared_options
from bootseer.cli.shared import size_text, sizes
from bootseer.config import loading


@contextlib.contextmanager
def _output_to_errors() -> Iterator[None]:
    """Have what an install prints on standard error: standard output is for our result."""
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


_LOOK_S = 10.0
"""How long a registry may say nothing, while starts of the same image wait for this mount."""


@click.command(
    help="""Bring what a job needs to this node, without starting the job.

    The image with the dependencies above it (for `bootseer image run --config`), or the job's own
    environment (for `bootseer start`), and the checkpoint, as far as the settings name them. Behind
    -- stand the podman options of the job's container that show what its install reads. A start
    that runs meanwhile goes first; what is there already is not fetched again. The exit code is 0
    once all is on this node, else that of the first fault.
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
    "--image", "ref", envvar="BOOTSEER_WARM_IMAGE", metavar="REF", help="The job's image."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override any setting; may be repeated.",
)
@workload_option("Whose hot set is kept.")
@image_cache_option
@click.option(
    "--fill-rate",
    "fill_rate_bytes_s",
    envvar="BOOTSEER_IMAGE_FILL_RATE",
    callback=sizes.parse_size,
    metavar="SIZE",
    default="0",
    show_default=True,
    help="Bytes a second that filling an image may take; 0 = any.",
)
@plain_http_option
@runtime_option
@click.option("--status", is_flag=True, help="Only say what is here; exit code 1 if not all is.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- PODMAN OPTION...]")
@click.pass_context
def command(
    context: click.Context,
    /,
    path: str | None,
    ref: str | None,
    assignments: tuple[str, ...],
    workload: str,
    cache: str,
    fill_rate_bytes_s: int,
    plain_http: bool,
    runtime: str,
    status: bool,
    as_json: bool,
    options: tuple[str, ...],
) -> int:
    from bootseer.cli.image import by_agent
    from bootseer.entrypoint import job_process
    from bootseer.entrypoint.warming import warm
    from bootseer.imageprefetch.mount.settings import MountSettings

    config = loading.load_strictly(path, None, dict(map(loading.parse_flag, assignments)))
    mount = None
    if ref:
        mount = MountSettings(
            ref=ref,
            directory="",
            workload=workload,
            cache=cache,
            runtime=runtime,
            fill_rate_bytes_s=fill_rate_bytes_s,
            look_s=_LOOK_S,
            plain_http=plain_http or None,
        )
    elif options:
        raise click.UsageError("podman's options belong to an image: name it with --image")
    settings = warm.WarmSettings(config, mount, options, runtime)
    if not status and mount is not None:
        context.call_on_close(lambda: by_agent.leave_agent(runtime))
    act = warm.look if status else warm.warm
    with _output_to_errors():
        state = act(settings, job_process.say, os.environ)
    if as_json:
        shared_options.echo_json(state.as_document())
        return state.exit_code
    for part in state.parts:
        word = "ready" if part.ready else "not ready"
        size = ""
        if part.total_bytes:
            here, whole = map(size_text.format_size, (part.present_bytes, part.total_bytes))
            size = f", {here} of {whole} here"
        reason = f": {part.reason}" if part.reason else ""
        click.echo(f"{part.part}  {word}{size}  {part.name}{reason}")
    return state.exit_code
