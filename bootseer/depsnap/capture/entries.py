"""What a scan of a root saw, and what lies between two scans.

Apart from `model`, which every start imports: only a start that installs scans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.depsnap.types import XAttrs
from bootseer.light_dataclasses import dataclass


class Entry(NamedTuple):
    """One scanned thing. A named tuple: a scan makes 100,000 of them a second.

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

    `vanished` counts entries that went away while the scan ran, `unreadable` names directories
    that could not be listed (another user's): their contents are unknown, not empty.
    """

    root: str
    entries: Mapping[str, Entry]
    vanished: int = 0
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that is there before and after. `content` is False where only metadata differs."""

    entry: Entry
    content: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """What happened below `root` between two scans.

    `parents` are the unchanged directories above anything added or changed: an archive carries
    them so that it can be unpacked on its own, a restore leaves existing ones as they are.
    """

    root: str
    added: tuple[Entry, ...]
    changed: tuple[Change, ...]
    deleted: tuple[str, ...]
    parents: tuple[Entry, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.added or self.changed or self.deleted)


@dataclass(frozen=True, slots=True)
class RootDelta:
    """What an archive shall hold of one root: entries with every parent up to the root.

    `implied` are the paths of directories that are only there as parents.
    """

    root: str
    entries: tuple[Entry, ...]
    deleted: tuple[str, ...] = ()
    implied: frozenset[str] = frozenset()

    @classmethod
    def of_delta(cls, delta: Delta) -> RootDelta:
        """Everything a delta added or changed."""
        changed = tuple(change.entry for change in delta.changed)
        entries = (*delta.parents, *delta.added, *changed)
        return cls(delta.root, entries, delta.deleted, frozenset(e.path for e in delta.parents))

    @classmethod
    def of_tree(cls, tree: Tree) -> RootDelta:
        """A whole tree as it stands, for a root that did not exist before."""
        return cls(tree.root, tuple(tree.entries.values()))


def owners_of(entries: Iterable[Entry]) -> tuple[tuple[int, int], ...]:
    """The distinct (uid, gid) pairs, sorted."""
    return tuple(sorted({(e.uid, e.gid) for e in entries}))
