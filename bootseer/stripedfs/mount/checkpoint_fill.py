"""All that a job will load of a checkpoint, in this node's cache before any start asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer import events
from bootseer.blocks.cache import sealed_objects
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.link_turns import LinkTurns
from bootseer.blocks.settings import DEFAULTS as FETCH
from bootseer.blocks.source import block_count
from bootseer.errors import BootseerError, NoSpaceError, StoreUnavailableError, UsageError
from bootseer.fuse.operations import FileSystemError
from bootseer.light_dataclasses import dataclass, replace
from bootseer.reporting import Reporter
from bootseer.stripedfs.mount.expected_load import find_expected
from bootseer.stripedfs.mount.prefetch import Prefetch
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.read.open import locate

if TYPE_CHECKING:
    from bootseer.stripedfs.mount.inodes import Node
    from bootseer.stripedfs.mount.settings import MountSettings


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """How much of the files that a job is expected to load is in this node's cache."""

    names: tuple[str, ...]
    present_bytes: int
    total_bytes: int

    @property
    def complete(self) -> bool:
        return self.present_bytes >= self.total_bytes


def look_at_checkpoint(settings: MountSettings) -> LocalCheckpoint:
    """What this node's cache has; the store is asked for names alone.

    `settings` are those of the start's mount, with a `cache` and `prefetch`. Raises what the store
    raises.
    """
    with _opened(settings) as (tree, cache):
        return _describe(tree, cache, _find_expected(tree, settings))


def fill_checkpoint(settings: MountSettings, turns: LinkTurns) -> LocalCheckpoint:
    """Bring it to the cache, after what starts on this node need; returns what is there then.

    Raises NoSpaceError where the cache cannot hold it, StoreUnavailableError where not all of it
    comes, and what else the store raises. What has come stays. What was in the cache and is wrong
    there is fetched once more.
    """
    for _ in range(2):
        stopped = _fetch(settings, turns)
        local, has_dropped = _seal(settings)
        if not has_dropped:
            break
    if stopped and not local.complete:
        raise NoSpaceError(f"the checkpoint does not fit on this node: {stopped}")
    if not local.complete:
        raise StoreUnavailableError(
            f"{local.total_bytes - local.present_bytes} bytes of the checkpoint did not come, or "
            "were wrong: `bootseer stripe verify` names the damage, if there is any"
        )
    return local


def _fetch(settings: MountSettings, turns: LinkTurns) -> str:
    """Fetch it; returns why the cache stores nothing any more, "" where it does."""
    stops: list[str] = []
    with _opened(settings, stops.append) as (tree, _):
        expected = _find_expected(tree, settings)
        with Prefetch(tree, settings.prefetch or "", most_bytes=None, turns=turns) as prefetch:
            reason = prefetch.fetch(expected)
        if reason:
            raise StoreUnavailableError(f"the checkpoint is not fetched whole: {reason}")
    return "".join(stops)


def _seal(settings: MountSettings) -> tuple[LocalCheckpoint, bool]:
    """Have mounts leave what is whole to the kernel; what is there then, and if bytes were dropped.

    In an opening of its own: once closed, a fetcher has stored all that came.
    """
    with _opened(settings) as (tree, cache), events.open_writer() as writer:
        nodes = _find_expected(tree, settings)
        before = _describe(tree, cache, nodes)
        faults = Reporter("checkpoint.fault", writer=writer)
        for node in nodes:
            try:
                sealed_objects.seal(
                    settings.cache, tree.source(node), go_on=lambda: True, whole_pages=False
                )
            except BootseerError as error:  # the mount serves it then
                faults.report(type(error).__name__, str(error))
        local = _describe(tree, cache, nodes)
        return local, local.present_bytes < before.present_bytes


@contextlib.contextmanager
def _opened(
    settings: MountSettings, on_stop: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[StripedTree, NodeCache]]:
    if not settings.cache or settings.prefetch is None:
        raise UsageError(
            "the checkpoint needs [checkpoint] cache and prefetch to be kept on this node"
        )
    fetch = replace(FETCH, memory_bytes=settings.memory_bytes)
    with contextlib.ExitStack() as stack:
        store, root = locate(settings.url, settings.options)
        stack.callback(store.close)
        cache = stack.enter_context(
            NodeCache.at(settings.cache, settings.cache_limit_bytes, on_stop=on_stop)
        )
        fetcher = stack.enter_context(Fetcher(fetch, cache=cache))
        tree = StripedTree(store, root.name, root, fetcher, deadline_s=settings.deadline_s)
        stack.callback(tree.destroy)
        yield tree, cache


def _find_expected(tree: StripedTree, settings: MountSettings) -> Sequence[Node]:
    try:
        return find_expected(tree, settings.prefetch or "")
    except FileSystemError as error:
        raise StoreUnavailableError(f"the store does not list the checkpoint: {error}") from error


def _describe(tree: StripedTree, cache: NodeCache, nodes: Sequence[Node]) -> LocalCheckpoint:
    present_bytes = total_bytes = 0
    for node in nodes:
        source = tree.source(node)
        total_bytes += source.size_bytes
        with cache.open(source) as cached:
            missing = cached.count_missing(block_count(source))
        present_bytes += max(0, source.size_bytes - missing * source.block_bytes)
    return LocalCheckpoint(tuple(node.path for node in nodes), present_bytes, total_bytes)
