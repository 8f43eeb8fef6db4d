"""Records shared by the archive, the restore and the node-shared tree; a scan's are in `entries`.

Terms: a *root* is an absolute directory that was captured; an *entry* is one thing below it, its
path relative to the root, with `/` between the parts and `""` for the root itself. Paths are str
in the file system encoding with `surrogateescape`, so that any name survives. Times are
nanoseconds since 1970, sizes bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

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
"""Kind of devices, fifos and sockets: noted by a scan, never archived."""

WORK_PREFIX = ".bootseer-"
"""Names that start so are our own staging places; a scan never reports them."""

HOST_XATTRS = ("trusted.overlay.", "user.overlay.", "security.selinux", "security.evm")
"""Attributes that mean something on their own host alone: how overlayfs keeps its layers (in
somebody's archive a way to show other files than it holds), labels of a local policy."""

XAttrs = tuple[tuple[str, bytes], ...]


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


Targets = Mapping[str, str]
Exclude = Sequence[str]
