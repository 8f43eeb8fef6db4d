"""`bootseer stripe cat`."""

from __future__ import annotations

import sys
from typing import Any

import click

from bootseer.cli.shared.options import options_of, store_options
from bootseer.cli.stripe.group import jobs_option
from bootseer.errors import UsageError
from bootseer.system.regular_files import write_fully

CLOSED_PIPE = 128 + 13


@click.command("cat")
@jobs_option("Requests at once. Default: what the store is read fastest with, up to 32.")
@store_options
@click.argument("url")
def command(url: str, jobs: int | None, **store: Any) -> int:
    """Write the file URL, striped or plain, to standard output, verified and in order.

    URL may also name a file within a directory checkpoint.
    """
    from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
    from bootseer.stripedfs.read.cat import stream
    from bootseer.stripedfs.read.locate import locate
    from bootseer.stripedfs.read.namespace import source_of

    if sys.stdout is None:  # and its number may be some other file's
        raise UsageError("standard output is closed; redirect it to where the file shall go")
    settings = FetchSettings(connections=jobs) if jobs else FetchSettings()
    opened, found = locate(url, options_of(store))
    try:
        source = source_of(opened, found)
        sys.stdout.flush()
        with Fetcher(settings) as fetcher:
            for piece in stream(source, fetcher):
                write_fully(sys.stdout.fileno(), piece)
    except BrokenPipeError:
        return CLOSED_PIPE  # whoever reads has enough: no fault, so no message
    finally:
        opened.close()
    return 0
