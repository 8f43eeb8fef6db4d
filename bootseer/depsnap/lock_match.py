"""Whether a snapshot of a key is what the index decides now."""

from __future__ import annotations

import time
from collections.abc import Mapping

from bootseer.depsnap import pins
from bootseer.depsnap.key.resolver import Resolution
from bootseer.depsnap.key.snapshot_key import Key
from bootseer.depsnap.settings import DAY_S
from bootseer.depsnap.store import record_file
from bootseer.light_dataclasses import dataclass


class NotFittingError(Exception):
    """The index decides something else than the snapshot that was about to be placed."""


@dataclass(slots=True)
class LockMatcher:
    """Compares snapshots of `key` with what `resolution` finds.

    `before` are name -> version of the packages that were in the roots before the install.
    `unresolved` says why the newest snapshot within `max_age_s` was accepted instead, if it was.
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
        if self.key.is_lock_of(packages):
            return True
        resolved = self.resolution.lock()
        if resolved is None:
            young = time.time() - created_unix_s <= self.max_age_s
            self.unresolved = self.resolution.why if young else ""
            return young
        if lock == resolved.digest:
            return True
        installed = {**self.before, **packages}
        return not resolved.contradicts(packages) and all(
            name in installed and pins.same_version(version, installed[name])
            for name, version in resolved.pinned.items()
        )

    def may_be_lock_of(self, packages: Mapping[str, str]) -> bool:
        """Whether the lock, where it is known, may be that of an install of these packages."""
        resolved = self.resolution.lock()
        return resolved is None or not resolved.contradicts(packages)

    def lock_for(self, packages: Mapping[str, str]) -> str:
        """The lock to publish these packages with."""
        if self.key.is_lock_of(packages):
            return record_file.OWN
        resolved = self.resolution.lock()
        return resolved.digest if resolved else ""

    def describe_difference(self, record: record_file.Record) -> str:
        """What the index decides otherwise than this snapshot, or that it is too old."""
        resolved = self.resolution.lock()
        if resolved is None:
            age_days = (time.time() - record.created_unix_s) / DAY_S
            return (
                f"the newest snapshot is {age_days:.1f} days old, and whether newer packages are "
                f"out is not known: {self.resolution.why}"
            )
        wanted = {n: v for n, v in resolved.pinned.items() if n not in self.before}
        named = {n: v for n, v in record.packages.items() if n in wanted or n not in pins.SEEDS}
        differences = pins.describe_differences(named, wanted)
        return "the newest snapshot has other packages: " + (_few(differences) or "another lock")


def describe_input_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What two keys of one command differ in, by the names of their inputs."""
    names = sorted(n for n in {*old, *new} if old.get(n) != new.get(n))
    shown = []
    for name in names:
        one, other = old.get(name, "none"), new.get(name, "none")
        short = len(one) <= 40 and len(other) <= 40
        shown.append(f"{name} ({one} → {other})" if short else name)
    return "the newest snapshot of this command was made from other inputs: " + _few(shown)


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return ", ".join(texts[:5]) + more
