"""`bootseer image run`: run a container of an image that is not pulled first."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.image.mount import events_option
from bootseer.cli.image.options import (
    PodmanStyleCommand,
    deadline_option,
    hot_option,
    log_file_option,
    plain_http_option,
    platform_option,
    podman_arguments,
    podman_platform,
    serving_options,
    words_after_dashes,
)


@click.command(
    "run",
    cls=PodmanStyleCommand,
    options_metavar="[OPTIONS]",
    help="""Run a container of the image REF by podman, on a tree that is mounted at once.

    What `bootseer image mount`, `podman run --rm` and `umount` would do: behind REF stand
    podman's own options, behind -- the command, as for `podman run`; with none, the image's own.
    The image's environment, entry point, directory and user hold, what the container writes is
    thrown away, and the exit code is the container's. An image that cannot be mounted, one
    without a block image or for another platform above all, is pulled and run by podman; one line
    says why.

    With --config, the checkpoint of that file's section [checkpoint] is mounted at the same time,
    shown to the container, and fetched while the job imports. What cannot be brought so is brought
    by its plain command, which runs in the container before the job.
    """,
)
@click.option(
    "--config",
    metavar="FILE",
    envvar="BOOTSEER_IMAGE_RUN_CONFIG",
    default="",
    help="Settings (bootseer.toml) of what the container's job needs besides its image.",
)
@serving_options
@hot_option
@events_option
@deadline_option
@plain_http_option
@log_file_option
@platform_option
@podman_arguments("[-- COMMAND...]")
@click.pass_context
def command(
    context: click.Context,
    /,
    ref: str,
    options: tuple[str, ...],
    plain_http: bool,
    platform: str,
    **fields: Any,
) -> int:
    from bootseer.cli.image import direct

    fields["plain_http"] = plain_http or None
    options = (*podman_platform(platform), *options)
    return direct.run({"ref": ref, **fields}, options, words_after_dashes(context) or ())
