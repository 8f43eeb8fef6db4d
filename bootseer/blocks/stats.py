"""What fetching cost: counters per source class, written as `fetch.stats` events.

A source class is a short name for what is read (`checkpoint`, `image`, `snapshot`, `plain`), so
that a report can say which part of a start moved which bytes. Counting takes one short lock,
since every block read passes through here.
"""

from __future__ import annotations

import threading

from bootseer import light_dataclasses as dataclasses
from bootseer.events.writer import NullWriter, event

EVENT = "fetch.stats"
MAX_CLASSES = 64  # a mistaken class name per object must not grow memory or an event file
OTHER = "other"


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """Sums since the start, or differences of two snapshots.

    `bytes` came over the wire, hedges and retries included; they are `demand_bytes` (a reader
    waited for the request), `hot_bytes` and `background_bytes` (fetched ahead) together.
    `cache_hits` blocks of `cache_bytes` came from the node cache instead, `cache_stored_bytes`
    went into it, and `cache_corrupt` blocks of it failed their check. `blocked_ns` adds up the
    time of all `demand_waits`, so it can exceed the wall time.
    """

    bytes: int = 0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    failures: int = 0
    corrupt: int = 0
    demand_bytes: int = 0
    hot_bytes: int = 0
    background_bytes: int = 0
    cache_hits: int = 0
    cache_bytes: int = 0
    cache_stored_bytes: int = 0
    cache_corrupt: int = 0
    demand_waits: int = 0
    blocked_ns: int = 0


FIELDS = Counters.__match_args__


class Stats:
    """Counters that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, dict[str, int]] = {}
        self._emitted: dict[str, Counters] = {}

    def add(self, source_class: str, **amounts: int) -> None:
        """Add to the counters of one class; the names are the fields of `Counters`."""
        with self._lock:
            sums = self._sums.get(source_class) or self._new(source_class)
            for name, amount in amounts.items():
                sums[name] += amount

    def _new(self, source_class: str) -> dict[str, int]:
        if len(self._sums) >= MAX_CLASSES:
            source_class = OTHER
        return self._sums.setdefault(source_class, dict.fromkeys(FIELDS, 0))

    def snapshot(self) -> dict[str, Counters]:
        """The sums of every class at this moment."""
        with self._lock:
            return self._counters()

    def _counters(self) -> dict[str, Counters]:
        return {source_class: Counters(**sums) for source_class, sums in self._sums.items()}

    def total(self) -> Counters:
        """The sums over all classes."""
        classes = list(self.snapshot().values())
        return Counters(*(sum(getattr(c, name) for c in classes) for name in FIELDS))

    def emit(self, writer: NullWriter | None = None, **attributes: str | int | float) -> None:
        """Write one `point` event a class with what was added since the last `emit`.

        Without a writer they go where this process writes its events, if anywhere.

        The events' attributes are `bootseer.source_class`, `bootseer.<counter>` for each counter
        that is not zero, and those given. Classes to which nothing was added are left out.
        """
        with self._lock:
            now = self._counters()
            before, self._emitted = self._emitted, now
        for source_class, counters in sorted(now.items()):
            added = dataclasses.asdict(difference(counters, before.get(source_class, Counters())))
            amounts = {f"bootseer.{name}": amount for name, amount in added.items() if amount}
            if not amounts:
                continue
            about = {"bootseer.source_class": source_class, **amounts, **attributes}
            if writer is None:
                event(EVENT, **about)
            else:
                writer.point(EVENT, attributes=about)


def difference(after: Counters, before: Counters) -> Counters:
    """What was added between two snapshots of one class."""
    return Counters(*(getattr(after, name) - getattr(before, name) for name in FIELDS))
