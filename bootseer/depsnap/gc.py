"""What may go from a store and from a node's cache: planned by pure rules, then deleted.

Never removed: a key whose lease is held and whose files are young, and a tree in use. Ages are
measured by the store's own clock, read from a file that we make there. Readers of a removed
archive keep their open file; one that comes a moment later falls back to a plain install.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from bootseer.depsnap import records, target
from bootseer.depsnap.settings import DAY_S
from bootseer.depsnap.sharing import tree
from bootseer.errors import BusyError, CorruptDataError, NotFoundError, NotSupportedError
from bootseer.storage.base import Stat, Store

ABANDONED_S = DAY_S
Why = Literal["too old", "over the size limit", "unreferenced", "temporary"]


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """One thing to delete: a store's name or a cached tree's path, its bytes, and why."""

    name: str
    size_bytes: int
    why: Why


@dataclasses.dataclass(frozen=True, slots=True)
class KeyState:
    """All objects of one key with their ages, as the plan needs them. Times in seconds."""

    key: str
    objects: tuple[Stat, ...]
    temporaries: tuple[Stat, ...]
    leases: tuple[Stat, ...]
    archive: str
    generation: int


def survey(store: Store) -> list[KeyState]:
    """Look at every key of a store."""
    return [_survey_key(store, key) for key in records.keys(store)]


def _survey_key(store: Store, key: str) -> KeyState:
    folder = records.folder(key)
    objects = tuple(s for s in store.list(folder) if not s.is_folder)
    try:
        lease_files = tuple(store.list(f"{folder}/lease"))
        left = (*store.temporaries(folder), *store.temporaries(f"{folder}/lease"))
    except NotFoundError:
        lease_files, left = (), tuple(store.temporaries(folder))
    archive, generation = "", 0
    try:
        found = records.current(store, key)
        if found is not None:
            archive, generation = f"{folder}/{found.record.archive.name}", found.generation
    except NotSupportedError:
        # Of a newer version: its archives are referenced by a record that we cannot read.
        archive, generation = "*", -1
    except CorruptDataError:
        archive, generation = "", 0
    return KeyState(key, objects, left, lease_files, archive, generation)


def now_s(store: Store) -> float:
    """The store's own clock, as its files show it."""
    name = f"{records.FOLDER}/clock"
    store.replace(name, b"")
    return store.stat(name).mtime_s


def plan(
    states: Sequence[KeyState],
    now: float,
    *,
    max_age_s: float | None = None,
    max_size_bytes: int | None = None,
) -> list[Removal]:
    """What to remove (pure): leftovers first, then by age, then the oldest over the size."""
    out: list[Removal] = []
    whole: list[tuple[float, int, KeyState]] = []
    for state in states:
        if _young(state.leases, now):
            continue  # being installed or published, or just was
        out += _leftovers(state, now)
        if state.archive and state.archive != "*":
            kept = [o for o in state.objects if o.name == state.archive]
            size = sum(o.size_bytes for o in kept)
            born = max((o.mtime_s for o in state.objects), default=now)
            if max_age_s is not None and now - born > max_age_s:
                out += _all_of(state, "too old")
            else:
                whole.append((born, size, state))
    if max_size_bytes is not None:
        total = sum(size for _, size, _ in whole)
        for _, size, state in sorted(whole, key=lambda item: item[0]):
            if total <= max_size_bytes:
                break
            out += _all_of(state, "over the size limit")
            total -= size
    return list({removal.name: removal for removal in out}.values())


def _young(leases: Sequence[Stat], now: float) -> bool:
    return any(now - lease.mtime_s < 60 for lease in leases)


def _leftovers(state: KeyState, now: float) -> list[Removal]:
    out = [
        Removal(t.name, t.size_bytes, "temporary")
        for t in state.temporaries
        if now - t.mtime_s > ABANDONED_S
    ]
    if state.archive == "*":
        return out
    for found in state.objects:
        name = found.name.rpartition("/")[2]
        if now - found.mtime_s <= ABANDONED_S or found.name == state.archive:
            continue
        if records.ARCHIVE.fullmatch(name):
            out.append(Removal(found.name, found.size_bytes, "unreferenced"))
    return out


def _all_of(state: KeyState, why: Why) -> list[Removal]:
    """A key's records go before its archives, so that no reader finds a record without one.

    Lease generations stay: they are tiny, and reusing a number could let two holders in.
    """
    ordered = sorted(state.objects, key=lambda o: "archive-" in o.name)
    return [Removal(o.name, o.size_bytes, why) for o in ordered]


def carry_out(store: Store, removals: Sequence[Removal]) -> int:
    """Delete, and return the bytes freed."""
    freed = 0
    for removal in removals:
        store.delete(removal.name)
        freed += removal.size_bytes
    return freed


def plan_trees(
    cache: str,
    now: float,
    *,
    max_age_s: float | None = None,
    max_size_bytes: int | None = None,
) -> list[Removal]:
    """Shared trees of this node that may go: unused for too long, or least recently used."""
    # A tree that was just unpacked or placed may be about to be used: it stays.
    idle = [
        t
        for t in tree.trees(target.trees_of(cache))
        if not t.in_use and not tree.recently_used(t, int(now * 1e9))
    ]
    total = sum(t.size for t in idle)
    out = []
    for found in sorted(idle, key=lambda t: t.last_used_ns):
        old = max_age_s is not None and now - found.last_used_ns / 1e9 > max_age_s
        over = max_size_bytes is not None and total > max_size_bytes
        if old or over:
            out.append(
                Removal(found.digest, found.size, "too old" if old else "over the size limit")
            )
            total -= found.size
    return out


def carry_out_trees(cache: str, removals: Sequence[Removal], now: float) -> int:
    """Discard trees, and return the bytes freed; one that came into use meanwhile stays.

    What ended jobs wrote into their private layers goes first.
    """
    tree.sweep(target.trees_of(cache))
    freed = 0
    for found in tree.trees(target.trees_of(cache)):
        if tree.recently_used(found, int(now * 1e9)):
            continue  # somebody is about to place it
        if any(removal.name == found.digest for removal in removals):
            try:
                freed += tree.discard(target.trees_of(cache), found.digest)
            except BusyError:
                continue
    return freed
