"""`bootseer stripe umount`: unmount checkpoints."""

from __future__ import annotations

import click


@click.command(
    "umount",
    help="""End the mount at DIR that `bootseer stripe mount` made.

    Fails while files are open in it; with --lazy its name is removed at once, and the rest when
    its last file is closed.
    """,
)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--lazy", is_flag=True, help="Unmount even while it is in use.")
def command(directory: str, lazy: bool) -> None:
    from bootseer.stripedfs.mount import mount

    mount.umount(directory, lazily=lazy)
