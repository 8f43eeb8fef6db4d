"""The entries that a scan of a root saw, and the differences between two scans.

Not in `types`, which every start imports: a start that restores scans nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.depsnap.types import XAttrs
from bootseer.light_dataclasses import dataclass


class Entry(NamedTuple):
    """One scanned file, directory or link. A named tuple: a scan makes 100,000 of them a second.

    `kind` is FILE, DIRECTORY, SYMLINK or OTHER; files with `nlink` > 1 and the same (`dev`,
    `ino`) are hard links of each other. `size` and `blocks` (512 bytes each) are 0 for all but
    files; `target` is a symlink's text.
    """

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    target: str
    xattrs: XAttrs
    dev: int
    ino: int
    nlink: int
    ctime_ns: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Tree:
    """All that a scan saw below `root`, by path, parents before children.

    `vanished` counts entries that were removed while the scan ran. Nothing is known of the contents
    of directories that could not be listed (another user's).
    """

    root: str
    entries: Mapping[str, Entry]
    vanished: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that both scans saw. `content` is False where only its metadata differs."""

    entry: Entry
    content: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed below `root` between two scans.

    `parents` are the unchanged directories above anything added or changed: an archive has them
    so that it can be unpacked on its own, a restore leaves existing ones as they are.
    """

    root: str
    added: tuple[Entry, ...]
    changed: tuple[Change, ...]
    deleted: tuple[str, ...]
    parents: tuple[Entry, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing changed."""
        return not (self.added or self.changed or self.deleted)


@dataclass(frozen=True, slots=True)
class RootDelta:
    """What an archive is to hold of one root: entries with every parent up to the root.

    `implied` are the paths of directories that are in it as parents only.
    """

    root: str
    entries: tuple[Entry, ...]
    deleted: tuple[str, ...] = ()
    implied: frozenset[str] = frozenset()

    @classmethod
    def of_delta(cls, delta: Delta) -> RootDelta:
        """All that a delta added, changed or deleted."""
        changed = tuple(change.entry for change in delta.changed)
        entries = (*delta.parents, *delta.added, *changed)
        return cls(delta.root, entries, delta.deleted, frozenset(e.path for e in delta.parents))

    @classmethod
    def of_tree(cls, tree: Tree) -> RootDelta:
        """A whole tree, for a root that did not exist before."""
        return cls(tree.root, tuple(tree.entries.values()))


def owners_of(entries: Iterable[Entry]) -> tuple[tuple[int, int], ...]:
    """The distinct (uid, gid) pairs, sorted."""
    return tuple(sorted({(e.uid, e.gid) for e in entries}))
