"""What a tree is made of, before it becomes an image: entries, and where their content is."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Kind(enum.IntEnum):
    """What an entry is; the numbers are those of `st_mode >> 12`."""

    FIFO = 1
    CHARACTER = 2
    DIRECTORY = 4
    BLOCK = 6
    FILE = 8
    SYMLINK = 10
    SOCKET = 12


class Content(Protocol):
    """A file's bytes, read once, from the start to the end.

    `segments` are where data may lie, in rising order as `(offset, length)`; everything else of
    the file is a hole and reads as zeros. None says that the whole file may be data.
    """

    @property
    def segments(self) -> Sequence[tuple[int, int]] | None: ...

    def chunks(self, size_bytes: int) -> Iterable[bytes | bytearray | memoryview]:
        """The bytes of the segments, one after the other, in pieces of at most `size_bytes`.

        Raises when the content ends early. A piece is not kept beyond the next one.
        """


class FileExtent(NamedTuple):
    """`length` bytes of a file from `file_offset` on lie at `data_offset` of the image's data."""

    file_offset: int
    data_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Content that is in the image's data already.

    `chunk_bytes` is a power of two: the file is cut into chunks of that size, and each is either
    wholly in one extent or a hole. `digest` is the sha256 of the content; of content with holes
    see `blockimage.data_writer`.
    """

    digest: bytes
    extents: tuple[FileExtent, ...]
    chunk_bytes: int


NO_XATTRS: Mapping[bytes, bytes] = {}


@dataclass(slots=True, kw_only=True)
class Entry:
    """One name of a tree.

    `path` is relative, without `.`, `..`, empty parts or a slash at its end; the root is `b""`.
    `mode` holds the permission bits and setuid, setgid, sticky. `hardlink_of` is the path of
    another entry that is a file (or anything but a directory) in its own right: then all other
    fields but `path` are that one's. A file has `content` (or None, when it is empty).
    """

    path: bytes
    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size_bytes: int = 0
    link_target: bytes = b""
    rdev: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=lambda: NO_XATTRS)
    content: Content | Stored | None = None
    hardlink_of: bytes | None = None
