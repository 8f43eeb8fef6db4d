"""How blocks are fetched: priorities, and the one place of each default."""

from __future__ import annotations

import enum

from bootseer import light_dataclasses as dataclasses


class Priority(enum.IntEnum):
    """Who is served first. Somebody waits for DEMAND; HOT will be asked for; BACKGROUND may be."""

    DEMAND = 0
    HOT = 1
    BACKGROUND = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """`memory_bytes` bounds all block memory: ready, in flight and scratch (not callers' own).

    A store's own `preferred.streams` bounds the requests to it further. `tries` counts the
    requests made for one block before its error is final; between them stands a random time of
    at most `backoff_s` times 2 to the n, never more than `backoff_limit_s`. A request for
    somebody who waits is doubled after `hedge_s` without a byte (0 = never), or after three times
    the usual wait for a first block where that is longer, but after `hedge_limit_s` at the
    latest; a replica that was found hanging or failing is passed over for `suspect_s`. Memory
    that `Fetcher.held` announced and nobody came for is free again after `claim_s`. A block that
    another process fetches into the node cache is waited for `elsewhere_s` (ten times that, while
    nobody waits here), then fetched here too. A read by `Fetcher.held` fails after
    `demand_deadline_s`; once one did and nothing has come from that store since, the next ones
    fail after `outage_deadline_s`, until none has failed for as long as the deadline: an outage is
    waited for once, not once a read. Some of their requests go on unseen, so that a store which is
    back is noticed also where its first byte takes longer than that.
    """

    connections: int = 32
    memory_bytes: int = 432 << 20  # the process around it needs some 70 MiB: 512 MiB in all
    demand_deadline_s: float = 60.0
    outage_deadline_s: float = 2.0
    stall_s: float = 15.0
    tries: int = 12
    corrupt_tries: int = 3
    backoff_s: float = 0.2
    backoff_limit_s: float = 8.0
    hedge_s: float = 1.0
    hedge_limit_s: float = 2.5
    suspect_s: float = 30.0
    least_range_bytes: int = 1 << 20
    cache_streams: int = 4
    idle_s: float = 30.0
    claim_s: float = 30.0
    elsewhere_s: float = 1.0


DEFAULTS = FetchSettings()
