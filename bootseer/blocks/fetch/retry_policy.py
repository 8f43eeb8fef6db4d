"""Whether and when a block is asked for again: pure decisions."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.blocks.settings import FetchSettings
from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.storage import retry
from bootseer.system.randomness import CHANCE

AT_ONCE = 0.0


def backoff_s(failures: int, settings: FetchSettings, chance: float) -> float:
    """A share `chance` (0 to 1) of a time that doubles with each failure."""
    first_s, most_s = settings.backoff_s, settings.backoff_limit_s
    return retry.backoff_s(failures, first_s=first_s, most_s=most_s, chance=chance)


def next_try_s(
    error: BaseException,
    *,
    tries: int,
    replicas: Sequence[str],
    avoid: frozenset[str],
    bad: frozenset[str],
    settings: FetchSettings,
    chance: float | None = None,
) -> float | None:
    """Seconds until the next try of a block that failed `tries` times, or None: `error` is final.

    `avoid` are the replicas that failed, `bad` those of them whose bytes were wrong. While other
    replicas are known, the next one is asked at once. A server that said when to ask again
    (`Retry-After`) is asked no sooner.
    """
    if tries >= settings.tries:
        return None
    if isinstance(error, CorruptDataError):
        if replicas and not set(replicas) - bad:
            return None
        if not replicas and tries >= settings.corrupt_tries:
            return None
        return AT_ONCE
    if not (isinstance(error, BootseerError) and error.retryable):
        return None
    if set(replicas) - avoid:
        return AT_ONCE
    asked_s = error.retry_after_s if isinstance(error, StoreUnavailableError) else 0.0
    chance = CHANCE.random() if chance is None else chance
    return max(asked_s, backoff_s(tries, settings, chance))


def hedge_after_s(first_waits_s: Sequence[float], settings: FetchSettings) -> float:
    """How long a request may stand still before a second one is made."""
    if not first_waits_s:
        return settings.hedge_s
    usual = sorted(first_waits_s)[len(first_waits_s) // 2]
    return min(max(settings.hedge_s, 3 * usual), max(settings.hedge_s, settings.hedge_limit_s))
