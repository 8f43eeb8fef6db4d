"""Removing what no checkpoint needs: replaced versions, and drafts whose writer is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from bootseer.errors import BootseerError, BusyError, CorruptDataError, NotFoundError
from bootseer.storage.store import Stat, Store
from bootseer.stripedfs.format.manifest import VERSION_PATTERN
from bootseer.stripedfs.format.pointer import (
    ATTRIBUTES,
    CURRENT,
    MANIFEST,
    SUFFIX,
    checkpoint_folder,
    is_checkpoint_name,
    read_current,
)
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.draft import LEASE, STALE_S, WRITING, idle, store_now_s, temporaries

GRACE_S = 3600.0
TEMPORARY = ".tmp-"
LEFT_ATTRIBUTES = "attributes of no file"


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """One thing that was removed, or would be; `age_s` is how long nobody has needed it."""

    name: str
    reason: str
    age_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Unused:
    """A version that the pointer does not name, and since when (the store's clock)."""

    name: str
    since_s: float


def checkpoints(store: Store, name: str) -> list[str]:
    """The checkpoint of this name, or else those directly in the folder of this name.

    With those whose names begin with a dot: so do the names that programs save under at first.
    """
    base = checkpoint_folder(name) if name else ""
    if base:
        try:
            if store.stat(base).is_folder:
                return [base]
        except NotFoundError:
            pass
    folder = name
    found = [*store.list(folder), *store.temporaries(folder)]
    return sorted(
        stat.name
        for stat in found
        if stat.is_folder
        and stat.name.endswith(SUFFIX)
        and not namespace.is_temporary(stat.name.rpartition("/")[2])
        and is_checkpoint_name(stat.name)
    )


def collect(
    store: Store, name: str, *, grace_s: float = GRACE_S, dry_run: bool = False
) -> Iterator[Removed]:
    """Collect one checkpoint; yields each thing after it was removed.

    A version goes when it has not been current for `grace_s`, so that readers that opened it can
    end; a draft when nobody has written to it for as long. With a damaged pointer no version goes.
    A dry run writes nothing, and so goes by this machine's clock. Raises the store's errors.
    """
    base = checkpoint_folder(name)
    now_s = time.time() if dry_run else store_now_s(store, base)
    if not dry_run:
        _unmark(store, base)
    doomed = list(_versions(store, base, now_s, grace_s))
    doomed += _drafts(store, base, now_s, grace_s)
    doomed += _attributes(store, base, now_s, grace_s)
    for each in doomed:
        if not dry_run:
            if each.reason == "unreferenced version" and _is_current(store, base, each.name):
                continue  # published while we looked
            store.delete_tree(each.name)
            if each.reason == LEFT_ATTRIBUTES:
                with contextlib.suppress(BootseerError):
                    store.delete(base)  # not when there is anything else
        yield each


def _attributes(store: Store, base: str, now_s: float, grace_s: float) -> Iterator[Removed]:
    """The mode and time of a plain file or folder that others have removed."""
    try:
        kept = store.stat(f"{base}/{ATTRIBUTES}")
    except NotFoundError:
        return
    if now_s - kept.mtime_s >= grace_s and not rename_remove.exists(
        store, base.removesuffix(SUFFIX)
    ):
        yield Removed(kept.name, LEFT_ATTRIBUTES, now_s - kept.mtime_s)


def collect_beside(
    store: Store, folder: str, *, grace_s: float = GRACE_S, dry_run: bool = False
) -> Iterator[Removed]:
    """Collect what killed writers of plain files left directly in a folder; as `collect`."""
    ours = [
        stat
        for stat in store.temporaries(folder)
        if not stat.is_folder and stat.name.rpartition("/")[2].startswith(TEMPORARY)
    ]
    if not ours:
        return
    now_s = time.time() if dry_run else store_now_s(store, folder)
    for stat in ours:
        age_s = now_s - stat.mtime_s
        if age_s >= max(grace_s, STALE_S):  # a younger one may be of this instant
            if not dry_run:
                store.delete(stat.name)
            yield Removed(stat.name, "orphaned temporary", age_s)


def _is_current(store: Store, base: str, name: str) -> bool:
    found = read_current(store, base)
    return found is not None and found.folder == name


def _versions(store: Store, base: str, now_s: float, grace_s: float) -> Iterator[Removed]:
    try:
        pointed = read_current(store, base)
    except CorruptDataError:
        return
    kept = pointed.folder if pointed is not None else ""
    dated = [
        (_finished_s(store, stat), stat.name)
        for stat in store.list(base)
        if stat.is_folder and VERSION_PATTERN.match(stat.name.rpartition("/")[2])
    ]
    for unused in unreferenced(dated, kept):
        if now_s - unused.since_s >= grace_s and not _marked(store, unused.name):
            yield Removed(unused.name, "unreferenced version", now_s - unused.since_s)


def unreferenced(dated: list[tuple[float, str]], kept: str) -> list[Unused]:
    """Versions, given as (when finished, name), that are not `kept`.

    One was replaced when the next was finished; one without a next was never current, or lost a
    race, and is unused since it was made.
    """
    ordered = sorted(dated)
    unused = []
    for place, (finished_s, name) in enumerate(ordered):
        later = ordered[place + 1][0] if place + 1 < len(ordered) else finished_s
        if name != kept:
            unused.append(Unused(name, later))
    return unused


def _finished_s(store: Store, version: Stat) -> float:
    try:
        return store.stat(f"{version.name}/{MANIFEST}").mtime_s
    except NotFoundError:
        return version.mtime_s


def _unmark(store: Store, base: str) -> None:
    """The mark of a move that ended before it was taken away would keep that version for ever."""
    try:
        pointed = read_current(store, base)
    except CorruptDataError:
        return
    if pointed is not None:
        store.delete(rename_remove.mark_of(pointed.folder))


def _marked(store: Store, version: str) -> bool:
    """Whether it was moved here and nobody has pointed to it yet: its pointer is elsewhere."""
    return rename_remove.exists(store, rename_remove.mark_of(version))


def _drafts(store: Store, base: str, now_s: float, grace_s: float) -> list[Removed]:
    found = []
    try:
        listed = list(store.temporaries(base))
    except NotFoundError:
        return []
    for stat in listed:
        last_s = _last_written_s(store, stat)
        if now_s - last_s < grace_s:
            continue
        if stat.is_folder and not idle(store, base, stat.name, now_s=now_s):
            continue
        if stat.is_folder or now_s - last_s >= STALE_S:  # a probe or pointer lives for an instant
            found.append(Removed(stat.name, "orphaned temporary", now_s - last_s))
    return found


def _last_written_s(store: Store, stat: Stat) -> float:
    newest_s = stat.mtime_s
    for folder in (f"{stat.name}/{WRITING}", f"{stat.name}/{WRITING}/{LEASE}"):
        try:
            newest_s = max([newest_s, *(s.mtime_s for s in store.list(folder))])
        except (NotFoundError, BootseerError):
            break
    return newest_s


def remove(store: Store, name: str, *, force: bool = False) -> str:
    """Remove a striped checkpoint with all its versions; returns its folder.

    Readers that have it open lose it. Raises NotFoundError when there is none, BusyError when
    somebody is writing it and `force` is not given.
    """
    base = checkpoint_folder(name)
    if not _exists(store, base):
        raise NotFoundError(f"there is no striped checkpoint {name} in {store.url}; check the name")
    if not force:
        for draft in temporaries(store, base):
            if not idle(store, base, draft):
                raise BusyError(
                    f"{name} in {store.url} is being written; wait, or force its removal"
                )
    store.delete(f"{base}/{CURRENT}")  # first, so that nobody opens half a checkpoint
    store.delete_tree(base)
    return base


def _exists(store: Store, base: str) -> bool:
    try:
        return store.stat(base).is_folder
    except NotFoundError:
        return False
