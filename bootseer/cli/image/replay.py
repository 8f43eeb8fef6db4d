"""`bootseer image replay`."""

from __future__ import annotations

import click

from bootseer.cli.image.hotset.group import (
    cache_directory,
    describe_workload,
    which_workload_option,
)
from bootseer.cli.image.options import image_access_options, runtime_option
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option


@click.command("replay")
@which_workload_option
@click.option(
    "--threads",
    envvar="BOOTSEER_IMAGE_REPLAY_THREADS",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    metavar="N",
    help="Files that are read ahead at a time.",
)
@image_access_options
@runtime_option
@json_option
@click.argument("ref")
@click.argument("directory", metavar="DIR", type=click.Path())
def command(
    ref: str,
    directory: str,
    workload: str,
    threads: int,
    cache: str,
    runtime: str,
    plain_http: bool,
    as_json: bool,
) -> int:
    """Read a hot set of the image REF ahead in its tree at DIR.

    `image mount` replays its workload's hot set by itself. This is for a further workload of an
    image that is mounted already, and for a tree that another program unpacked on a slow disk.
    """
    import dataclasses

    from bootseer.imageprefetch.mount.hotset_replay import replay

    replayed = replay(
        ref,
        directory,
        workload,
        cache=cache_directory(cache),
        threads=threads,
        runtime_dir=runtime,
        plain_http=plain_http or None,
    )
    if as_json:
        echo_json(dataclasses.asdict(replayed))
        return 0
    click.echo(
        f"{sizes.format_size(replayed.bytes)} of {replayed.files} files, "
        f"{describe_workload(replayed.workload)}"
    )
    return 0
