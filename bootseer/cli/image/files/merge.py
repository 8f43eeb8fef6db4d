"""`bootseer image files merge`."""

from __future__ import annotations

import click

from bootseer.cli.image.files.group import read_trace_file, write_trace_file
from bootseer.cli.shared import sizes


@click.command("merge")
@click.option(
    "--share",
    envvar="BOOTSEER_IMAGE_SHARE",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Drop what fewer than that share of the starts read.",
)
@click.argument("output", type=click.Path())
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
def command(share: float, output: str, files: tuple[str, ...]) -> int:
    """Merge the traces FILE... into OUTPUT; of a file that changed, the later ones are believed."""
    from bootseer.imageprefetch.filemode import file_trace

    merged = file_trace.merge([read_trace_file(file) for file in files])
    merged = file_trace.prune(merged, share)
    write_trace_file(output, merged)
    click.echo(
        f"{output}: {merged.recordings} recordings, {merged.trace.starts} of them whole cold "
        f"starts; {len(merged.files)} files, {sizes.format_size(merged.trace.touched_bytes())}"
    )
    return 0
