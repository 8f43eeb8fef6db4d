"""`bootseer stripe rm`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.shared.options import store_options, take_store_options


@click.command("rm")
@click.option("--force", is_flag=True, help="Even while it is being written.")
@store_options
@click.argument("url")
def command(url: str, force: bool, **store_parameters: Any) -> int:
    """Remove the striped checkpoint URL with all its versions.

    Readers that have it open lose it. A plain file is never removed.
    """
    from bootseer.storage.open import open_object
    from bootseer.stripedfs.write.gc import remove_checkpoint

    store, name = open_object(url, take_store_options(store_parameters))
    try:
        click.echo(f"{remove_checkpoint(store, name, force=force)}: removed")
    finally:
        store.close()
    return 0
