"""Records shared by the scan, the archive, the restore and the node-shared tree.

Terms: a *root* is an absolute directory that was captured; an *entry* is one thing below it, its
path relative to the root, with `/` between the parts and `""` for the root itself. Paths are str
in the file system encoding with `surrogateescape`, so that any name survives. Times are
nanoseconds since 1970, sizes bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, NewType

from bootseer.light_dataclasses import dataclass, field

Digest = NewType("Digest", str)
"""A sha256 in lower-case hex."""

FILE, DIRECTORY, SYMLINK, HARDLINK = "f", "d", "l", "h"
OTHER = "o"
"""Kind of devices, fifos and sockets: noted by a scan, never archived."""

WORK_PREFIX = ".bootseer-"
"""Names that start so are our own staging places; a scan never reports them."""

Form = Literal["overlay", "bind", "symlink", "reflink", "hardlink", "copy"]
FormChoice = Literal["auto", "overlay", "bind", "symlink", "reflink", "hardlink", "copy"]

HOST_XATTRS = ("trusted.overlay.", "user.overlay.", "security.selinux", "security.evm")
"""Attributes that mean something on their own host alone: how overlayfs keeps its layers (in
somebody's archive a way to show other files than it holds), labels of a local policy."""

XAttrs = tuple[tuple[str, bytes], ...]


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


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    """What a new archive is. `index_digest` must be kept outside the archive.

    `size` is the archive's own; `raw_bytes` are the files' bytes as they lie on disk (holes not
    counted), `logical_bytes` with holes; `owners` are the (uid, gid) pairs in it.
    """

    index_digest: Digest
    tree_digest: Digest
    size: int
    raw_bytes: int
    logical_bytes: int
    entries: int
    deleted: int
    skipped: tuple[str, ...]
    owners: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on an archive that hold whatever its index says. Bytes unless named otherwise.

    `total` counts files with their holes, `raw` without; `roots`, where given, are all that it
    must hold, no more and no less.
    """

    index_stored: int = 256 << 20
    index_raw: int = 1 << 30
    entries: int = 5_000_000
    frame_raw: int = 64 << 20
    total: int = 1 << 40
    raw: int = 1 << 40
    holes: int = 64 << 30
    path: int = 4095
    name: int = 255
    xattrs: int = 128 << 10
    roots: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore did.

    `dropped_privileges` counts setuid/setgid bits and capabilities left out, `lost_xattrs` other
    attributes that this file system or privilege refuses; `kept` names directories that should
    have been deleted but hold something else.
    """

    targets: tuple[str, ...]
    entries: int
    raw_bytes: int
    deleted: int
    dropped_privileges: int
    lost_xattrs: int
    kept: tuple[str, ...]
    jobs: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` found: nothing, leftovers removed, an unfinished switch finished or undone."""

    outcome: Literal["clean", "removed", "finished", "undone"]
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedTree:
    """A complete unpacked snapshot in the node's cache.

    `roots` maps each recorded root to the directory that holds its entries; `deleted` to what
    the install deleted below it. A `packed` one is mounted first (`sharing.packed`), and its
    roots' directories, which bear the same names, are in there.
    """

    digest: Digest
    path: str
    roots: Mapping[str, str]
    deleted: Mapping[str, tuple[str, ...]]
    size: int
    fresh: bool = False
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a shared tree's root now stands, by which form, and why not by a faster one."""

    target: str
    form: Form
    why: str
    digest: Digest
    tried: tuple[tuple[str, str], ...] = field(default=())


def absolute(path: str) -> str:
    """The normal absolute form of a root or target, symlinks in its parents resolved.

    The last part is kept as it is: a target that is itself a symlink is for the caller to judge.
    """
    full = os.path.abspath(path)
    parent, name = os.path.split(full)
    return os.path.join(os.path.realpath(parent), name) if name else full


def owners_of(entries: Iterable[Entry]) -> tuple[tuple[int, int], ...]:
    """The distinct (uid, gid) pairs, sorted."""
    return tuple(sorted({(e.uid, e.gid) for e in entries}))


Targets = Mapping[str, str]
Exclude = Sequence[str]
