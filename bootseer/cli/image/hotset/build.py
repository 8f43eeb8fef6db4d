"""`bootseer image hotset build`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.hotset.group import of, opened, place, which_option
from bootseer.cli.image.options import place_options, share_option
from bootseer.cli.shared import progress, sizes
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError

if TYPE_CHECKING:
    from bootseer.blocks.trace.trace_file import Trace
    from bootseer.imageprefetch.hotset.image_hotsets import RecordedImage
    from bootseer.imageprefetch.hotset.store import BuiltHotSet


@click.command("build")
@which_option
@click.option(
    "--from",
    "older",
    envvar="BOOTSEER_IMAGE_HOTSET_FROM",
    default="",
    metavar="REF",
    help="Carry over what starts of this older image read, file by file, by path and content.",
)
@share_option("Pack what at least this share of the starts touched.")
@click.option(
    "--level",
    envvar="BOOTSEER_IMAGE_HOTSET_LEVEL",
    type=click.IntRange(1, 22),
    default=19,
    show_default=True,
    metavar="N",
    help="zstd's level; lower ones pack faster and send more.",
)
@click.option("--push", is_flag=True, help="Publish it too, beside the image.")
@place_options
@json_option
@click.argument("ref")
def command(
    ref: str,
    workload: str,
    older: str,
    share: float,
    level: int,
    push: bool,
    as_json: bool,
    **where: Any,
) -> int:
    """Pack what the starts of a workload read of the image REF.

    Packs this node's recordings together with the published ones. The next mount replays it.
    """
    from bootseer.imageprefetch.hotset import store
    from bootseer.imageprefetch.hotset.image_hotsets import open_fetcher

    with opened(ref, push=push, **where) as image:
        own = image.own_trace(workload)
        trace, carried = _trace(image, older, workload, where)
        with open_fetcher(place(where["cache"])) as fetcher:
            made, info = store.pack(
                image.hot_sets, image.parts, trace, fetcher, share=share, level=level, own=own
            )
        if push:
            made = publish(image, made)
    if as_json:
        echo_json({**made.as_dict(), "hot_bytes": info.hot_bytes, "pushed": push})
        return 0
    if carried is not None:
        click.echo(f"carried over {carried:.0%} of what was touched of {older}")
    hot = info.hot_bytes or info.fetch_bytes
    way = f"in {info.frames} frames" if info.frames else "as whole blocks"
    click.echo(
        f"{made.digest}: {sizes.shown(hot)} {way}, {sizes.shown(info.size_bytes)} packed, "
        f"of {made.hot.starts} full starts"
    )
    if not push:
        click.echo(f"publish it with `bootseer image hotset push {ref}`", err=True)
    return 0


def _trace(
    image: RecordedImage, older: str, workload: str, where: dict[str, Any]
) -> tuple[Trace, float | None]:
    """What is to be packed, and the share that was carried over from an older image."""
    from bootseer.imageprefetch.hotset.image_hotsets import add_carried, carry_from

    own = image.trace(workload)
    if not older:
        if own is None:
            raise NotFoundError(
                f"nothing is recorded of {of(workload)} of {image.ref}; start it once with "
                f"`bootseer image record {image.ref} -- COMMAND`, or carry it over with --from"
            )
        return own, None
    with opened(older, **where) as before:
        carried = carry_from(image, before, workload)
    return add_carried(own, carried.trace), carried.share


def publish(image: RecordedImage, made: BuiltHotSet) -> BuiltHotSet:
    """Push a hot set, with a progress bar; returns it as it was published."""
    with progress.bar("hot set") as shown:
        shown.expect(made.hot.pack.size_bytes)
        made = image.publish(made, progress=shown.advance)
    if sys.stderr is not None:
        click.echo(f"published {made.digest} beside {image.ref}", err=True)
    return made
