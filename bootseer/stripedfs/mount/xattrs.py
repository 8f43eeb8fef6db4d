"""Extended attributes of a mounted tree: a file's URL and digest, and how it is striped."""

from __future__ import annotations

import errno

from bootseer.fuse.operations import ROOT, FileSystemError
from bootseer.stripedfs.mount.inodes import Node
from bootseer.stripedfs.read.sources import DigestedSource, FileSource, StripedSource

PREFIX = b"user.bootseer."
URL, DIGEST = PREFIX + b"url", PREFIX + b"digest"
WIDTH, CHUNK = PREFIX + b"width", PREFIX + b"chunk"


def names_of(node: Node) -> list[bytes]:
    """The attributes that a node has. Needs no request, where opening the file takes several."""
    names = [URL]
    if not node.info.is_folder and not node.info.link and node.inode != ROOT:
        if node.info.striped:
            names += [WIDTH, CHUNK]
        if node.info.version is not None:
            names.append(DIGEST)
    return names


def value_of(source: FileSource, name: bytes) -> bytes:
    """The value of an attribute of an opened file. Raises FileSystemError(ENODATA)."""
    if isinstance(source, DigestedSource) and name == DIGEST:
        return source.digest.encode()
    if isinstance(source, StripedSource) and name in (WIDTH, CHUNK):
        layout = source.layout
        return str(layout.width if name == WIDTH else layout.chunk_bytes).encode()
    raise FileSystemError(errno.ENODATA)
