"""`bootseer image files show`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.files.group import place_options, trace_of
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option

if TYPE_CHECKING:
    from bootseer.imageprefetch.filemode.file_trace import FileTrace


@click.command("show")
@place_options
@click.option(
    "--depth",
    envvar="BOOTSEER_IMAGE_DEPTH",
    type=click.IntRange(1, 32),
    default=None,
    metavar="N",
    help="Directories down to that depth; default: the twenty that hold most.",
)
@json_option
def command(depth: int | None, as_json: bool, **which: Any) -> int:
    """Show what starts read: bytes and files by directory, or each range as JSON."""
    trace = trace_of(**which)
    if as_json:
        echo_json(_document(trace))
        return 0
    click.echo(
        f"workload {trace.workload!r}: {trace.recordings} recordings, {trace.trace.starts} of "
        f"them whole cold starts; {len(trace.files)} files, "
        f"{sizes.shown(trace.trace.touched_bytes())}"
    )
    for folder, (size_bytes, files) in _by_folder(trace, depth):
        click.echo(f"{sizes.shown(size_bytes):>12}  {files:>6} files  {folder}")
    return 0


def _document(trace: FileTrace) -> dict[str, object]:
    return {
        "workload": trace.workload,
        "recordings": trace.recordings,
        "starts": trace.trace.starts,
        "files": [file._asdict() for file in trace.files],
        "ranges": [
            {"path": trace.files[one.file].path, "offset": one.offset, "length": one.length}
            for one in trace.ranges()
        ],
    }


def _by_folder(trace: FileTrace, depth: int | None) -> list[tuple[str, tuple[int, int]]]:
    totals: dict[str, tuple[int, set[int]]] = {}
    for one in trace.ranges():
        folder = os.path.dirname(trace.files[one.file].path)
        if depth is not None:
            folder = "/".join(folder.split("/")[: depth + 1]) or "/"
        size_bytes, files = totals.setdefault(folder, (0, set()))
        files.add(one.file)
        totals[folder] = (size_bytes + one.length, files)
    ranked = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))
    rows = [(folder, (size_bytes, len(files))) for folder, (size_bytes, files) in ranked]
    return rows if depth is not None else rows[:20]
