"""`bootseer stripe gc`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.shared.options import echo_json, json_option, store_options, take_store_options
from bootseer.cli.stripe.ls import escape_unprintable
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
def command(url: str, grace: float, dry_run: bool, as_json: bool, **store_parameters: Any) -> int:
    """Remove the versions that URL no longer points to, and what killed writers left.

    URL is a checkpoint, or a folder of which every checkpoint is looked at. One that cannot be
    is reported on standard error, and the exit code is then of that error.
    """
    from bootseer.storage.open import open_object, open_store
    from bootseer.stripedfs.format.pointer import checkpoint_folder
    from bootseer.stripedfs.write.gc import collect_garbage, collect_temporaries, find_checkpoints

    options = take_store_options(store_parameters)
    try:
        store, name = open_object(url, options)
    except UsageError:
        store, name = open_store(url, options), ""
    removed: list[Removed] = []
    code = 0

    def remove_all(entries: Iterator[Removed]) -> None:
        for entry in entries:  # the iterator removes an entry, then yields it
            removed.append(entry)
            if not as_json:
                result = "would be removed" if dry_run else "removed"
                age = f"unused for {entry.age_s:.0f} s"
                click.echo(f"{entry.name}: {entry.reason}, {age}, {result}")

    try:
        names = find_checkpoints(store, name)
        for checkpoint in names:
            try:
                remove_all(collect_garbage(store, checkpoint, grace_s=grace, dry_run=dry_run))
            except BootseerError as error:  # the other checkpoints can still be collected
                if error.retryable or len(names) == 1:
                    raise
                code = code or error.exit_code
                click.echo(f"bootseer: {escape_unprintable(f'{checkpoint}: {error}')}", err=True)
        if names != [checkpoint_folder(name) if name else ""]:
            remove_all(collect_temporaries(store, name, grace_s=grace, dry_run=dry_run))
    finally:
        store.close()
    if as_json:
        echo_json([dataclasses.asdict(entry) for entry in removed])
    elif not removed:
        click.echo("nothing to remove")
    return code
