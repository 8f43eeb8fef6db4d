"""Records that the archive, the restore and the node-shared tree have in common.

Terms: a *root* is an absolute directory that was captured; an *entry* is a file, directory or link
below it, its path relative to the root, with `/` between the parts and `""` for the root itself.
Paths are str in the file system encoding with `surrogateescape`, so that any name survives. Times
are nanoseconds since 1970, sizes bytes. The records of a scan are in `capture.entries`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from bootseer.light_dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, NewType

    Digest = NewType("Digest", str)
    Form = Literal["overlay", "bind", "symlink", "reflink", "hardlink", "copy"]
    FormChoice = Literal["auto", "overlay", "bind", "symlink", "reflink", "hardlink", "copy"]
else:
    Digest = str
"""A sha256 in lower-case hex."""

FILE, DIRECTORY, SYMLINK, HARDLINK = "f", "d", "l", "h"
OTHER = "o"
"""Kind of devices, FIFOs and sockets: reported by a scan, never archived."""

WORK_PREFIX = ".bootseer-"
"""Prefix of the names of our own staging directories; a scan never reports them."""

HOST_XATTRS = ("trusted.overlay.", "user.overlay.", "security.selinux", "security.evm")
"""Prefixes of attributes that have a meaning on their own host only: overlayfs's (by which a
hostile archive could show other files than it holds) and labels of a local policy."""

PACKED_DATA, PACKED_META = "data", "meta"
"""The files of a packed tree (`format.packed_tree`)."""

XAttrs = tuple[tuple[str, bytes], ...]
Step = Callable[[str], None]
"""A callback that is given the name of each step that is done: tests inject faults there."""


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    """Sizes and digests of a new archive. `index_digest` must be kept outside the archive.

    `size` is the archive's own; `raw_bytes` are the files' bytes without holes, `logical_bytes`
    with holes; `owners` are the (uid, gid) pairs in it.
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
    """Bounds on an archive, whatever its index claims. Bytes unless named otherwise.

    `total` counts files with their holes, `raw` without; `roots`, where given, are exactly those
    that it must hold.
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
class UnpackPolicy:
    """What unpacking an archive may do. `owners` are the (uid, gid) pairs that files may be given;
    None: any (for root alone)."""

    jobs: int
    allow_setuid: bool = False
    owners: frozenset[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class Omissions:
    """How much of an archive was not restored.

    `dropped_privileges` counts setuid and setgid bits and capabilities that the policy left out,
    `lost_xattrs` other attributes that the file system or lacking privileges refused.
    """

    lost_xattrs: int
    dropped_privileges: int


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore did. `dropped_privileges` and `lost_xattrs` as in `Omissions`; `kept` names
    directories that should have been deleted but hold something else."""

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
    """What `recover` did: nothing, leftovers removed, an unfinished switch finished or undone."""

    outcome: Literal["clean", "removed", "finished", "undone"]
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedTree:
    """A complete unpacked snapshot in the node's cache.

    `roots` maps each recorded root to the directory that holds its entries; `deleted` to what
    the install deleted below it. A `packed` one is mounted first (`shared_tree.packed_mount`), and
    its roots' directories, which have the same names, are inside that mount.
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
    """Where a root of a shared tree was placed, in which form, and why in no faster one."""

    target: str
    form: Form
    why: str
    digest: Digest
    tried: tuple[tuple[str, str], ...] = field(default=())


def absolute(path: str) -> str:
    """The normal absolute form of a root or target, symlinks in its parents resolved.

    The last part is kept as it is: whether a target may itself be a symlink is the caller's
    decision.
    """
    full = os.path.abspath(path)
    parent, name = os.path.split(full)
    return os.path.join(os.path.realpath(parent), name) if name else full


def no_step(_name: str) -> None:
    """The `Step` of a caller that injects no faults."""
