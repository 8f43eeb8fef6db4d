"""`bootseer image hotset show`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.hotset.group import (
    describe_workload,
    open_image,
    which_workload_option,
)
from bootseer.cli.image.options import image_access_options, share_option
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError, from_os_error

if TYPE_CHECKING:
    from bootseer.imageprefetch.hotset.summary import Summary, SummaryRow

_RAMP = "▁▂▃▄▅▆▇█"
_ROWS = 20
_BAR_COLUMNS = 24


@click.command("show")
@which_workload_option
@share_option("Show what at least this share of the starts touched.")
@click.option(
    "--html",
    "html_path",
    default="",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Also write a self-contained page, with every figure.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, 10_000),
    default=_ROWS,
    show_default=True,
    metavar="N",
    help="Rows of each table.",
)
@image_access_options
@json_option
@click.argument("ref")
def command(
    ref: str,
    workload: str,
    share: float,
    html_path: str,
    rows: int,
    as_json: bool,
    **access: Any,
) -> int:
    """Draw what the starts of a workload really read of the image REF.

    Over time, by package, by directory and by file: this node's recordings and the published ones.
    """
    from bootseer.imageprefetch.hotset.summary import summarise

    with open_image(ref, **access) as image:
        trace = image.trace(workload)
        if trace is None:
            raise NotFoundError(
                f"nothing is recorded of {describe_workload(workload)} of {ref}; start it once "
                f"with `bootseer image record {ref} -- COMMAND`"
            )
        summary = summarise(trace.select_hot(share), image.parts.files)
    if html_path:
        _write_page(html_path, summary, ref)
    if as_json:
        echo_json({"image": ref, **summary.as_dict()})
        return 0
    click.echo("\n".join(render_lines(summary, ref, rows)))
    return 0


def render_lines(summary: Summary, ref: str, rows: int = _ROWS) -> list[str]:
    """Return the summary as lines for a terminal, with at most `rows` rows a table."""
    share = summary.hot_bytes / summary.image_bytes if summary.image_bytes else 0.0
    hot, whole = sizes.format_size(summary.hot_bytes), sizes.format_size(summary.image_bytes)
    lines = [
        f"{ref}, {describe_workload(summary.workload)}, {summary.starts} full starts: "
        f"{hot} of {whole} ({share:.1%}), "
        f"{summary.hot_files} of {summary.image_files} files"
    ]
    if not summary.hot_bytes:
        return lines
    most = max(bucket.touched_bytes for bucket in summary.buckets)
    curve = "".join(
        _RAMP[min(len(_RAMP) - 1, bucket.touched_bytes * len(_RAMP) // (most + 1))]
        if bucket.touched_bytes
        else " "
        for bucket in summary.buckets
    )
    lines += ["", f"over time   0 s {curve} {summary.duration_ms / 1000:.2f} s"]
    for title, parts in (
        ("package", summary.packages),
        ("directory", summary.directories),
        ("file", summary.files),
    ):
        lines += ["", *_render_table(title, parts, rows, summary.hot_bytes)]
    return lines


def _render_table(title: str, parts: Sequence[SummaryRow], rows: int, hot_bytes: int) -> list[str]:
    lines = [f"{'hot':>10}  {'of':>10}  {'files':>6}  {'first':>8}  {'':{_BAR_COLUMNS}}  {title}"]
    for part in parts[:rows]:
        width = part.touched_bytes * _BAR_COLUMNS / hot_bytes
        bar = "█" * int(width) or "▏"
        name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in part.name)
        lines.append(
            f"{sizes.format_size(part.touched_bytes):>10}  "
            f"{sizes.format_size(part.size_bytes):>10}  "
            f"{part.files:>6}  {part.first_touch_ms / 1000:>6.2f} s  "
            f"{bar:{_BAR_COLUMNS}}  {name or '/'}"
        )
    if len(parts) > rows:
        lines.append(f"{'':44}{len(parts) - rows} more")
    return lines


def _write_page(path: str, summary: Summary, ref: str) -> None:
    from bootseer.cli.image.hotset.html import render

    try:
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(render(summary, ref))
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error
