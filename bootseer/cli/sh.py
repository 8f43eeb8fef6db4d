"""`bootseer sh`: print the path of the shell library."""

from __future__ import annotations

import os

import click

from bootseer import events


@click.command()
def command() -> None:
    """Print the path of the shell library, to be sourced: `. "$(bootseer sh)"`.

    It gives bash and POSIX shells bootseer_begin, bootseer_end, bootseer_phase and
    bootseer_point, and needs no Python once it is sourced.
    """
    click.echo(os.path.join(os.path.dirname(events.__file__), "bootseer.sh"))
