"""Plan how a staged tree is switched into an existing target. Pure but for one look-up callback.

The plan is a list of actions, each of which can be done again, or undone, after a kill at any
point (see `journal`): delete, remove directory, move a new thing (a whole subtree at once), swap
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
    """What a look-up of a path in the target gives."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    dev: int

    @property
    def is_directory(self) -> bool:
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

    Raises NotSupportedError when the target is not what the capture stood on: a directory that
    must give way still holds other things, or a mere parent is no directory here.
    """
    deleted = set(root.deleted)
    removals = _deletions(root, lookup, device)
    placements: list[Action] = []
    metadata: list[Action] = []
    fresh: set[str] = set()
    for number in range(root.first, root.first + root.count):
        path = index.path[number]
        if path and path.rpartition("/")[0] in fresh:
            if index.kind[number] == DIRECTORY:
                fresh.add(path)
            continue
        is_directory = index.kind[number] == DIRECTORY
        now = lookup(path)
        if now is not None and is_directory and now.is_directory:
            _same_device(path, now, device)
            metadata.append(_metadata(index, number, now, attributes))
            continue
        if now is not None and is_directory and number in index.implied:
            raise NotSupportedError(
                f"{path!r} below {root.root} is no directory here, but was one at capture; "
                "restore onto what the capture stood on"
            )
        if now is None or now.is_directory or is_directory:
            if now is not None:
                removals += _clear(path, now, deleted, below)
            placements.append(Action(MOVE, path))
        else:
            placements.append(Action(SWAP, path))
        if is_directory:
            fresh.add(path)
    return [*_unique(removals), *placements, *reversed(metadata)]


def _metadata(index: Index, number: int, now: Status, attributes: Attributes) -> Action:
    """What a directory that is there already becomes."""
    path = index.path[number]
    if number in index.implied:
        # A mere parent keeps what it has, its mtime too, whatever is swapped within it.
        return Action(METADATA, path, _four(now), _four(now))
    has, wanted = attributes(path), index.xattrs.get(number, ())
    four = _four(now), _wanted(index, number)
    if sorted(has) == sorted(wanted):
        return Action(METADATA, path, *four)
    return Action(METADATA, path, *four, has, wanted)


def _deletions(root: IndexRoot, lookup: Lookup, device: int) -> list[Action]:
    """Files first, then directories from the innermost out."""
    files: list[Action] = []
    directories: list[Action] = []
    for path in root.deleted:
        now = lookup(path)
        if now is None:
            continue
        _same_device(path, now, device)
        if now.is_directory:
            directories.append(Action(REMOVE_DIRECTORY, path, _four(now)))
        else:
            files.append(Action(DELETE, path))
    directories.sort(key=lambda a: a.path.count("/"), reverse=True)
    return files + directories


def _clear(path: str, now: Status, deleted: set[str], below: Listing) -> list[Action]:
    """Make way for a thing of another kind."""
    if not now.is_directory:
        return [Action(DELETE, path)]
    foreign = [p for p in below(path) if p not in deleted]
    if foreign:
        raise NotSupportedError(
            f"{path!r} is a directory here and holds {foreign[0]!r}, which the capture never saw; "
            "restore onto what the capture stood on"
        )
    return [Action(REMOVE_DIRECTORY, path, _four(now))]


def _unique(actions: list[Action]) -> list[Action]:
    return list(dict.fromkeys(actions))


def _same_device(path: str, now: Status, device: int) -> None:
    if now.dev != device:
        raise NotSupportedError(
            f"{path!r} lies on another file system than its root; capture and restore it as a "
            "root of its own"
        )


def _four(status: Status) -> tuple[int, int, int, int]:
    return stat.S_IMODE(status.mode), status.uid, status.gid, status.mtime_ns


def _wanted(index: Index, number: int) -> tuple[int, int, int, int]:
    return index.mode[number], index.uid[number], index.gid[number], index.mtime_ns[number]


def to_json(actions: list[Action]) -> list[list[Any]]:
    return [
        [*action[:4], *(x and [[n, v.hex()] for n, v in x] for x in action[4:])]
        for action in actions
    ]


def from_json(rows: list[list[Any]]) -> list[Action]:
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
