"""What may go from a store and from a node's cache: planned by pure rules, then deleted.

Never removed: a key whose lease is held and whose files are young, and a tree in use. Ages are
measured by the store's own clock, read from a file that we make there. Readers of a removed
archive keep their open file; one that comes a moment later falls back to a plain install.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from bootseer.depsnap import target_note
from bootseer.depsnap.settings import DAY_S
from bootseer.depsnap.shared_tree import tree
from bootseer.depsnap.store import records
from bootseer.errors import BusyError, NotFoundError, NotSupportedError
from bootseer.storage.store import Stat, Store

ABANDONED_S = DAY_S
Why = Literal["too old", "over the size limit", "unreferenced", "temporary"]


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """One thing to delete: a store's name or a cached tree's path, its bytes, and why."""

    name: str
    size_bytes: int
    why: Why


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The names of a usable record and of the archive that it names."""

    record: str
    archive: str


@dataclasses.dataclass(frozen=True, slots=True)
class KeyState:
    """All objects of one key with their ages, as the plan needs them. Times in seconds.

    `snapshots` are all its usable ones; None where one is of a newer version than we can read.
    """

    key: str
    objects: tuple[Stat, ...]
    temporaries: tuple[Stat, ...]
    leases: tuple[Stat, ...]
    snapshots: tuple[Snapshot, ...] | None


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
    return KeyState(key, objects, left, lease_files, _snapshots(store, key))


def _snapshots(store: Store, key: str) -> tuple[Snapshot, ...] | None:
    try:
        return tuple(
            Snapshot(
                records.name_of(key, found.generation),
                f"{records.folder(key)}/{found.record.archive.name}",
            )
            for found in records.usable(store, key, on_damaged=_pass_over)
        )
    except NotSupportedError:
        return None


def _pass_over(_: records.BadRecordError) -> None:
    """What a damaged record names nobody can tell: no start finds its archive."""


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
        if _young(state.leases, now):
            continue  # being installed or published, or just was
        out += _leftovers(state, now)
        for found in _sized(state, now):
            if max_age_s is not None and now - found.born_s > max_age_s:
                out += _all_of(found, "too old")
            else:
                kept.append(found)
    if max_size_bytes is not None:
        total = sum(found.archive_bytes for found in kept)
        for found in sorted(kept, key=lambda found: found.born_s):
            if total <= max_size_bytes:
                break
            out += _all_of(found, "over the size limit")
            total -= found.archive_bytes
    gone = {removal.name: removal for removal in out}
    for state in states:
        if state.snapshots and all(snapshot.record in gone for snapshot in state.snapshots):
            why = gone[state.snapshots[0].record].why
            rest = [Removal(o.name, o.size_bytes, why) for o in state.objects]
            gone |= {
                removal.name: removal for removal in _ordered(rest) if removal.name not in gone
            }
    return list(gone.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Sized:
    """A snapshot's own objects, when it was published and what its archive takes."""

    objects: tuple[Stat, ...]
    born_s: float
    archive_bytes: int


def _sized(state: KeyState, now: float) -> list[_Sized]:
    out = []
    for snapshot in state.snapshots or ():
        own = tuple(o for o in state.objects if o.name in (snapshot.record, snapshot.archive))
        size = sum(o.size_bytes for o in own if o.name == snapshot.archive)
        out.append(_Sized(own, max((o.mtime_s for o in own), default=now), size))
    return out


def _young(leases: Sequence[Stat], now: float) -> bool:
    return any(now - lease.mtime_s < 60 for lease in leases)


def _leftovers(state: KeyState, now: float) -> list[Removal]:
    out = [
        Removal(t.name, t.size_bytes, "temporary")
        for t in state.temporaries
        if now - t.mtime_s > ABANDONED_S
    ]
    if state.snapshots is None:
        return out  # any archive may be named by the record that we cannot read
    named = {snapshot.archive for snapshot in state.snapshots}
    for found in state.objects:
        name = found.name.rpartition("/")[2]
        if now - found.mtime_s <= ABANDONED_S or found.name in named:
            continue
        if records.ARCHIVE.fullmatch(name):
            out.append(Removal(found.name, found.size_bytes, "unreferenced"))
    return out


def _all_of(found: _Sized, why: Why) -> list[Removal]:
    return _ordered([Removal(o.name, o.size_bytes, why) for o in found.objects])


def _ordered(removals: Sequence[Removal]) -> list[Removal]:
    """Records go before archives, so that no reader finds a record without one.

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
    """Shared trees of this node that may go: unused for too long, or least recently used."""
    # A tree that was just unpacked or placed may be about to be used: it stays.
    idle = [
        t
        for t in tree.trees(target_note.trees_of(cache))
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
    tree.sweep(target_note.trees_of(cache))
    freed = 0
    for found in tree.trees(target_note.trees_of(cache)):
        if tree.recently_used(found, int(now * 1e9)):
            continue  # somebody is about to place it
        if any(removal.name == found.digest for removal in removals):
            try:
                freed += tree.discard(
                    target_note.trees_of(cache), found.digest, packed=found.packed
                )
            except BusyError:
                continue
    return freed
