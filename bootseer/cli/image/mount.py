"""`bootseer image mount`: mount an image's tree without pulling it first."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from bootseer.cli.image.options import (
    WINDOW_S,
    deadline_option,
    hot_option,
    log_file_option,
    plain_http_option,
    platform_option,
    podman_platform,
    serving_options,
)
from bootseer.cli.shared.options import json_option


def _check_events_directory(context: click.Context, option: click.Parameter, value: str) -> str:
    """Return the directory to look in for first steps: a click callback.

    BOOTSEER_EVENTS may also name a file, which is not searched; then it is "".
    """
    if not value.endswith(".jsonl"):
        return value
    if context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT:
        return ""
    raise click.BadParameter("name the directory of event files, no file of it")


events_option = click.option(
    "--events",
    "events_dir",
    envvar=["BOOTSEER_IMAGE_EVENTS", "BOOTSEER_EVENTS"],
    callback=_check_events_directory,
    default="",
    metavar="DIR",
    help="Recording ends when a `first_step` is done, by this directory of event files; ours go "
    "there too, unless BOOTSEER_EVENTS names another place.",
)


@click.command(
    "mount",
    help="""Mount the image REF at DIR; returns when the tree is there.

    Its bytes arrive as they are read; the hot set of the workload, what its starts read, comes
    first and ahead of need. `podman run --rootfs DIR:O CMD` runs a container in it. Needs root
    and the image's block image (`bootseer image build REF`); without one, pull the image the
    plain way. What programs read until the first step is recorded for the next hot set.
    """,
)
@serving_options
@click.option(
    "--nosuid",
    envvar="BOOTSEER_IMAGE_NOSUID",
    is_flag=True,
    help="Setuid programs and devices of the image do not work at DIR.",
)
@hot_option
@click.option(
    "--record-window",
    "record_window_s",
    envvar="BOOTSEER_IMAGE_RECORD_WINDOW",
    metavar="SECONDS",
    type=WINDOW_S,
    default=120.0,
    show_default=True,
    help="Recording ends so long after the mount at the latest.",
)
@events_option
@deadline_option
@click.option(
    "--loop/--no-loop",
    envvar="BOOTSEER_IMAGE_LOOP",
    default=None,
    help="Over loop devices or not; by default where the kernel (before 6.12) needs them.",
)
@plain_http_option
@log_file_option
@platform_option
@json_option
@click.argument("ref")
@click.argument("directory", metavar="DIR", type=click.Path())
def command(
    ref: str,
    directory: str,
    hot: bool,
    plain_http: bool,
    as_json: bool,
    platform: str,
    **fields: Any,
) -> None:
    from bootseer.cli.image import direct
    from bootseer.imageprefetch.run import podman_options

    podman_options.check_platform(
        podman_platform(platform), instead="; pull the image the plain way"
    )
    fields["plain_http"] = plain_http or None
    direct.mount({"ref": ref, "directory": directory, "hot": hot, "as_json": as_json, **fields})
