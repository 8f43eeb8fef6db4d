"""Whether an image is mounted straight from this node's disk, with nobody serving it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_cache import ImageCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from bootseer.blockimage.serve.serverless_mount import CompleteImage
    from bootseer.blocks.cache.sealed_objects import Sealed
    from bootseer.imageprefetch.mount.settings import MountSettings
    from bootseer.imageprefetch.resolve.resolver import ResolvedImage


def complete_of(
    settings: MountSettings, digest: str, opened: ResolvedImage, say: Callable[[str, str], None]
) -> CompleteImage | None:
    """What mounts the image so; None where it is to be served."""
    sealed = _sealed_of(settings, digest, opened)
    if sealed is None:
        return None
    from bootseer.blockimage.serve.serverless_mount import CompleteImage

    image = opened.image
    if not settings.hot:
        if image.frames is not None:
            image.frames.close()
        image = dataclasses.replace(image, index=None, frames=None)
    return CompleteImage(image, sealed, loop=settings.loop, say=say)


def _sealed_of(settings: MountSettings, digest: str, opened: ResolvedImage) -> Sealed | None:
    """The image's data, if all of it is here and sure, and the start need not be recorded."""
    blocks = os.path.join(settings.cache, "blocks")
    if not os.path.isdir(blocks):  # nothing is here: nothing is imported for it
        return None
    from bootseer.blocks.cache.sealed_objects import open_sealed

    identity = opened.image.identity
    if identity is None:
        return None
    try:
        found = open_sealed(blocks, identity())
    except CorruptDataError:
        return None
    if found is not None and _must_record(settings, digest, opened):
        found.close()
        return None
    return found


def _must_record(settings: MountSettings, digest: str, opened: ResolvedImage) -> bool:
    """Whether this start may tell what nobody knows yet: nothing is replayed, nor was recorded.

    The kernel tells nobody what it reads. A start with a hot set could but add to a trace.
    """
    if not settings.record or (opened.hot_set and settings.hot):
        return False
    from bootseer.imageprefetch.record.trace_store import TraceStore

    store = TraceStore(settings.traces or ImageCache(settings.cache).trace_folder(digest))
    try:
        known = store.load(settings.workload)
    except CorruptDataError:
        return True
    return known is None or not known.starts
