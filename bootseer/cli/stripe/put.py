"""`bootseer stripe put`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.shared import progress, sizes
from bootseer.cli.shared.options import echo_json, json_option, store_options, take_store_options
from bootseer.cli.stripe.group import jobs_option, resume_option

if TYPE_CHECKING:
    from bootseer.stripedfs.write.put import PutReport
    from bootseer.stripedfs.write.write_settings import WriteSettings


@click.command("put")
@click.option(
    "--width",
    type=click.IntRange(1, 4096),
    default=None,
    metavar="N",
    help="Stripes of a file. Default: two a server where the store can place them, at least 6 "
    "and at most 24; else 6.",
)
@click.option(
    "--chunk",
    callback=sizes.parse_size,
    default="4MiB",
    show_default=True,
    metavar="SIZE",
    help="Bytes that are read and verified at once; files of a directory that are smaller are "
    "stored as they are.",
)
@click.option(
    "--replication",
    type=click.IntRange(1, 512),
    default=None,
    metavar="N",
    help="Copies of each byte. Default: the store's own.",
)
@click.option(
    "--placement",
    type=click.Choice(["auto", "steered", "store"]),
    default="auto",
    show_default=True,
    help="Steer stripes to different servers, or leave it to the store; auto steers at "
    "replication 1, where it pays.",
)
@click.option(
    "--block",
    callback=sizes.parse_size,
    default=None,
    metavar="SIZE",
    help="The store's block size, a multiple of the chunk. Default: the store's own.",
)
@jobs_option(
    "Stripes and small files written at once, one chunk of memory each and 256 MiB together. "
    "Default: the width, or what the store is read fastest with where that is more."
)
@resume_option("Continue an interrupted put of the same source.")
@click.option(
    "--follow-links",
    is_flag=True,
    help="Store what links point to. Without it links within the directory are kept as links, "
    "and others refused.",
)
@store_options
@json_option
@click.argument("source", type=click.Path(readable=False))
@click.argument("url")
def command(
    source: str, url: str, resume: bool, follow_links: bool, as_json: bool, **parameters: Any
) -> int:
    """Store the file or directory SOURCE as the checkpoint URL.

    The checkpoint appears, or replaces the one before, in one step when all of it is stored.
    Readers of the previous version can go on until `gc`.
    """
    from bootseer.storage.open import open_object
    from bootseer.stripedfs.write.put import put_into

    store, name = open_object(url, take_store_options(parameters))
    try:
        title = os.path.basename(source.rstrip("/")) or source
        with progress.show_progress(title) as meter:
            report = put_into(
                store,
                name,
                source,
                settings=_make_settings(parameters),
                resume=resume,
                follow_links=follow_links,
                progress=meter,
            )
    finally:
        store.close()
    _print_report(report, as_json=as_json)
    return 0


def _make_settings(parameters: dict[str, Any]) -> WriteSettings:
    from bootseer.stripedfs.write.write_settings import WriteSettings

    return WriteSettings(
        width=parameters["width"] or 0,
        chunk_bytes=parameters["chunk"],
        replication=parameters["replication"] or 0,
        block_bytes=parameters["block"] or 0,
        placement=parameters["placement"],
        jobs=parameters["jobs"] or 0,
    )


def _print_report(report: PutReport, *, as_json: bool) -> None:
    pointer = report.version.pointer
    if as_json:
        echo_json(
            {
                "folder": report.version.folder,
                "version": pointer.version,
                "kind": pointer.kind,
                "files": report.files,
                "size_bytes": report.size_bytes,
                "kept_bytes": report.kept_bytes,
                "width": report.width,
                "chunk_bytes": report.chunk_bytes,
            }
        )
        return
    files = "" if pointer.kind == "file" else f", {report.files} files"
    kept = f", {sizes.format_size(report.kept_bytes)} kept" if report.kept_bytes else ""
    stored = f"{sizes.format_size(report.size_bytes)}{files}{kept}"
    click.echo(f"{report.version.folder}: {stored}")
