"""`bootseer stripe ls`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option, store_options, take_store_options

if TYPE_CHECKING:
    from bootseer.stripedfs.read.listing import ListingEntry


@click.command("ls")
@click.option(
    "--recursive", "-r", is_flag=True, help="Go into the folders of a directory checkpoint."
)
@store_options
@json_option
@click.argument("url")
def command(url: str, recursive: bool, as_json: bool, **store_parameters: Any) -> int:
    """List the checkpoints and files of the folder URL, or what the checkpoint URL holds.

    One that cannot be looked at is reported on standard error, besides the list of the
    others; the exit code is then of that error.
    """
    from bootseer.stripedfs.read.listing import list_entries
    from bootseer.stripedfs.read.open import locate

    store, entry = locate(url, take_store_options(store_parameters))
    try:
        listed = list_entries(store, entry, recursive=recursive)
    finally:
        store.close()
    if as_json:
        echo_json([dataclasses.asdict(each) for each in listed])
        return _report_problems(listed)
    rows = [_format_row(each) for each in listed]
    widths = [max((len(row[n]) for row in rows), default=0) for n in range(5)]
    for row in rows:
        size, *rest = row[:5]
        cells = [f"{size:>{widths[0]}}"]
        cells += [f"{cell:<{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        click.echo("  ".join([*cells, row[5]]).rstrip())
    return _report_problems(listed)


def _report_problems(listed: Sequence[ListingEntry]) -> int:
    """Print a line for each entry that could not be read; return the first one's exit code."""
    faulty = [each for each in listed if each.problem]
    for each in faulty:
        name, problem = escape_unprintable(each.name), escape_unprintable(each.problem)
        click.echo(f"bootseer: {name}: {problem}", err=True)
    return faulty[0].exit_code if faulty else 0


def _format_row(listed: ListingEntry) -> tuple[str, ...]:
    """Return size, kind, stripes, versions, time and name."""
    has_size = listed.kind not in ("folder", "link", "unknown")
    size = sizes.format_size(listed.size_bytes) if has_size else "-"
    stripes = f"{listed.width} x {sizes.format_size(listed.chunk_bytes)}" if listed.width else "-"
    versions = "1 version" if listed.versions == 1 else f"{listed.versions} versions"
    versions = versions if listed.versions else "-"
    mtime = time.strftime("%Y-%m-%d %H:%M", time.gmtime(listed.mtime_s)) if listed.mtime_s else "-"
    name = f"{listed.name} -> {listed.target}" if listed.target else listed.name
    return size, listed.kind, stripes, versions, mtime, escape_unprintable(name)


def escape_unprintable(text: str) -> str:
    """Escape what could control a terminal in a name, and bytes that are not UTF-8."""
    decoded = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in decoded)
