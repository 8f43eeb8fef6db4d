"""Which server to ask: which ones are busy, and which hung or failed lately. Pure state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bootseer.blocks.fetch.records import Request
from bootseer.blocks.settings import FetchSettings


class ReplicaChoice:
    """Called with the fetcher's lock held."""

    def __init__(self, settings: FetchSettings) -> None:
        self._suspect_s = settings.suspect_s
        self._suspects: dict[str, float] = {}  # until when
        self._load: dict[str, int] = {}  # requests under way
        self._turn = 0

    def choose(self, request: Request, replicas: tuple[str, ...]) -> None:
        """Set which replica a request asks and which it avoids, and count it."""
        request.replicas, request.replica_chosen = replicas, True
        avoid, tries = frozenset[str](), 0
        for block, _ in request.items:
            if block.tries > tries:
                tries = block.tries
            if block.failed_replicas or block.corrupt_replicas:
                avoid |= block.failed_replicas | block.corrupt_replicas
        if request.hedge_of is not None:
            avoid |= {request.hedge_of.replica} - {""}
        self._turn += 1
        attempt = request.attempt
        attempt.prefer = choose_replica(
            replicas,
            avoid=avoid,
            suspects=frozenset(self._suspects),
            load=self._load,
            turn=self._turn,
        )
        attempt.avoid = avoid - {attempt.prefer}
        attempt.number = tries
        self._load[attempt.prefer] = self._load.get(attempt.prefer, 0) + 1

    def request_ended(self, request: Request) -> None:
        """Stop counting a request."""
        asked = request.attempt.prefer
        if asked in self._load:
            self._load[asked] -= 1
            if not self._load[asked]:
                del self._load[asked]

    def suspect(self, replica: str, now_s: float) -> None:
        """Pass a replica over for a while."""
        if replica:
            self._suspects[replica] = now_s + self._suspect_s

    def is_suspect(self, replica: str) -> bool:
        """Whether it is passed over now."""
        return replica in self._suspects

    def expire(self, now_s: float) -> None:
        """Trust suspects again whose time is over."""
        for replica in [name for name, until_s in self._suspects.items() if until_s <= now_s]:
            del self._suspects[replica]


def choose_replica(
    replicas: Sequence[str],
    *,
    avoid: frozenset[str],
    suspects: frozenset[str],
    load: Mapping[str, int],
    turn: int,
) -> str:
    """The replica to ask: not one that failed, if possible no suspect, the least busy; "" = any."""
    if not replicas:
        return ""
    usable = [name for name in replicas if name not in avoid] or list(replicas)
    usable = [name for name in usable if name not in suspects] or usable
    first = turn % len(usable)
    return min(usable[first:] + usable[:first], key=lambda name: load.get(name, 0))
