"""Whether an image is mounted straight from this node's disk, without a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bootseer.blockimage.serve.opened_image import without_hot_set
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_cache import BLOCKS, ImageCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from bootseer.blockimage.serve.serverless_mount import CompleteImage
    from bootseer.blocks.cache.sealed_objects import Sealed
    from bootseer.imageprefetch.mount.settings import MountSettings
    from bootseer.imageprefetch.resolve.resolver import ResolvedImage


def choose_serverless(
    settings: MountSettings, digest: str, resolved: ResolvedImage, say: Callable[[str, str], None]
) -> CompleteImage | None:
    """What mounts the image without a server; None where it needs one."""
    sealed = _open_sealed(settings, digest, resolved)
    if sealed is None:
        return None
    from bootseer.blockimage.serve.serverless_mount import CompleteImage

    image = resolved.image if settings.hot else without_hot_set(resolved.image)
    return CompleteImage(image, sealed, loop=settings.loop, say=say)


def _open_sealed(settings: MountSettings, digest: str, resolved: ResolvedImage) -> Sealed | None:
    """The image's data, if all of it is here and checked, and the start need not be recorded."""
    blocks = os.path.join(settings.cache, BLOCKS)
    if not os.path.isdir(blocks):  # an empty node: the import would be for nothing
        return None
    from bootseer.blocks.cache.sealed_objects import open_sealed

    identity = resolved.image.identity
    if identity is None:
        return None
    try:
        sealed = open_sealed(blocks, identity())
    except CorruptDataError:
        return None
    if sealed is not None and _must_record(settings, digest, resolved):
        sealed.close()
        return None
    return sealed


def _must_record(settings: MountSettings, digest: str, resolved: ResolvedImage) -> bool:
    """Whether this start is to be recorded: nothing is replayed, and no trace is known.

    Without a server nothing can be recorded. A start with a hot set would add little to its trace.
    """
    if not settings.record or (resolved.hot_set and settings.hot):
        return False
    from bootseer.imageprefetch.record.trace_store import TraceStore

    store = TraceStore(settings.traces or ImageCache(settings.cache).trace_folder(digest))
    try:
        known = store.load(settings.workload)
    except CorruptDataError:
        return True
    return known is None or not known.starts
