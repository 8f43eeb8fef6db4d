"""Make, check and describe archives (stub: signatures stand, bodies follow)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bootseer.depsnap.model import ArchiveInfo, Digest, Limits, RootDelta, Tree


@dataclass(frozen=True, slots=True)
class Index:
    """An archive's verified table of contents."""

    roots: tuple[str, ...]
    tree_digest: Digest
    entries: int
    raw_bytes: int


def create(
    path: str, roots: Sequence[RootDelta], *, level: int = 3, threads: int | None = None
) -> ArchiveInfo:
    """Pack the roots' entries into a new archive at `path` (temporary name, fsync, rename).

    Raises BusyError when a file changed since its scan or while it was read, UsageError when
    roots overlap, NoSpaceError; nothing is left at `path` then.
    """
    raise NotImplementedError


def read_index(path: str, *, expected_digest: Digest | None, limits: Limits | None = None) -> Index:
    """Read and check an archive's index. Raises CorruptDataError, NotFoundError."""
    raise NotImplementedError


def verify(path: str, index: Index) -> Digest:
    """Read every byte of the archive against its digests, the tar headers against the index and
    the content against the tree digest, which is returned. Raises CorruptDataError."""
    raise NotImplementedError


def rescan_digest(tree: Tree) -> Digest:
    """The tree digest of what lies on disk."""
    raise NotImplementedError
