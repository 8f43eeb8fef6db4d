"""`bootseer stripe gc`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.shared.options import echo_json, json_option, options_of, store_options
from bootseer.cli.stripe.ls import printable
from bootseer.errors import BootseerError, UsageError

if TYPE_CHECKING:
    from bootseer.stripedfs.write.gc import Removed


@click.command("gc")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Keep what was replaced or written to more recently: a reader may have it open, an "
    "interrupted put may be continued.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@store_options
@json_option
@click.argument("url")
def command(url: str, grace: float, dry_run: bool, as_json: bool, **store: Any) -> int:
    """Remove the versions that URL no longer points to, and what killed writers left.

    URL is a checkpoint, or a folder of which every checkpoint is looked at. One that cannot be
    is told on standard error, and the exit code is then of that error.
    """
    from bootseer.storage.open import open_object, open_store
    from bootseer.stripedfs.format.pointer import folder_of
    from bootseer.stripedfs.write.gc import checkpoints, collect, collect_beside

    options = options_of(store)
    try:
        opened, name = open_object(url, options)
    except UsageError:
        opened, name = open_store(url, options), ""
    removed: list[Removed] = []
    code = 0

    def take(found: Iterator[Removed]) -> None:
        for gone in found:
            removed.append(gone)
            if not as_json:
                would = "would be removed" if dry_run else "removed"
                click.echo(f"{gone.name}: {gone.reason}, unused for {gone.age_s:.0f} s, {would}")

    try:
        below = checkpoints(opened, name)
        for each in below:
            try:
                take(collect(opened, each, grace_s=grace, dry_run=dry_run))
            except BootseerError as error:  # the others can be collected still
                if error.retryable or len(below) == 1:
                    raise
                code = code or error.exit_code
                click.echo(f"bootseer: {printable(f'{each}: {error}')}", err=True)
        if below != [folder_of(name) if name else ""]:
            take(collect_beside(opened, name, grace_s=grace, dry_run=dry_run))
    finally:
        opened.close()
    if as_json:
        echo_json([dataclasses.asdict(gone) for gone in removed])
    elif not removed:
        click.echo("nothing to remove")
    return code
