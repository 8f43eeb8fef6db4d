"""`bootseer stripe ls`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option, options_of, store_options

if TYPE_CHECKING:
    from bootseer.stripedfs.read.listing import ListingEntry


@click.command("ls")
@click.option(
    "--recursive", "-r", is_flag=True, help="Go into the folders of a directory checkpoint."
)
@store_options
@json_option
@click.argument("url")
def command(url: str, recursive: bool, as_json: bool, **store: Any) -> int:
    """List the checkpoints and files of the folder URL, or what the checkpoint URL holds.

    One that cannot be looked at is told on standard error, beside the list of the others; the
    exit code is then of that error.
    """
    from bootseer.stripedfs.read.listing import list_entries
    from bootseer.stripedfs.read.open import locate

    opened, found = locate(url, options_of(store))
    try:
        listed = list_entries(opened, found, recursive=recursive)
    finally:
        opened.close()
    if as_json:
        echo_json([dataclasses.asdict(each) for each in listed])
        return _told(listed)
    rows = [_row(each) for each in listed]
    widths = [max((len(row[n]) for row in rows), default=0) for n in range(5)]
    for row in rows:
        size, *rest = row[:5]
        cells = [f"{size:>{widths[0]}}"]
        cells += [f"{cell:<{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        click.echo("  ".join([*cells, row[5]]).rstrip())
    return _told(listed)


def _told(listed: Sequence[ListingEntry]) -> int:
    """A line for each entry that could not be looked at; the exit code is of the first."""
    faulty = [each for each in listed if each.problem]
    for each in faulty:
        click.echo(f"bootseer: {printable(each.name)}: {printable(each.problem)}", err=True)
    return faulty[0].exit_code if faulty else 0


def _row(each: ListingEntry) -> tuple[str, ...]:
    """Size, kind, stripes, versions, time, name."""
    size = "-" if each.kind in ("folder", "link", "unknown") else sizes.shown(each.size_bytes)
    stripes = f"{each.width} x {sizes.shown(each.chunk_bytes)}" if each.width else "-"
    versions = "1 version" if each.versions == 1 else f"{each.versions} versions"
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(each.mtime_s)) if each.mtime_s else "-"
    name = f"{each.name} -> {each.target}" if each.target else each.name
    return size, each.kind, stripes, versions if each.versions else "-", when, printable(name)


def printable(text: str) -> str:
    """A name without what could act on a terminal, bytes that are no text included."""
    shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
