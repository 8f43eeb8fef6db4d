"""An image's layers as a directory tree: the way out where no block image can serve.

The layers are flattened as for a block image, so names that lead out, links that point anywhere
and bombs are refused there; here, every parent is a directory that was made a moment ago.
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
from bootseer.system.libc import last_error, libc

if TYPE_CHECKING:
    from bootseer.storage.oci.repository import Repository

_PIECE_BYTES = 1 << 20
OpenLayer = Callable[[], AbstractContextManager[Iterator[bytes]]]


def unpack(layers: Sequence[tuple[str, OpenLayer]], directory: str) -> None:
    """Make `directory`, which is empty, the tree of `layers`: name and tar bytes, lowest first.

    Needs root, for owners and devices. Raises CorruptDataError for unsound layers, NoSpaceError
    and the like; the directory then holds rubbish.
    """
    spool = tempfile.mkdtemp(prefix="content-", dir=os.path.dirname(directory))
    try:
        contents = _Contents(spool)
        flattener = Flattener(contents.store)
        for name, opened in reversed(layers):
            flattener.add(opened, name)
        _write_tree(flattener.entries(), contents, directory)
        _sync(directory)  # a tree that has its name is whole, after a power cut too
    except OSError as error:
        raise from_os_error(error, f"unpack an image into {directory}") from error
    finally:
        shutil.rmtree(spool, ignore_errors=True)


class _Contents:
    """Files' bytes beside the tree, until their names are known; `digest` holds their number."""

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
    """Put the next `length` bytes at `offset`; what a piece has beyond them comes first next."""
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
    """Names come after their directories; a directory's time is set when nothing follows."""
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
    """Write the file system of `directory` to its disk, and no other."""
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
    """Owner first: changing it takes setuid bits and capabilities away."""
    os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
    if entry.kind is not Kind.SYMLINK:
        os.chmod(path, stat.S_IMODE(entry.mode))
    for name, value in entry.xattrs.items():
        os.setxattr(path, name, value, follow_symlinks=False)


def opened_layer(repository: Repository, digest: str, diff_id: str) -> OpenLayer:
    """A layer's tar bytes from a registry, stored and unpacked bytes checked by their end."""
    from bootseer.imageprefetch.image_build.image_sources import Unpacked
    from bootseer.imageprefetch.image_build.layer_reader import ahead, unpacked

    @contextmanager
    def opened() -> Iterator[Iterator[bytes]]:
        with repository.stream(digest) as stream:
            content = Unpacked(unpacked(stream))
            with ahead(content.pieces) as pieces:
                yield pieces
                for _ in pieces:
                    pass  # what stands behind the last member; at the end the digest was checked
        content.check(digest, diff_id)

    return opened
