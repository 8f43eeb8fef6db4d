"""Removing what no checkpoint needs: replaced versions, and drafts whose writer is dead."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from bootseer.errors import BootseerError, BusyError, CorruptDataError, NotFoundError
from bootseer.storage.store import TEMPORARY, Stat, Store
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
from bootseer.stripedfs.write.draft import (
    LEASE,
    STALE_S,
    WRITING,
    is_abandoned,
    list_drafts,
    read_store_clock,
)

GRACE_S = 3600.0
LEFT_ATTRIBUTES = "attributes of no file"


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """One thing that was removed, or would be; `age_s` is how long it has not been needed."""

    name: str
    reason: str
    age_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Unused:
    """A version that the pointer does not name, and since when (the store's clock)."""

    name: str
    since_s: float


def find_checkpoints(store: Store, name: str) -> list[str]:
    """The folder of the checkpoint of this name, or of those directly in the folder of this name.

    Names that begin with a dot count: some programs save under one at first.
    """
    base = checkpoint_folder(name) if name else ""
    if base and _is_folder(store, base):
        return [base]
    return sorted(
        stat.name
        for stat in (*store.list(name), *store.temporaries(name))
        if stat.is_folder
        and stat.name.endswith(SUFFIX)
        and not namespace.is_temporary(stat.name.rpartition("/")[2])
        and is_checkpoint_name(stat.name)
    )


def collect_garbage(
    store: Store, name: str, *, grace_s: float = GRACE_S, dry_run: bool = False
) -> Iterator[Removed]:
    """Remove what one checkpoint does not need; yields each thing after it was removed.

    A version is removed when it has not been current for `grace_s`, so that readers that opened it
    can finish; a draft when it was not written to for as long. With a damaged pointer no version is
    removed. A dry run writes nothing, and so uses this machine's clock. Raises the store's errors.
    """
    base = checkpoint_folder(name)
    now_s = time.time() if dry_run else read_store_clock(store, base)
    if not dry_run:
        _remove_mark(store, base)
    doomed = list(_find_unused_versions(store, base, now_s, grace_s))
    doomed += _find_abandoned_drafts(store, base, now_s, grace_s)
    doomed += _find_left_attributes(store, base, now_s, grace_s)
    for each in doomed:
        if not dry_run:
            if each.reason == "unreferenced version" and _is_current(store, base, each.name):
                continue  # published while we looked
            store.delete_tree(each.name)
            if each.reason == LEFT_ATTRIBUTES:
                with contextlib.suppress(BootseerError):
                    store.delete(base)  # fails when there is anything else
        yield each


def _find_left_attributes(
    store: Store, base: str, now_s: float, grace_s: float
) -> Iterator[Removed]:
    """The mode and time of a plain file or folder that does not exist any more."""
    try:
        stored = store.stat(f"{base}/{ATTRIBUTES}")
    except NotFoundError:
        return
    if now_s - stored.mtime_s >= grace_s and not rename_remove.exists(
        store, base.removesuffix(SUFFIX)
    ):
        yield Removed(stored.name, LEFT_ATTRIBUTES, now_s - stored.mtime_s)


def collect_temporaries(
    store: Store, folder: str, *, grace_s: float = GRACE_S, dry_run: bool = False
) -> Iterator[Removed]:
    """As `collect_garbage`, of what killed writers of plain files left directly in a folder."""
    ours = [
        stat
        for stat in store.temporaries(folder)
        if not stat.is_folder and stat.name.rpartition("/")[2].startswith(TEMPORARY)
    ]
    if not ours:
        return
    now_s = time.time() if dry_run else read_store_clock(store, folder)
    for stat in ours:
        age_s = now_s - stat.mtime_s
        if age_s >= max(grace_s, STALE_S):  # a younger one may be in use
            if not dry_run:
                store.delete(stat.name)
            yield Removed(stat.name, "orphaned temporary", age_s)


def _is_current(store: Store, base: str, name: str) -> bool:
    current = read_current(store, base)
    return current is not None and current.folder == name


def _find_unused_versions(
    store: Store, base: str, now_s: float, grace_s: float
) -> Iterator[Removed]:
    try:
        current = read_current(store, base)
    except CorruptDataError:
        return
    kept = current.folder if current is not None else ""
    dated = [
        (_finished_s(store, stat), stat.name)
        for stat in store.list(base)
        if stat.is_folder and VERSION_PATTERN.match(stat.name.rpartition("/")[2])
    ]
    for unused in list_unreferenced(dated, kept):
        if now_s - unused.since_s >= grace_s and not _is_marked(store, unused.name):
            yield Removed(unused.name, "unreferenced version", now_s - unused.since_s)


def list_unreferenced(dated: list[tuple[float, str]], kept: str) -> list[Unused]:
    """Versions, given as (when finished, name), that are not `kept`.

    A version was replaced when the next one was finished. If the last one is not `kept`, it was
    never current, or lost a race, and has not been needed since it was finished.
    """
    ordered = sorted(dated)
    replaced_s = [when for when, _ in ordered[1:]] + [when for when, _ in ordered[-1:]]
    pairs = zip(ordered, replaced_s, strict=True)
    return [Unused(name, since_s) for (_, name), since_s in pairs if name != kept]


def _finished_s(store: Store, version: Stat) -> float:
    try:
        return store.stat(f"{version.name}/{MANIFEST}").mtime_s
    except NotFoundError:
        return version.mtime_s


def _remove_mark(store: Store, base: str) -> None:
    """Remove what an interrupted move left, or its version could never be collected."""
    try:
        current = read_current(store, base)
    except CorruptDataError:
        return
    if current is not None:
        store.delete(rename_remove.mark_name(current.folder))


def _is_marked(store: Store, version: str) -> bool:
    """Whether a version was moved here and is not pointed to yet: its pointer is elsewhere."""
    return rename_remove.exists(store, rename_remove.mark_name(version))


def _find_abandoned_drafts(
    store: Store, base: str, now_s: float, grace_s: float
) -> Iterator[Removed]:
    try:
        listed = list(store.temporaries(base))
    except NotFoundError:
        return
    for stat in listed:
        age_s = now_s - _last_written_s(store, stat)
        if age_s < grace_s:
            continue
        if stat.is_folder:
            is_left = is_abandoned(store, base, stat.name, now_s=now_s)
        else:
            is_left = age_s >= STALE_S  # a probe of the clock or a new pointer exists for a moment
        if is_left:
            yield Removed(stat.name, "orphaned temporary", age_s)


def _last_written_s(store: Store, stat: Stat) -> float:
    newest_s = stat.mtime_s
    for folder in (f"{stat.name}/{WRITING}", f"{stat.name}/{WRITING}/{LEASE}"):
        try:
            newest_s = max([newest_s, *(s.mtime_s for s in store.list(folder))])
        except (NotFoundError, BootseerError):
            break
    return newest_s


def remove_checkpoint(store: Store, name: str, *, force: bool = False) -> str:
    """Remove a striped checkpoint with all its versions; returns its folder.

    Readers that have it open lose it. Raises NotFoundError when there is none, BusyError when it
    is being written, unless `force` is given.
    """
    base = checkpoint_folder(name)
    if not _is_folder(store, base):
        raise NotFoundError(f"there is no striped checkpoint {name} in {store.url}; check the name")
    if not force:
        for draft in list_drafts(store, base):
            if not is_abandoned(store, base, draft):
                raise BusyError(
                    f"{name} in {store.url} is being written; wait, or force its removal"
                )
    store.delete(f"{base}/{CURRENT}")  # first, so that half a checkpoint is never opened
    store.delete_tree(base)
    return base


def _is_folder(store: Store, name: str) -> bool:
    try:
        return store.stat(name).is_folder
    except NotFoundError:
        return False
