"""`bootseer stripe get`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.shared import progress, sizes
from bootseer.cli.shared.options import echo_json, json_option, store_options, take_store_options
from bootseer.cli.stripe.group import jobs_option, resume_option


@click.command("get")
@jobs_option("Requests at once. Default: what the store is read fastest with, up to 32.")
@resume_option("Keep what an interrupted get of the same checkpoint left, after verifying it.")
@store_options
@json_option
@click.argument("url")
@click.argument("destination", metavar="DST", type=click.Path())
def command(
    url: str,
    destination: str,
    jobs: int | None,
    resume: bool,
    as_json: bool,
    **store_parameters: Any,
) -> int:
    """Fetch the checkpoint or plain file URL into DST, verified.

    A file becomes DST, or lies in it where DST is a folder. A directory checkpoint becomes the
    folder DST, which must be new or empty. DST appears in one step when all of it has arrived.
    """
    from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
    from bootseer.stripedfs.read.get import get_from_store
    from bootseer.stripedfs.read.open import locate

    options = take_store_options(store_parameters)
    settings = FetchSettings(connections=jobs) if jobs else FetchSettings()
    store, entry = locate(url, options)
    try:
        with Fetcher(settings) as fetcher, progress.show_progress(entry.name) as meter:
            report = get_from_store(
                store, entry, destination, fetcher, resume=resume, progress=meter
            )
    finally:
        store.close()
    if as_json:
        echo_json(
            {
                "path": report.path,
                "files": report.files,
                "size_bytes": report.size_bytes,
                "kept_bytes": report.kept_bytes,
            }
        )
        return 0
    kept = f", {sizes.format_size(report.kept_bytes)} kept" if report.kept_bytes else ""
    files = f", {report.files} files" if report.files != 1 else ""
    click.echo(f"{report.path}: {sizes.format_size(report.size_bytes)}{files}{kept}")
    return 0
