"""`bootseer image hotset prune`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.image.hotset.group import describe_workload, open_image
from bootseer.cli.image.options import image_access_options
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option


@click.command("prune")
@click.option(
    "--keep",
    envvar="BOOTSEER_IMAGE_HOTSET_KEEP",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Leave so many, the newest, of each workload.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@image_access_options
@json_option
@click.argument("ref")
def command(ref: str, keep: int, dry_run: bool, as_json: bool, **access: Any) -> int:
    """Delete older hot sets of the image REF from its registry, which must allow deleting.

    Images, block images and tags stay. What the deleted ones hold goes when the registry collects
    its garbage; a mount that replays one of them goes on.
    """
    from bootseer.imageprefetch.hotset import store

    with open_image(ref, push=not dry_run, **access) as image:
        old = store.find_outdated(store.list_published(image.repository, image.digest), keep)
        for descriptor, hot in old:
            if not dry_run:
                image.repository.delete_referrer(image.digest, descriptor.digest)
            if not as_json:
                workload = describe_workload(hot.workload)
                packed = sizes.format_size(hot.pack.size_bytes)
                click.echo(f"{descriptor.digest}  {workload}  {packed}  {hot.created}")
    if as_json:
        rows = [{"digest": d.digest, "workload": h.workload, "created": h.created} for d, h in old]
        echo_json({"deleted": not dry_run, "hot_sets": rows})
    elif not old:
        click.echo("nothing to delete", err=True)
    return 0
