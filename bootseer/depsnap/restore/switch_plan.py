"""Plan how a staged tree is switched into an existing target. Pure, given callbacks that look.

The plan is a list of actions, each of which can be done again, or undone, after a kill at any
point (see `switch`): delete, remove a directory, move a new entry (a whole subtree at once), swap
a changed one, set a directory's metadata.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bootseer.depsnap.format.index_records import Index, IndexRoot
from bootseer.depsnap.types import DIRECTORY, XAttrs
from bootseer.errors import NotSupportedError

DELETE, REMOVE_DIRECTORY, MOVE, SWAP, METADATA = "delete", "rmdir", "move", "swap", "metadata"


class Status(NamedTuple):
    """The metadata of a path in the target."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    dev: int

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)


class Action(NamedTuple):
    """One step. `old` and `new` are (mode, uid, gid, mtime_ns) where metadata is set or kept,
    `old_xattrs` and `new_xattrs` a directory's where they differ."""

    what: str
    path: str
    old: tuple[int, int, int, int] | None = None
    new: tuple[int, int, int, int] | None = None
    old_xattrs: XAttrs | None = None
    new_xattrs: XAttrs | None = None


Lookup = Callable[[str], Status | None]
"""The status of a path below the target, None when it is absent or not below real directories."""

Attributes = Callable[[str], XAttrs]
"""The extended attributes of a directory below the target."""

Listing = Callable[[str], Iterator[str]]
"""All paths below a directory of the target, children before their directories."""


def plan(
    index: Index,
    root: IndexRoot,
    lookup: Lookup,
    below: Listing,
    attributes: Attributes,
    device: int,
) -> list[Action]:
    """All actions for one root, in the order to carry them out.

    Raises NotSupportedError when the target is not what the capture was made on: a directory that
    must be replaced still holds other files, or what was only a parent is no directory here.
    """
    deleted = set(root.deleted)
    removals = _deletions(root, lookup, device)
    placements: list[Action] = []
    metadata: list[Action] = []
    moved_folders: set[str] = set()
    for number in range(root.first, root.first + root.count):
        path = index.path[number]
        if path and path.rpartition("/")[0] in moved_folders:
            if index.kind[number] == DIRECTORY:
                moved_folders.add(path)
            continue
        is_directory = index.kind[number] == DIRECTORY
        now = lookup(path)
        if now is not None and is_directory and now.is_directory:
            _check_device(path, now, device)
            metadata.append(_metadata_action(index, number, now, attributes))
            continue
        if now is not None and is_directory and number in index.implied:
            raise NotSupportedError(
                f"{path!r} below {root.root} is no directory here, but was one at capture; "
                "restore onto what the capture stood on"
            )
        if now is None or now.is_directory or is_directory:
            if now is not None:
                removals += _removal(path, now, deleted, below)
            placements.append(Action(MOVE, path))
        else:
            placements.append(Action(SWAP, path))
        if is_directory:
            moved_folders.add(path)
    return [*dict.fromkeys(removals), *placements, *reversed(metadata)]


def _metadata_action(index: Index, number: int, now: Status, attributes: Attributes) -> Action:
    """Set the metadata of a directory that exists already."""
    path = index.path[number]
    old = _metadata_of(now)
    if number in index.implied:
        # What is only a parent keeps its metadata, its mtime too, whatever is swapped within it.
        return Action(METADATA, path, old, old)
    new = index.mode[number], index.uid[number], index.gid[number], index.mtime_ns[number]
    old_xattrs, new_xattrs = attributes(path), index.xattrs.get(number, ())
    if sorted(old_xattrs) == sorted(new_xattrs):
        return Action(METADATA, path, old, new)
    return Action(METADATA, path, old, new, old_xattrs, new_xattrs)


def _deletions(root: IndexRoot, lookup: Lookup, device: int) -> list[Action]:
    """Files first, then directories from the innermost out."""
    files: list[Action] = []
    directories: list[Action] = []
    for path in root.deleted:
        now = lookup(path)
        if now is None:
            continue
        _check_device(path, now, device)
        if now.is_directory:
            directories.append(Action(REMOVE_DIRECTORY, path, _metadata_of(now)))
        else:
            files.append(Action(DELETE, path))
    directories.sort(key=lambda a: a.path.count("/"), reverse=True)
    return files + directories


def _removal(path: str, now: Status, deleted: set[str], below: Listing) -> list[Action]:
    """Remove what an entry of another kind is to replace."""
    if not now.is_directory:
        return [Action(DELETE, path)]
    foreign = [p for p in below(path) if p not in deleted]
    if foreign:
        raise NotSupportedError(
            f"{path!r} is a directory here and holds {foreign[0]!r}, which the capture never saw; "
            "restore onto what the capture stood on"
        )
    return [Action(REMOVE_DIRECTORY, path, _metadata_of(now))]


def _check_device(path: str, now: Status, device: int) -> None:
    if now.dev != device:
        raise NotSupportedError(
            f"{path!r} lies on another file system than its root; capture and restore it as a "
            "root of its own"
        )


def _metadata_of(status: Status) -> tuple[int, int, int, int]:
    return stat.S_IMODE(status.mode), status.uid, status.gid, status.mtime_ns


def to_json(actions: list[Action]) -> list[list[Any]]:
    """The actions as JSON values, for the journal."""
    return [
        [*action[:4], *(x and [[n, v.hex()] for n, v in x] for x in action[4:])]
        for action in actions
    ]


def from_json(rows: list[list[Any]]) -> list[Action]:
    """The actions that `to_json` wrote."""
    return [
        Action(
            what,
            path,
            tuple(old) if old else None,
            tuple(new) if new else None,
            *(x if x is None else tuple((n, bytes.fromhex(v)) for n, v in x) for x in xattrs),
        )
        for what, path, old, new, *xattrs in rows
    ]
