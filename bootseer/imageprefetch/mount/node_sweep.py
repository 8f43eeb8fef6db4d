"""Removing what is on a node for nobody: what killed processes left, and what no start has used."""

from __future__ import annotations

import contextlib
import os

from bootseer.blocks.cache import eviction
from bootseer.imageprefetch.image_cache import BLOCKS, ImageCache
from bootseer.imageprefetch.mount import container_folders, server_registry


def sweep(runtime: str, cache: str, kept_limit_bytes: int) -> None:
    """Remove it from a runtime directory and a cache; nothing that is in use. Nothing raises.

    Blocks in the cache are removed when others need their room. What else is kept of images is
    removed once it is old, or takes more than `kept_limit_bytes`.
    """
    server_registry.list_servers(runtime)  # removes dead ones
    for place in (runtime, cache):
        container_folders.sweep(place)
    ImageCache(cache).expire(
        [server.digest for server in server_registry.list_records(runtime)],
        limit_bytes=kept_limit_bytes,
        lock_unused=lambda digest: server_registry.lock_if_unused(runtime, digest),
    )
    with contextlib.suppress(OSError):
        eviction.survey(os.path.join(cache, BLOCKS))
