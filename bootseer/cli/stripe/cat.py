"""`bootseer stripe cat`."""

from __future__ import annotations

import sys
from typing import Any

import click

from bootseer.cli.shared.options import store_options, take_store_options
from bootseer.cli.stripe.group import jobs_option
from bootseer.errors import UsageError
from bootseer.system.regular_files import write_fully

CLOSED_PIPE = 128 + 13


@click.command("cat")
@jobs_option("Requests at once. Default: what the store is read fastest with, up to 32.")
@store_options
@click.argument("url")
def command(url: str, jobs: int | None, **store_parameters: Any) -> int:
    """Write the file URL, striped or plain, to standard output, verified and in order.

    URL may also name a file within a directory checkpoint.
    """
    from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
    from bootseer.stripedfs.read.cat import stream_file
    from bootseer.stripedfs.read.open import locate, open_file

    if sys.stdout is None:  # its descriptor may be another file's by now
        raise UsageError("standard output is closed; redirect it to where the file shall go")
    settings = FetchSettings(connections=jobs) if jobs else FetchSettings()
    store, entry = locate(url, take_store_options(store_parameters))
    try:
        source = open_file(store, entry)
        sys.stdout.flush()
        with Fetcher(settings) as fetcher:
            for piece in stream_file(source, fetcher):
                write_fully(sys.stdout.fileno(), piece)
    except BrokenPipeError:
        return CLOSED_PIPE  # the reader has enough: not a fault, so there is no message
    finally:
        store.close()
    return 0
