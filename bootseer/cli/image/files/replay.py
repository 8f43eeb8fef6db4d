"""`bootseer image files replay`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.image.files.group import paths_option, place_options, trace_of
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option


@click.command("replay")
@place_options
@paths_option
@click.option(
    "--share",
    envvar="BOOTSEER_IMAGE_SHARE",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="Least share of the recorded starts that must have read a range.",
)
@click.option(
    "--threads",
    envvar="BOOTSEER_IMAGE_THREADS",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    metavar="N",
    help="Files read ahead at once.",
)
@click.option(
    "--limit",
    "limit_bytes",
    envvar="BOOTSEER_IMAGE_LIMIT",
    callback=sizes.parsed,
    default=None,
    metavar="SIZE",
    help="Read ahead no more than that; default: half of the memory that is free.",
)
@json_option
def command(
    paths: tuple[str, ...],
    share: float,
    threads: int,
    limit_bytes: int | None,
    as_json: bool,
    **which: Any,
) -> int:
    """Have the kernel read ahead what earlier starts read, in their order.

    Files that changed since, or are gone, are skipped. `bootseer start` with `[image] traces`
    does this beside the job.
    """
    from bootseer.imageprefetch.filemode import roots
    from bootseer.imageprefetch.filemode.replay import ReplaySettings, replay

    trace = trace_of(**which)
    done = replay(
        trace,
        ReplaySettings(
            roots=paths or roots.DEFAULT_ROOTS,
            share=share,
            threads=threads,
            most_bytes=limit_bytes,
        ),
    )
    if as_json:
        echo_json(
            {
                "files": done.files,
                "size_bytes": done.size_bytes,
                "duration_s": round(done.duration_s, 4),
                "skipped": done.skipped,
            }
        )
        return 0
    skipped = "".join(f"; {count} skipped: {why}" for why, count in sorted(done.skipped.items()))
    click.echo(f"{done.files} files, {sizes.shown(done.size_bytes)} asked for{skipped}")
    return 0
