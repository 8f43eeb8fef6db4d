"""Garbage collection of a store and of a node's cache: planned by pure rules, then carried out.

Never removed: a key whose lease is held and whose files are young, and a tree in use. Ages are
measured by the store's own clock, read from a file that is made there. Readers of a removed
archive keep their open file; a start that opens it a moment later falls back to a plain install.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from bootseer.depsnap.settings import DAY_S
from bootseer.depsnap.shared_tree import cache as treecache
from bootseer.depsnap.shared_tree import placement_records
from bootseer.depsnap.store import record_file, records
from bootseer.errors import BusyError, NotFoundError, NotSupportedError
from bootseer.storage.store import Stat, Store

ABANDONED_S = DAY_S
_YOUNG_LEASE_S = 60
Why = Literal["too old", "over the size limit", "unreferenced", "temporary"]


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """A store's object or a cached tree to delete: its name or digest, its bytes, and why."""

    name: str
    size_bytes: int
    why: Why


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The object names of a usable record and of its archive."""

    record: str
    archive: str


@dataclasses.dataclass(frozen=True, slots=True)
class KeyState:
    """All objects of one key with their ages, for `plan`. Times in seconds.

    `snapshots` are all its usable ones; None where one is of a newer version than can be read.
    """

    key: str
    objects: tuple[Stat, ...]
    temporaries: tuple[Stat, ...]
    leases: tuple[Stat, ...]
    snapshots: tuple[Snapshot, ...] | None


def survey(store: Store) -> list[KeyState]:
    """List the objects of every key of a store."""
    return [_survey_key(store, key) for key in records.list_keys(store)]


def _survey_key(store: Store, key: str) -> KeyState:
    folder = records.folder(key)
    objects = tuple(s for s in store.list(folder) if not s.is_folder)
    lease = records.lease_folder(key)
    try:
        leases = tuple(store.list(lease))
        temporaries = (*store.temporaries(folder), *store.temporaries(lease))
    except NotFoundError:
        leases, temporaries = (), tuple(store.temporaries(folder))
    return KeyState(key, objects, temporaries, leases, _find_snapshots(store, key))


def _find_snapshots(store: Store, key: str) -> tuple[Snapshot, ...] | None:
    try:
        return tuple(
            Snapshot(
                records.record_name(key, published.generation),
                records.archive_name(published.record),
            )
            for published in records.find_usable(store, key, on_damaged=_ignore)
        )
    except NotSupportedError:
        return None


def _ignore(_: records.BadRecordError) -> None:
    """Which archive a damaged record names cannot be known: no start finds it either."""


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
    kept: list[_Sized] = []
    for state in states:
        if _has_young_lease(state, now):
            continue  # it is being installed or published, or was a moment ago
        out += _leftovers(state, now)
        for snapshot in _measure_snapshots(state, now):
            if max_age_s is not None and now - snapshot.published_s > max_age_s:
                out += _removals_of(snapshot, "too old")
            else:
                kept.append(snapshot)
    if max_size_bytes is not None:
        total = sum(snapshot.archive_bytes for snapshot in kept)
        for snapshot in sorted(kept, key=lambda snapshot: snapshot.published_s):
            if total <= max_size_bytes:
                break
            out += _removals_of(snapshot, "over the size limit")
            total -= snapshot.archive_bytes
    removals = {removal.name: removal for removal in out}
    for state in states:
        if state.snapshots and all(snapshot.record in removals for snapshot in state.snapshots):
            why = removals[state.snapshots[0].record].why
            rest = [Removal(o.name, o.size_bytes, why) for o in state.objects]
            removals |= {
                removal.name: removal
                for removal in _sort_for_removal(rest)
                if removal.name not in removals
            }
    return list(removals.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Sized:
    """A snapshot's own objects, when it was published and the size of its archive."""

    objects: tuple[Stat, ...]
    published_s: float
    archive_bytes: int


def _measure_snapshots(state: KeyState, now: float) -> list[_Sized]:
    out = []
    for snapshot in state.snapshots or ():
        own = tuple(o for o in state.objects if o.name in (snapshot.record, snapshot.archive))
        size = sum(o.size_bytes for o in own if o.name == snapshot.archive)
        out.append(_Sized(own, max((o.mtime_s for o in own), default=now), size))
    return out


def _has_young_lease(state: KeyState, now: float) -> bool:
    return any(now - lease.mtime_s < _YOUNG_LEASE_S for lease in state.leases)


def _leftovers(state: KeyState, now: float) -> list[Removal]:
    out = [
        Removal(t.name, t.size_bytes, "temporary")
        for t in state.temporaries
        if now - t.mtime_s > ABANDONED_S
    ]
    if state.snapshots is None:
        return out  # the record that cannot be read may name any archive
    named = {snapshot.archive for snapshot in state.snapshots}
    for stored in state.objects:
        name = stored.name.rpartition("/")[2]
        if now - stored.mtime_s <= ABANDONED_S or stored.name in named:
            continue
        if record_file.ARCHIVE.fullmatch(name):
            out.append(Removal(stored.name, stored.size_bytes, "unreferenced"))
    return out


def _removals_of(snapshot: _Sized, why: Why) -> list[Removal]:
    return _sort_for_removal([Removal(o.name, o.size_bytes, why) for o in snapshot.objects])


def _sort_for_removal(removals: Sequence[Removal]) -> list[Removal]:
    """Records before archives, so that no reader finds a record without one.

    Lease generations stay: they are tiny, and reusing a number could let two holders in.
    """
    return sorted(removals, key=lambda removal: "archive-" in removal.name)


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
    """Shared trees of this node to remove: unused for too long, or least recently used."""
    # A tree that was just unpacked or placed may be about to be used: it stays.
    idle = [
        tree
        for tree in treecache.list_trees(treecache.folder_in(cache))
        if not tree.in_use and not treecache.recently_used(tree, int(now * 1e9))
    ]
    total = sum(tree.size for tree in idle)
    out = []
    for tree in sorted(idle, key=lambda tree: tree.last_used_ns):
        old = max_age_s is not None and now - tree.last_used_ns / 1e9 > max_age_s
        over = max_size_bytes is not None and total > max_size_bytes
        if old or over:
            out.append(Removal(tree.digest, tree.size, "too old" if old else "over the size limit"))
            total -= tree.size
    return out


def carry_out_trees(cache: str, removals: Sequence[Removal], now: float) -> int:
    """Discard trees, and return the bytes freed; one that was used meanwhile stays.

    The private layers of jobs that have ended are removed first.
    """
    folder = treecache.folder_in(cache)
    placement_records.sweep(folder)
    freed = 0
    for tree in treecache.list_trees(folder):
        if treecache.recently_used(tree, int(now * 1e9)):
            continue  # a start may be about to place it
        if any(removal.name == tree.digest for removal in removals):
            try:
                freed += treecache.discard(folder, tree.digest, packed=tree.packed)
            except BusyError:
                continue
    return freed
