"""`bootseer image files replay`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.image.files.group import load_trace, paths_option, trace_options
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option


@click.command("replay")
@trace_options
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
    callback=sizes.parse_size,
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
    **trace_parameters: Any,
) -> int:
    """Have the kernel read ahead what earlier starts read, in their order.

    Files that changed since, or were removed, are skipped. `bootseer start` with `[image] traces`
    does this in parallel with the job.
    """
    from bootseer.imageprefetch.filemode import roots
    from bootseer.imageprefetch.filemode.replay import ReplaySettings, replay

    trace = load_trace(**trace_parameters)
    replayed = replay(
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
                "files": replayed.files,
                "size_bytes": replayed.size_bytes,
                "duration_s": round(replayed.duration_s, 4),
                "skipped": replayed.skipped,
            }
        )
        return 0
    reasons = sorted(replayed.skipped.items())
    skipped = "".join(f"; {count} skipped: {reason}" for reason, count in reasons)
    click.echo(
        f"{replayed.files} files, {sizes.format_size(replayed.size_bytes)} asked for{skipped}"
    )
    return 0
