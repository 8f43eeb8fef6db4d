"""`bootseer image hotset build`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.hotset.group import (
    cache_directory,
    describe_workload,
    open_image,
    which_workload_option,
)
from bootseer.cli.image.options import image_access_options, share_option
from bootseer.cli.shared import progress, sizes
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError

if TYPE_CHECKING:
    from bootseer.blocks.trace.trace_file import Trace
    from bootseer.imageprefetch.hotset.image_hotsets import RecordedImage
    from bootseer.imageprefetch.hotset.store import BuiltHotSet


@click.command("build")
@which_workload_option
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
@click.option("--push", is_flag=True, help="Publish it too, next to the image.")
@image_access_options
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
    **access: Any,
) -> int:
    """Pack what the starts of a workload read of the image REF.

    Packs this node's recordings together with the published ones. The next mount replays it.
    """
    from bootseer.imageprefetch.hotset import store
    from bootseer.imageprefetch.hotset.image_hotsets import open_fetcher

    with open_image(ref, push=push, **access) as image:
        own = image.own_trace(workload)
        trace, carried = _load_trace(image, older, workload, access)
        with open_fetcher(cache_directory(access["cache"])) as fetcher:
            hot_set, info = store.pack(
                image.hot_sets, image.parts, trace, fetcher, share=share, level=level, own=own
            )
        if push:
            hot_set = publish(image, hot_set)
    if as_json:
        echo_json({**hot_set.as_dict(), "hot_bytes": info.hot_bytes, "pushed": push})
        return 0
    if carried is not None:
        click.echo(f"carried over {carried:.0%} of what was touched of {older}")
    hot_bytes = info.hot_bytes or info.fetch_bytes
    way = f"in {info.frames} frames" if info.frames else "as whole blocks"
    click.echo(
        f"{hot_set.digest}: {sizes.format_size(hot_bytes)} {way}, "
        f"{sizes.format_size(info.size_bytes)} packed, of {hot_set.hot.starts} full starts"
    )
    if not push:
        click.echo(f"publish it with `bootseer image hotset push {ref}`", err=True)
    return 0


def _load_trace(
    image: RecordedImage, older: str, workload: str, access: dict[str, Any]
) -> tuple[Trace, float | None]:
    """Return the trace to pack, and which share of an older image's trace was carried over."""
    from bootseer.imageprefetch.hotset.image_hotsets import add_carried, carry_from

    own = image.trace(workload)
    if not older:
        if own is None:
            raise NotFoundError(
                f"nothing is recorded of {describe_workload(workload)} of {image.ref}; start it "
                f"once with `bootseer image record {image.ref} -- COMMAND`, or carry it over with "
                "--from"
            )
        return own, None
    with open_image(older, **access) as older_image:
        carried = carry_from(image, older_image, workload)
    return add_carried(own, carried.trace), carried.share


def publish(image: RecordedImage, hot_set: BuiltHotSet) -> BuiltHotSet:
    """Push a hot set and show the progress; return the hot set as it was published."""
    with progress.show_progress("hot set") as meter:
        meter.expect(hot_set.hot.pack.size_bytes)
        hot_set = image.publish(hot_set, progress=meter.advance)
    if sys.stderr is not None:
        click.echo(f"published {hot_set.digest} beside {image.ref}", err=True)
    return hot_set
