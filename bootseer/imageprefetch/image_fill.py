"""All of an image on this node, before any start asks for it: nothing is mounted for that.

Its metadata, config and hot set are kept as a mount keeps them, its blocks are fetched and checked.
The next mount reads them from the disk, without a server. Starts on this node go first.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage.serve.background_fill import Fill
from bootseer.blockimage.serve.fill_settings import Activity, FillSettings
from bootseer.blockimage.serve.image_server import KEEP_FREE
from bootseer.blocks.cache import sealed_objects
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.link_turns import LinkTurns
from bootseer.blocks.settings import DEFAULTS as FETCH
from bootseer.blocks.source import block_count
from bootseer.errors import NoSpaceError, StoreUnavailableError
from bootseer.imageprefetch.image_cache import BLOCKS, ImageCache
from bootseer.imageprefetch.resolve.resolver import ResolvedImage, Resolver
from bootseer.storage.oci.open import open_repository

if TYPE_CHECKING:
    from bootseer.imageprefetch.mount.settings import MountSettings

_STEP_BYTES = 1 << 20
_QUIET_S = 0.05
"""How long a start's bytes must have been still before more is fetched here."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalImage:
    """How much of an image is on this node. `complete`: it is mounted without a server."""

    digest: str
    present_bytes: int
    total_bytes: int
    complete: bool


def look_at_image(settings: MountSettings, note: Callable[[str], None]) -> LocalImage:
    """What this node has of the image that a name stands for now.

    The registry is asked for the name, as far as it answers; `note` gets what was not as usual.
    `settings` have absolute paths. Raises what the registry raises, for a name never seen here.
    """
    resolver = _begin(settings, note)
    digest = resolver.digest()
    kept = ImageCache(settings.cache).image(digest)
    if kept is None:
        return LocalImage(digest, 0, 0, complete=False)
    with _closing(resolver.open_kept(digest, kept.block_image)) as resolved:
        return _describe(settings, resolved)


def fill_image(settings: MountSettings, note: Callable[[str], None]) -> LocalImage:
    """Bring all of an image to this node's cache; returns what is there then.

    Raises NotFoundError for an image without a block image, StoreUnavailableError where its
    registry stops answering, NoSpaceError where the cache cannot hold it, and what else the
    registry or the cache raises. What has come stays.
    """
    resolver = _begin(settings, note)
    digest = resolver.digest()
    with _closing(resolver.open(digest)) as resolved:
        _keep_small_parts(settings, resolved)
        if not _describe(settings, resolved).complete:
            _fill_blocks(settings, resolved)
        return _describe(settings, resolved)


def _await_turn(turns: LinkTurns) -> Activity:
    """Wait for starts on this node, as long as for any that may hang."""
    turns.wait(lambda: False)
    return Activity(0, 0)


@contextlib.contextmanager
def _closing(resolved: ResolvedImage) -> Iterator[ResolvedImage]:
    try:
        yield resolved
    finally:
        if resolved.image.frames is not None:
            resolved.image.frames.close()


def _begin(settings: MountSettings, note: Callable[[str], None]) -> Resolver:
    cache = ImageCache(settings.cache)
    return Resolver.begin(
        settings.ref,
        cache,
        workload=settings.workload,
        options=settings.options,
        plain_http=settings.plain_http,
        look_s=settings.look_s,
        spare_meta="",
        note=note,
    )


def _describe(settings: MountSettings, resolved: ResolvedImage) -> LocalImage:
    source, folder = resolved.image.source(), os.path.join(settings.cache, BLOCKS)
    total_bytes = resolved.image.data_bytes
    missing = 0
    if total_bytes:
        node_cache = NodeCache.at(folder, settings.cache_limit_bytes)
        with node_cache, node_cache.open(source) as cached:
            missing = cached.count_missing(block_count(source))
    present_bytes = max(0, total_bytes - missing * source.block_bytes)
    is_complete = not total_bytes or sealed_objects.is_sealed(folder, source)
    return LocalImage(resolved.digest, present_bytes, total_bytes, complete=is_complete)


def _keep_small_parts(settings: MountSettings, resolved: ResolvedImage) -> None:
    """Keep what a mount needs before its blocks: metadata, hot set, config."""
    resolved.keep()
    frames = resolved.image.frames
    if frames is not None:
        view, left = memoryview(bytearray(_STEP_BYTES)), resolved.hot_bytes
        while left:
            count = frames.readinto(view[: min(left, _STEP_BYTES)])
            if not count:
                break
            left -= count
    cache = ImageCache(settings.cache)
    if cache.config(resolved.digest) is None:
        opened, _ = open_repository(settings.ref, settings.options, plain_http=settings.plain_http)
        with opened as repository:
            image, manifest = repository.image(resolved.digest)
            cache.fetch_config(repository, image, manifest)


def _fill_blocks(settings: MountSettings, resolved: ResolvedImage) -> None:
    source, folder = resolved.image.source(), os.path.join(settings.cache, BLOCKS)
    faults: list[str] = []
    fetch = dataclasses.replace(FETCH, memory_bytes=settings.memory_bytes)
    with (
        LinkTurns.of(settings.runtime) as turns,
        NodeCache.at(
            folder, settings.cache_limit_bytes, keep_free=KEEP_FREE, on_stop=faults.append
        ) as cache,
        Fetcher(fetch, cache=cache) as fetcher,
    ):
        fill = Fill(
            fetcher,
            source,
            cache,
            FillSettings(
                rate_bytes_s=settings.fill_rate_bytes_s,
                quiet_s=_QUIET_S,
                lock=ImageCache(settings.cache).fill_lock(resolved.digest),
                rests=False,
            ),
            busy=functools.partial(_await_turn, turns),
            over=lambda: True,
        )
        # Checks what has come, and marks it for mounts without a server.
        seal = functools.partial(sealed_objects.seal, folder, source, go_on=fill.quiet)
        fill.run(faults.append, whole=seal)
    if not fill.done.is_set():
        reason = "; ".join(faults) or "it was interrupted"
        kind = StoreUnavailableError if "requests in a row" in reason else NoSpaceError
        raise kind(f"{settings.ref} is not filled in: {reason}")
