"""`bootseer stripe verify`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from bootseer.cli.shared import progress, sizes
from bootseer.cli.shared.options import echo_json, json_option, store_options, take_store_options
from bootseer.cli.stripe.group import jobs_option
from bootseer.errors import CorruptDataError


@click.command("verify")
@jobs_option("Requests at once. Default: what the store is read fastest with, up to 32.")
@store_options
@json_option
@click.argument("url")
def command(url: str, jobs: int | None, as_json: bool, **store_parameters: Any) -> int:
    """Read the checkpoint URL whole and compare every byte with its digest.

    Names each damaged stripe and chunk; the exit code is 6 when there is any.
    """
    from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
    from bootseer.storage.open import open_object
    from bootseer.stripedfs.read.verify import describe_damage, verify_in_store

    settings = FetchSettings(connections=jobs) if jobs else FetchSettings()
    store, name = open_object(url, take_store_options(store_parameters))
    try:
        with Fetcher(settings) as fetcher, progress.show_progress(name) as meter:
            report = verify_in_store(store, name, fetcher, progress=meter)
    finally:
        store.close()
    if as_json:
        echo_json(
            {
                "version": report.version.pointer.version,
                "files": report.files,
                "size_bytes": report.size_bytes,
                "checked_bytes": report.checked_bytes,
                "damages": [dataclasses.asdict(damage) for damage in report.damages],
            }
        )
    else:
        for damage in report.damages:
            click.echo(describe_damage(damage))
    if report.damages:
        raise CorruptDataError(
            f"{report.version.folder} has {len(report.damages)} damaged places; put it anew"
        )
    if not as_json:
        click.echo(f"{report.version.folder}: {sizes.format_size(report.checked_bytes)} are right")
    return 0
