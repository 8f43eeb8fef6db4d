"""Which process fetches a block when several share a node cache: the first to claim it.

A request claims its blocks when it starts, not when it is planned, so that whatever is claimed
is under way. Blocks that another process claimed are left out, and looked for in the cache until
they arrive, until that process ends or gives up, or until `elsewhere_s` is over: then they are
fetched twice rather than late. A stopped process therefore delays others once, and briefly.

The functions here that ask the cache are called without the fetcher's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.fetch.records import Block, Request
from bootseer.blocks.settings import FetchSettings, Priority

FIRST_POLL_S = 0.004
LAST_POLL_S = 0.05


def leave_to_others(
    cached: CachedObject,
    request: Request,
    held: set[int],
    absent: set[int],
    settings: FetchSettings,
    now_s: float,
) -> set[int]:
    """Leave a request's blocks to other processes or to the cache; returns their numbers.

    `held` are the numbers of the blocks that other processes have claimed; those that were waited
    for long enough are fetched all the same. `absent` are the indices that the cache lacked after
    the claims were made; claims of blocks that had arrived before are given up.
    """
    items = request.items
    numbers = {number for number in held if may_wait(items[number][0], settings, now_s)}
    for number, (block, _) in enumerate(items):
        if block.index not in absent and not block.not_cached and number not in numbers:
            cached.unclaim(block.index)
            numbers.add(number)
    return numbers


def first_run(count: int, refused: set[int]) -> tuple[int, int]:
    """Where the first run of the `count` blocks that were not refused starts and stops."""
    start = next((n for n in range(count) if n not in refused), count)
    return start, next((n for n in range(start, count) if n in refused), count)


def may_wait(block: Block, settings: FetchSettings, now_s: float) -> bool:
    """Whether a block that another process fetches may be waited for (any longer)."""
    patience_s = settings.elsewhere_s * (1 if block.priority is Priority.DEMAND else 10)
    return not block.left_s or now_s - block.left_s < patience_s


def no_longer_waited_for(
    blocks: Sequence[Block], settings: FetchSettings, now_s: float
) -> list[Block]:
    """The blocks left to other processes that arrived, were given up there, or take too long."""
    by_cache: dict[int, list[Block]] = {}
    for block in blocks:
        by_cache.setdefault(id(block.object.cached), []).append(block)
    over: list[Block] = []
    for neighbours in by_cache.values():
        cached = neighbours[0].object.cached
        if cached is None:
            over += neighbours
            continue
        absent = cached.absent(block.index for block in neighbours)
        for block in neighbours:
            waits = block.index in absent and may_wait(block, settings, now_s)
            if not waits or not cached.claimed_elsewhere(block.index):
                over.append(block)
    return over


def poll_s(waited_s: float) -> float:
    """When to look again: soon at first, since most requests are short."""
    return min(LAST_POLL_S, FIRST_POLL_S + waited_s / 8)
