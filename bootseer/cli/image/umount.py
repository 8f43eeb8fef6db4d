"""`bootseer image umount`: unmount an image."""

from __future__ import annotations

import click

from bootseer.cli.image.options import runtime_option


@click.command(
    "umount",
    help="""End the mount at DIR that `bootseer image mount` made.

    Fails while files are open in it; with --lazy its name is removed at once, and the rest when
    its last file is closed. The image's server ends with its last mount, in whatever namespace.
    """,
)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--lazy", is_flag=True, help="Unmount even while it is in use.")
@runtime_option
def command(directory: str, lazy: bool, runtime: str) -> None:
    from bootseer.imageprefetch.mount import mount

    mount.umount(directory, lazily=lazy, runtime_dir=runtime)
