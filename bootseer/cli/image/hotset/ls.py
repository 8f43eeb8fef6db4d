"""`bootseer image hotset ls`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.image.hotset.group import open_image
from bootseer.cli.image.options import image_access_options
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import CorruptDataError


@click.command("ls")
@image_access_options
@json_option
@click.argument("ref")
def command(ref: str, as_json: bool, **access: Any) -> int:
    """List what is recorded of the image REF on this node, and the hot sets next to it."""
    from bootseer.imageprefetch.hotset import store

    with open_image(ref, **access) as image:
        recorded: list[dict[str, object]] = []
        for name in image.traces.workloads():
            try:
                trace = image.traces.load(name)
            except CorruptDataError as error:
                click.echo(f"bootseer: {error}", err=True)
                continue
            if trace is not None:
                row = {"workload": name, "starts": trace.starts}
                recorded.append({**row, "touched_bytes": trace.touched_bytes()})
        published: list[dict[str, object]] = [
            {
                "digest": descriptor.digest,
                "workload": hot.workload,
                "starts": hot.starts,
                "created": hot.created,
                "size_bytes": hot.pack.size_bytes,
                "of_this_block_image": hot.block_image == image.parts.block_image,
            }
            for descriptor, hot in store.list_published(image.repository, image.digest)
        ]
        body = {"image": image.digest, "block_image": image.parts.block_image}
    if as_json:
        echo_json({**body, "recorded": recorded, "published": published})
    else:
        _print_rows(recorded, published)
    return 0


def _print_rows(recorded: list[dict[str, object]], published: list[dict[str, object]]) -> None:
    for row in recorded:
        touched = sizes.format_size(int(str(row["touched_bytes"])))
        click.echo(
            f"recorded here    {row['workload'] or '(default)':20} {row['starts']:>4} full starts  "
            f"{touched:>10}"
        )
    for row in published:
        packed = sizes.format_size(int(str(row["size_bytes"])))
        stale = "" if row["of_this_block_image"] else "  (of another block image)"
        click.echo(
            f"hot set          {row['workload'] or '(default)':20} {row['starts']:>4} full "
            f"starts  {packed:>10}  {row['created']}{stale}"
        )
    if not recorded and not published:
        click.echo("nothing is recorded and nothing published", err=True)
