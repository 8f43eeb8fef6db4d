"""Whether a snapshot of a key is what the index decides now."""

from __future__ import annotations

import time
from collections.abc import Mapping

from bootseer.depsnap.key import pins
from bootseer.depsnap.key.resolver import Resolution
from bootseer.depsnap.key.snapshot_key import Key
from bootseer.depsnap.store import records
from bootseer.light_dataclasses import dataclass


class NotFittingError(Exception):
    """The index decides something else than the snapshot that was about to be put in place."""


@dataclass(slots=True)
class Judge:
    """Compares snapshots of `key` with what `resolution` finds.

    `before` are name -> version of the packages that stood in the roots before the install.
    `unresolved` says why the newest within `max_age_s` (seconds) was taken, where it was.
    """

    key: Key
    before: Mapping[str, str]
    resolution: Resolution
    max_age_s: float
    unresolved: str = ""

    def accepts(self, lock: str, packages: Mapping[str, str], created_unix_s: float) -> bool:
        """Whether a snapshot published with this lock, of these packages, at this time, fits.

        Waits for the resolver, within its limit, where the inputs alone do not decide.
        """
        if self.key.owns(packages):
            return True
        now = self.resolution.lock()
        if now is None:
            young = time.time() - created_unix_s <= self.max_age_s
            self.unresolved = self.resolution.why if young else ""
            return young
        if lock == now.digest:
            return True
        there = {**self.before, **packages}
        return not now.contradicts(packages) and all(
            name in there and pins.same_version(version, there[name])
            for name, version in now.pinned.items()
        )

    def covers(self, packages: Mapping[str, str]) -> bool:
        """Whether the lock, where it is known, may be that of an install of these packages."""
        now = self.resolution.lock()
        return now is None or not now.contradicts(packages)

    def lock_of(self, packages: Mapping[str, str]) -> str:
        """The lock to publish these packages with."""
        if self.key.owns(packages):
            return records.OWN
        now = self.resolution.lock()
        return now.digest if now else ""

    def differs_from(self, record: records.Record) -> str:
        """What the index decides otherwise than this snapshot, or that it is too old."""
        now = self.resolution.lock()
        if now is None:
            age_days = (time.time() - record.created_unix_s) / 86400
            return (
                f"the newest snapshot is {age_days:.1f} days old, and whether newer packages are "
                f"out is not known: {self.resolution.why}"
            )
        wanted = {n: v for n, v in now.pinned.items() if n not in self.before}
        named = {n: v for n, v in record.packages.items() if n in wanted or n not in pins.SEEDS}
        found = pins.differences(named, wanted)
        return "the newest snapshot has other packages: " + (_few(found) or "another lock")


def inputs_differ(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What two keys of one command differ in, by the names of their inputs."""
    names = sorted(n for n in {*old, *new} if old.get(n) != new.get(n))
    shown = []
    for name in names:
        one, other = old.get(name, "none"), new.get(name, "none")
        plain = len(one) <= 40 and len(other) <= 40
        shown.append(f"{name} ({one} → {other})" if plain else name)
    return "the newest snapshot of this command was made from other inputs: " + _few(shown)


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return ", ".join(texts[:5]) + more
