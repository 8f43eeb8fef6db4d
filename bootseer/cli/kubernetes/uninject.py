"""`bootseer uninject`."""

from __future__ import annotations

import click

from bootseer.cli.kubernetes.inject import (
    file_option,
    output_option,
    read_manifest,
    write_manifest,
)


@click.command(
    help="""Take out of a manifest what `bootseer inject` put in, and write it.

    Without edits in between, the original comes back to the byte; edits made outside of the
    marked lines survive.
    """
)
@file_option
@output_option
def command(path: str, output: str | None) -> int:
    from bootseer.kubernetes import manifest_text, uninject

    data, name = read_manifest(path)
    write_manifest(uninject.uninject(manifest_text.decode(data, name)), output)
    return 0
