"""Unpacking an image's layers to a directory tree, where no block image can serve it.

The layers are flattened as for a block image, which refuses names that lead out of the tree and
decompression bombs, and follows no links outside; so every parent here is a directory that was made
a moment ago.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from bootseer.blockimage.tree_entries import Content, Entry, Kind, Stored
from bootseer.errors import CorruptDataError, from_os_error
from bootseer.imageprefetch.image_build.flatten import Flattener
from bootseer.imageprefetch.image_build.image_sources import LayerContent
from bootseer.imageprefetch.image_build.layer_reader import decompress, prefetch
from bootseer.system.libc import last_error, libc

if TYPE_CHECKING:
    from bootseer.storage.oci.repository import Repository

_PIECE_BYTES = 1 << 20
OpenLayer = Callable[[], AbstractContextManager[Iterator[bytes]]]


def unpack(layers: Sequence[tuple[str, OpenLayer]], directory: str) -> None:
    """Make the tree of `layers` in an empty directory: name and tar bytes, the lowest first.

    Needs root, for owners and devices. Raises CorruptDataError for invalid layers, NoSpaceError
    and the like, and then leaves an incomplete tree.
    """
    spool = tempfile.mkdtemp(prefix="content-", dir=os.path.dirname(directory))
    try:
        contents = _Contents(spool)
        flattener = Flattener(contents.store)
        for name, open_layer in reversed(layers):
            flattener.add(open_layer, name)
        _write_tree(flattener.entries(), contents, directory)
        _sync(directory)  # a tree that gets its name is complete, even after a power cut
    except OSError as error:
        raise from_os_error(error, f"unpack an image into {directory}") from error
    finally:
        shutil.rmtree(spool, ignore_errors=True)


class _Contents:
    """The bytes of files until their names are known, in a folder; `digest` is their number."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._count = 0

    def store(self, content: Content, size_bytes: int) -> Stored:
        self._count += 1
        number = self._count.to_bytes(8, "big")
        pieces = iter(content.chunks(_PIECE_BYTES))
        segments = content.segments
        with open(self.path(number), "xb", buffering=0) as file:
            for offset, length in [(0, size_bytes)] if segments is None else segments:
                pieces = _write(file.fileno(), offset, length, pieces)
            os.ftruncate(file.fileno(), size_bytes)
        return Stored(number, (), _PIECE_BYTES)

    def path(self, number: bytes) -> str:
        return os.path.join(self._spool, number.hex())


def _write(
    fd: int, offset: int, length: int, pieces: Iterator[bytes | bytearray | memoryview]
) -> Iterator[bytes | bytearray | memoryview]:
    """Write the next `length` bytes at `offset`; returns the pieces with the rest of them."""
    while length:
        piece = next(pieces, None)
        if piece is None:
            raise CorruptDataError("a layer ends in the middle of a file")
        view = memoryview(piece)
        written = os.pwrite(fd, view[:length], offset)
        offset, length = offset + written, length - written
        if written < len(view):
            pieces = _before(bytes(view[written:]), pieces)
    return pieces


def _before(
    first: bytes, rest: Iterator[bytes | bytearray | memoryview]
) -> Iterator[bytes | bytearray | memoryview]:
    yield first
    yield from rest


def _write_tree(entries: Sequence[Entry], contents: _Contents, directory: str) -> None:
    """Write entries, each after its directory; the directories' times are set last."""
    root = os.fsencode(directory)
    directories = []
    for entry in entries:
        path = os.path.join(root, entry.path) if entry.path else root
        if entry.hardlink_of is not None:
            os.link(os.path.join(root, entry.hardlink_of), path, follow_symlinks=False)
            continue
        if entry.kind is Kind.DIRECTORY:
            directories.append((path, entry))
            if entry.path:
                os.mkdir(path)
        else:
            _make(entry, path, contents)
        _set_owner(entry, path)
        if entry.kind is not Kind.DIRECTORY:
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
    for path, entry in reversed(directories):
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def _sync(directory: str) -> None:
    """Write the file system of `directory` to its disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc().syncfs(fd):
            raise last_error(directory)
    finally:
        os.close(fd)


def _make(entry: Entry, path: bytes, contents: _Contents) -> None:
    if entry.kind is Kind.SYMLINK:
        os.symlink(entry.link_target, path)
    elif entry.kind is not Kind.FILE:
        os.mknod(path, (int(entry.kind) << 12) | 0o600, entry.rdev)
    elif isinstance(entry.content, Stored):
        os.rename(os.fsencode(contents.path(entry.content.digest)), path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _set_owner(entry: Entry, path: bytes) -> None:
    """Set owner, mode and attributes; the owner first, as that removes setuid bits."""
    os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
    if entry.kind is not Kind.SYMLINK:
        os.chmod(path, stat.S_IMODE(entry.mode))
    for name, value in entry.xattrs.items():
        os.setxattr(path, name, value, follow_symlinks=False)


def layer_source(repository: Repository, digest: str, diff_id: str) -> OpenLayer:
    """What opens a layer's tar bytes in a registry; leaving the block checks their digests."""

    @contextmanager
    def open_layer() -> Iterator[Iterator[bytes]]:
        with repository.stream(digest) as stream:
            content = LayerContent(decompress(stream))
            with prefetch(content.pieces) as pieces:
                yield pieces
                for _ in pieces:
                    pass  # what follows the last member; the stream's end checks its digest
        content.check(digest, diff_id)

    return open_layer
