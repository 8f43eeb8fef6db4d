"""`bootseer stripe gc`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from bootseer.cli.options import echo_json, json_option, options_of, store_options
from bootseer.errors import UsageError


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

    URL is a checkpoint, or a folder of which every checkpoint is looked at.
    """
    from bootseer.storage.base import open_object, open_store
    from bootseer.stripedfs.collecting import checkpoints, collect

    options = options_of(store)
    try:
        opened, name = open_object(url, options)
    except UsageError:
        opened, name = open_store(url, options), ""
    removed = []
    try:
        for each in checkpoints(opened, name):
            for gone in collect(opened, each, grace_s=grace, dry_run=dry_run):
                removed.append(gone)
                if not as_json:
                    would = "would be removed" if dry_run else "removed"
                    click.echo(
                        f"{gone.name}: {gone.reason}, unused for {gone.age_s:.0f} s, {would}"
                    )
    finally:
        opened.close()
    if as_json:
        echo_json([dataclasses.asdict(gone) for gone in removed])
    elif not removed:
        click.echo("nothing to remove")
    return 0
