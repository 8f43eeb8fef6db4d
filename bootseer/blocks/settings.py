"""How blocks are fetched: priorities, and the one place of each default."""

from __future__ import annotations

import enum

from bootseer import light_dataclasses as dataclasses


class Priority(enum.IntEnum):
    """What is served first. A reader waits for DEMAND; HOT will be read soon; BACKGROUND may be."""

    DEMAND = 0
    HOT = 1
    BACKGROUND = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """What the fetcher may use, and how long it waits."""

    connections: int = 32
    """Requests at a time; a store's `preferred.streams` bounds those to it further."""
    memory_bytes: int = 432 << 20  # the process around it needs some 70 MiB: 512 MiB in all
    """All block memory: ready, in flight and scratch (not callers' own)."""
    demand_deadline_s: float = 60.0
    """How long a read waits."""
    outage_deadline_s: float = 2.0
    """How long a read by `Fetcher.hold` waits in an outage.

    One begins when such a read has failed at its deadline and nothing has come from the store
    since, and ends when none has failed for as long as the deadline. So one read waits the full
    deadline in an outage, not each. Some requests go on after their readers failed, to notice that
    the store works again even where its first byte takes longer than reads wait.
    """
    stall_s: float = 15.0
    """How long a request may stand still."""
    tries: int = 12
    """The requests made for one block before its error is final."""
    corrupt_tries: int = 3
    """The same, where the bytes were wrong and the store has no replicas."""
    backoff_s: float = 0.2
    backoff_limit_s: float = 8.0
    """Between two tries: a random time of at most `backoff_s` times 2 to the n, and the limit."""
    hedge_s: float = 1.0
    hedge_limit_s: float = 2.5
    """When a request that a reader waits for is doubled.

    After `hedge_s` without a byte (0 = never), or after three times the usual wait for a first
    block where that is longer, but after `hedge_limit_s` at the latest.
    """
    suspect_s: float = 30.0
    """How long a replica that hung or failed is passed over."""
    least_range_bytes: int = 1 << 20
    """Requests are not made shorter where longer ones will do: they would mostly be latency."""
    cache_streams: int = 4
    """Threads that read one object of the node cache."""
    idle_s: float = 30.0
    """When a thread without work ends."""
    elsewhere_s: float = 1.0
    """How long a block that another process fetches into the node cache is waited for.

    Ten times that while no reader waits here; then it is fetched here too.
    """


DEFAULTS = FetchSettings()
