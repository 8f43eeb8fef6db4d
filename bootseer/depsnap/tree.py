"""The node-shared tree (stub: signatures stand, bodies follow)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from bootseer.depsnap.model import Digest, FormChoice, Limits, Placement, SharedTree


@dataclass(frozen=True, slots=True)
class TreeStatus:
    """One tree in the cache, for `gc`: size in bytes, last use in ns since 1970."""

    digest: Digest
    path: str
    size: int
    last_used_ns: int
    in_use: bool


def find(cache_dir: str, digest: Digest) -> SharedTree | None:
    """The complete, unmodified tree of this index digest, or None. A modified one is discarded."""
    raise NotImplementedError


def ensure(
    cache_dir: str,
    archive: str,
    digest: Digest,
    *,
    limits: Limits | None = None,
    jobs: int | None = None,
    allow_setuid: bool = False,
    owners: Collection[tuple[int, int]] | None = None,
    on_step: Callable[[str], None] | None = None,
) -> SharedTree:
    """`find`, else unpack `archive` once, under a lock per digest."""
    raise NotImplementedError


def place(
    tree: SharedTree,
    targets: Mapping[str, str] | None = None,
    *,
    form: FormChoice = "auto",
    writable: bool = True,
) -> tuple[Placement, ...]:
    """Make the tree's roots stand at `targets` (default: the recorded roots), all or none.

    `writable`: the job may write below the target (auto then never picks bind or symlink).
    Raises NotSupportedError when the wanted form (or none) works here, naming each reason.
    """
    raise NotImplementedError


def unplace(target: str, cache_dir: str) -> bool:
    """Take a placement away again; True when there was one."""
    raise NotImplementedError


def trees(cache_dir: str) -> tuple[TreeStatus, ...]:
    """All complete trees in the cache."""
    raise NotImplementedError


def discard(cache_dir: str, digest: Digest, *, force: bool = False) -> int:
    """Remove a tree and return the bytes freed. Raises BusyError while it is in use."""
    raise NotImplementedError
