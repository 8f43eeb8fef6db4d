"""`bootseer image hotset`: pack and publish what an image's starts read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bootseer.cli.image.options import workload_option
from bootseer.cli.shared.lazy_group import LazyGroup

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bootseer.imageprefetch.hotset.image_hotsets import RecordedImage

COMMANDS: dict[str, tuple[str, str]] = {
    "build": ("image.hotset.build", "Pack what a workload's starts read."),
    "push": ("image.hotset.push", "Publish what `build` made, next to the image."),
    "show": ("image.hotset.show", "Draw what a workload's starts really read."),
    "merge": ("image.hotset.merge", "Merge recordings of other nodes into this one's."),
    "prune": ("image.hotset.prune", "Delete older hot sets from the registry."),
    "ls": ("image.hotset.ls", "List an image's recordings and hot sets."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """What an image's starts read, packed in the order of first touch and published.

    A hot set belongs to one image and one workload. It lies next to the image in the registry;
    tags and images stay untouched, and it can be rebuilt from more starts at any time.
    """


which_workload_option = workload_option("Which program's starts, where an image serves several.")


def open_image(
    ref: str, *, cache: str, plain_http: bool, push: bool = False
) -> AbstractContextManager[RecordedImage]:
    """Open the block image of the image `ref`, by the values of `image_access_options`."""
    from bootseer.imageprefetch.hotset import image_hotsets

    return image_hotsets.open_image(
        ref, cache_directory(cache), plain_http=plain_http or None, push=push
    )


def cache_directory(cache: str) -> str:
    """Return the absolute path of the cache; "" is the default one."""
    import os

    from bootseer.config.loading import default_cache

    return os.path.abspath(cache or default_cache())


def describe_workload(workload: str) -> str:
    """Return how messages name a workload; "" is the default one."""
    return f"workload {workload!r}" if workload else "the default workload"
