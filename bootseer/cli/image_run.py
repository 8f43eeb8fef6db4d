"""`bootseer image run`: a container of an image that is not pulled first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image_mount import events_option, tell, write_events_to
from bootseer.cli.image_options import (
    BeforeDashes,
    plain_http_option,
    podman_arguments,
    serving_options,
    words_behind,
)

if TYPE_CHECKING:
    from bootseer.imageprefetch.lazyrun import Way
    from bootseer.imageprefetch.mounting import Mounted, MountSettings


@click.command(
    "run",
    cls=BeforeDashes,
    options_metavar="[OPTIONS]",
    help="""Run a container of the image REF by podman, on a tree that is mounted at once.

    What `bootseer image mount`, `podman run --rm` and `umount` would do: behind REF stand
    podman's own options, behind -- the command, as for `podman run`; with none, the image's own.
    The image's environment, entry point, directory and user hold, what the container writes is
    thrown away, and the exit code is the container's. An image that cannot be mounted, one
    without a block image above all, is pulled and run by podman; one line says why.
    """,
)
@serving_options
@events_option
@plain_http_option
@podman_arguments("[-- COMMAND...]")
@click.pass_context
def command(
    context: click.Context, /, ref: str, options: tuple[str, ...], plain_http: bool, **given: Any
) -> int:
    from bootseer.imageprefetch import lazyrun
    from bootseer.imageprefetch.mounting import MountSettings
    from bootseer.storage.options import StoreOptions

    # Podman's own pull waits for nobody: what fails for longer is pulled plainly.
    hurried = StoreOptions(retry_s=5.0, stall_s=5.0)
    write_events_to(given["events_dir"])
    mount = MountSettings(
        ref=ref, directory="", plain_http=plain_http or None, options=hurried, **given
    )
    settings = lazyrun.RunSettings(mount=mount, options=options, words=words_behind(context) or ())
    return lazyrun.run(settings, _tell, _mount)


def _mount(settings: MountSettings) -> Mounted:
    """Have the node's agent mount, which has all imported that it takes; else do it here."""
    import json
    import os

    from bootseer.cli import agent_client
    from bootseer.errors import StoreUnavailableError
    from bootseer.fuse import background
    from bootseer.imageprefetch import mounting

    place = ["--runtime", settings.runtime] if settings.runtime else []
    readable, writable = os.pipe()
    with open(readable, "rb") as told:
        try:
            asked = [*agent_client.MOUNTING, mounting.encoded(settings), *place]
            code = agent_client.ask(asked, output=writable)
        finally:
            os.close(writable)
        if code is None:
            return mounting.mount(settings)
        line = told.readline()
    if not line:
        raise StoreUnavailableError("the agent ended while it mounted; start it again")
    answer = json.loads(line)
    if "error" in answer:
        raise background.unpacked(answer)
    return mounting.Mounted(**{**answer, "notes": tuple(answer["notes"])})


def _tell(way: Way) -> None:
    if way.mounted is not None:
        tell(way.mounted)
    else:
        click.echo(f"bootseer: podman pulls the image: {way.reason}", err=True)
