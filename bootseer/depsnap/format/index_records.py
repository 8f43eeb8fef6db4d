"""The records of an archive's index. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bootseer.depsnap.capture.entries import Entry
from bootseer.depsnap.format.unit_layout import Segment, Unit, units
from bootseer.depsnap.types import Digest, XAttrs


class BadIndexError(Exception):
    """A fault in the index's bytes; the caller that catches it adds the archive's path."""


class Frame(NamedTuple):
    """One compressed frame: its offset, its sizes, its sha256, and its units' places.

    `upto` is the number of entries whose headers are in this frame or before it; `units` is
    (entry, block, offset in the raw frame), flat.
    """

    offset: int
    stored: int
    raw: int
    digest: str
    upto: int
    units: list[int]


@dataclass(frozen=True, slots=True)
class IndexRoot:
    """A captured root and the range of its entries; its own directory is the first of them."""

    root: str
    first: int
    count: int
    deleted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """A checked index. Columns have one value an entry, in order, parents before children.

    `parent` is the number of the entry's directory (-1 for a root), `name` its last part.
    `link` holds symlinks' texts and hard links' files (a path in the same root).
    """

    digest: Digest
    tree_digest: Digest
    roots: tuple[IndexRoot, ...]
    path: list[str]
    kind: str
    mode: list[int]
    uid: list[int]
    gid: list[int]
    mtime_ns: list[int]
    size: list[int]
    link: dict[int, str]
    xattrs: dict[int, XAttrs]
    segments: dict[int, tuple[Segment, ...]]
    implied: frozenset[int]
    frames: list[Frame]
    parent: list[int]
    name: list[str]
    stored_bytes: int
    raw_bytes: int
    logical_bytes: int
    skipped: tuple[str, ...]

    @property
    def entries(self) -> int:
        """How many entries there are."""
        return len(self.path)

    def units_of(self, entry: int) -> list[Unit]:
        """The units of a file's data."""
        return units(entry, self.size[entry], self.segments.get(entry))

    def entry(self, number: int) -> Entry:
        """One entry as a record; what only a disk knows (inode, ctime) is 0."""
        return Entry(
            self.path[number],
            self.kind[number],
            self.mode[number],
            self.uid[number],
            self.gid[number],
            self.mtime_ns[number],
            self.size[number],
            self.link.get(number, ""),
            self.xattrs.get(number, ()),
            0,
            0,
            1,
            0,
            0,
        )

    def owners(self) -> frozenset[tuple[int, int]]:
        """The distinct (uid, gid) pairs."""
        return frozenset(zip(self.uid, self.gid, strict=True))
