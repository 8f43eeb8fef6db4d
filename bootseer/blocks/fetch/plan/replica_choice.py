"""Which server to ask: who is busy, and who was found hanging or failing lately. Pure state."""

from __future__ import annotations

from bootseer.blocks.fetch.plan import retry_policy
from bootseer.blocks.fetch.records import Flight
from bootseer.blocks.settings import FetchSettings


class Replicas:
    """Called with the fetcher's lock held."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._suspects: dict[str, float] = {}
        self._load: dict[str, int] = {}
        self._turn = 0

    def choose(self, flight: Flight, replicas: tuple[str, ...]) -> None:
        """Set whom a flight asks and whom it avoids, and count it."""
        flight.replicas, flight.asked = replicas, True
        avoid = frozenset().union(*(block.avoid | block.bad for block, _ in flight.items))
        if flight.hedges is not None:
            avoid |= {flight.hedges.replica} - {""}
        self._turn += 1
        attempt = flight.attempt
        attempt.prefer = retry_policy.choose_replica(
            replicas,
            avoid=avoid,
            suspects=frozenset(self._suspects),
            load=self._load,
            turn=self._turn,
        )
        attempt.avoid = avoid - {attempt.prefer}
        attempt.number = max(block.tries for block, _ in flight.items)
        self._load[attempt.prefer] = self._load.get(attempt.prefer, 0) + 1

    def leave(self, flight: Flight) -> None:
        """A flight ended."""
        asked = flight.attempt.prefer
        if asked in self._load:
            self._load[asked] -= 1
            if not self._load[asked]:
                del self._load[asked]

    def suspect(self, replica: str, now_s: float) -> None:
        """Pass a replica over for a while."""
        if replica:
            self._suspects[replica] = now_s + self._settings.suspect_s

    def suspected(self, replica: str) -> bool:
        """Whether it is passed over now."""
        return replica in self._suspects

    def expire(self, now_s: float) -> None:
        """Trust those again whose time is over."""
        for replica in [name for name, until_s in self._suspects.items() if until_s <= now_s]:
            del self._suspects[replica]
