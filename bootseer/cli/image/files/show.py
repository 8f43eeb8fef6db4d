"""`bootseer image files show`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.files.group import load_trace, trace_options
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option

if TYPE_CHECKING:
    from bootseer.imageprefetch.filemode.file_trace import FileTrace


@click.command("show")
@trace_options
@click.option(
    "--depth",
    envvar="BOOTSEER_IMAGE_DEPTH",
    type=click.IntRange(1, 32),
    default=None,
    metavar="N",
    help="Directories down to that depth; default: the twenty that hold most.",
)
@json_option
def command(depth: int | None, as_json: bool, **trace_parameters: Any) -> int:
    """Show what starts read: bytes and files by directory, or each range as JSON."""
    trace = load_trace(**trace_parameters)
    if as_json:
        echo_json(_make_document(trace))
        return 0
    click.echo(
        f"workload {trace.workload!r}: {trace.recordings} recordings, {trace.trace.starts} of "
        f"them whole cold starts; {len(trace.files)} files, "
        f"{sizes.format_size(trace.trace.touched_bytes())}"
    )
    for folder, (size_bytes, files) in _sum_folders(trace, depth):
        click.echo(f"{sizes.format_size(size_bytes):>12}  {files:>6} files  {folder}")
    return 0


def _make_document(trace: FileTrace) -> dict[str, object]:
    return {
        "workload": trace.workload,
        "recordings": trace.recordings,
        "starts": trace.trace.starts,
        "files": [file._asdict() for file in trace.files],
        "ranges": [
            {
                "path": trace.files[file_range.file].path,
                "offset": file_range.offset,
                "length": file_range.length,
            }
            for file_range in trace.ranges()
        ],
    }


def _sum_folders(trace: FileTrace, depth: int | None) -> list[tuple[str, tuple[int, int]]]:
    """Return bytes and number of files by directory, the largest first.

    Without a depth only the twenty largest are returned.
    """
    totals: dict[str, tuple[int, set[int]]] = {}
    for file_range in trace.ranges():
        folder = os.path.dirname(trace.files[file_range.file].path)
        if depth is not None:
            folder = "/".join(folder.split("/")[: depth + 1]) or "/"
        size_bytes, files = totals.setdefault(folder, (0, set()))
        files.add(file_range.file)
        totals[folder] = (size_bytes + file_range.length, files)
    ranked = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))
    rows = [(folder, (size_bytes, len(files))) for folder, (size_bytes, files) in ranked]
    return rows if depth is not None else rows[:20]
