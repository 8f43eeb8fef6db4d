"""Small file systems in memory, for tests of the FUSE servers."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.fuse.operations import (
    ROOT,
    Attr,
    Data,
    Entry,
    FileSystemError,
    Handle,
    Inode,
    Opened,
    Operations,
    Reply,
    WritableOperations,
)

MTIME_NS = 1_700_000_000_123_456_789
Later = Callable[[], Reply]


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that differ at every offset, so that a shifted or repeated block shows."""
    first, words = seed * 1_000_003, (size_bytes + 7) // 8
    numbers = ((n * 0x9E3779B97F4A7C15) & (2**64 - 1) for n in range(first, first + words))
    return b"".join(n.to_bytes(8, "little") for n in numbers)[:size_bytes]


class MemoryTree(Operations):
    """A read-only tree of {path: bytes, or None for a directory}, with `links` to targets.

    Inode numbers follow the sorted paths, so they mean the same in every process.
    """

    def __init__(
        self,
        files: dict[str, bytes | None],
        *,
        links: dict[str, bytes] | None = None,
        xattrs: dict[bytes, bytes] | None = None,
        direct: bool = False,
        keep_cache: bool = True,
    ) -> None:
        self.links = links or {}
        self.files = files
        self.xattrs = xattrs or {}
        self.direct, self.keep_cache = direct, keep_cache
        paths = sorted({*files, *self.links})
        self.inodes = {path: Inode(number) for number, path in enumerate(paths, 2)}
        self.paths = {number: path for path, number in self.inodes.items()} | {ROOT: ""}
        self.forgotten: dict[int, int] = {}
        self.looked_up: dict[int, int] = {}
        self.reads: list[tuple[int, int, int]] = []
        self.released = 0
        self.destroyed = threading.Event()

    def _attr(self, path: str) -> Attr:
        inode = self.inodes[path] if path else ROOT
        if path in self.links:
            return Attr(inode, stat.S_IFLNK | 0o777, len(self.links[path]), MTIME_NS)
        content = self.files[path] if path else None
        if content is None:
            return Attr(inode, stat.S_IFDIR | 0o755, 0, MTIME_NS, 2)
        return Attr(inode, stat.S_IFREG | 0o444, len(content), MTIME_NS)

    def lookup(self, parent: Inode, name: bytes) -> Attr:
        path = f"{self.paths[parent]}/{name.decode()}".lstrip("/")
        if path not in self.inodes:
            raise FileSystemError(errno.ENOENT)
        attr = self._attr(path)
        self.looked_up[attr.inode] = self.looked_up.get(attr.inode, 0) + 1
        return attr

    def getattr(self, inode: Inode) -> Attr:
        return self._attr(self.paths[inode])

    def readlink(self, inode: Inode) -> bytes:
        return self.links[self.paths[inode]]

    def readdir(self, inode: Inode) -> Sequence[Entry]:
        prefix = self.paths[inode] + "/" if inode != ROOT else ""
        below = [p for p in self.inodes if p.startswith(prefix) and "/" not in p[len(prefix) :]]
        return [Entry(p[len(prefix) :].encode(), self._attr(p)) for p in below]

    def open(self, inode: Inode, flags: int) -> Opened:
        return Opened(Handle(inode), self.direct, self.keep_cache)

    def content(self, inode: Inode) -> bytes:
        content = self.files[self.paths[inode]]
        assert content is not None
        return content

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | None:
        self.reads.append((inode, offset, size))
        return Data((memoryview(self.content(inode))[offset : offset + size],))

    def release(self, inode: Inode, handle: Handle) -> None:
        self.released += 1

    def statfs(self) -> tuple[int, int, int, int]:
        return 1 << 40, 1 << 30, len(self.inodes), 7

    def getxattr(self, inode: Inode, name: bytes) -> bytes:
        if name not in self.xattrs:
            raise FileSystemError(errno.ENODATA)
        return self.xattrs[name]

    def listxattr(self, inode: Inode) -> Sequence[bytes]:
        return list(self.xattrs)

    def forget(self, inode: Inode, count: int) -> None:
        self.forgotten[inode] = self.forgotten.get(inode, 0) + count

    def destroy(self) -> None:
        self.destroyed.set()


class SlowTree(MemoryTree):
    """Every read waits until the test answers it, from the test's own thread."""

    def __init__(self, files: dict[str, bytes | None], **options: bool) -> None:
        super().__init__(files, direct=options.get("direct", True))
        self.waiting: queue.SimpleQueue[Waiting] = queue.SimpleQueue()

    def read(self, inode: Inode, handle: Handle, offset: int, size: int, later: Later) -> None:
        self.waiting.put(Waiting(self, inode, offset, size, later()))


class Waiting(NamedTuple):
    """One read that waits."""

    tree: MemoryTree
    inode: Inode
    offset: int
    size: int
    reply: Reply

    def answer(self, release: Callable[[], None] | None = None) -> None:
        """Send the right bytes."""
        content = memoryview(self.tree.content(self.inode))
        self.reply.data(Data((content[self.offset : self.offset + self.size],), release))


class FailingTree(MemoryTree):
    """Fault injection: every read raises `error`."""

    def __init__(self, files: dict[str, bytes | None], error: Exception) -> None:
        super().__init__(files)
        self.error = error

    def read(self, inode: Inode, handle: Handle, offset: int, size: int, later: Later) -> Data:
        raise self.error


class WritableTree(MemoryTree, WritableOperations):
    """A tree that is written as checkpoints are: each file once, from start to end."""

    def __init__(self) -> None:
        super().__init__({})
        self._numbers = itertools.count(2)
        self.events: list[str] = []
        self.write_sizes: list[int] = []
        self.full_after_bytes = 1 << 62
        self.refuse_flush = False
        self.hold: threading.Event | None = None

    def _add(self, parent: Inode, name: bytes, content: bytearray | None) -> Attr:
        path = f"{self.paths[parent]}/{name.decode()}".lstrip("/")
        if path in self.inodes:
            raise FileSystemError(errno.EEXIST)
        inode = Inode(next(self._numbers))
        self.inodes[path], self.paths[inode], self.files[path] = inode, path, content
        return self._attr(path)

    def _attr(self, path: str) -> Attr:
        attr = super()._attr(path)
        return attr._replace(mode=attr.mode | 0o200, mtime_ns=time.time_ns())

    def open(self, inode: Inode, flags: int) -> Opened:
        if flags & os.O_TRUNC:
            self.truncate(inode, 0)
        return Opened(Handle(inode), keep_cache=False)

    def create(self, parent: Inode, name: bytes, mode: int, flags: int) -> tuple[Attr, Opened]:
        self.events.append(f"create {name.decode()} {mode:o}")
        attr = self._add(parent, name, bytearray())
        return attr, Opened(Handle(attr.inode), keep_cache=False)

    def write(
        self, inode: Inode, handle: Handle, offset: int, data: memoryview, *, owner: int = 0
    ) -> int:
        if self.hold is not None:
            self.hold.wait(60)
        content = self.content(inode)
        assert isinstance(content, bytearray)
        if offset != len(content):
            raise FileSystemError(errno.ESPIPE)
        if offset + len(data) > self.full_after_bytes:
            raise FileSystemError(errno.ENOSPC)
        self.write_sizes.append(len(data))
        content += data
        return len(data)

    def flush(self, inode: Inode, handle: Handle, *, owner: int = 0, thread: int = 0) -> None:
        self.events.append("flush")
        if self.refuse_flush:
            raise FileSystemError(errno.EDQUOT)

    def fsync(self, inode: Inode, handle: Handle) -> None:
        self.events.append("fsync")

    def truncate(self, inode: Inode, size: int) -> Attr:
        content = self.content(inode)
        assert isinstance(content, bytearray)
        if size > len(content):
            raise FileSystemError(errno.ESPIPE)
        del content[size:]
        return self._attr(self.paths[inode])

    def setattr(self, inode: Inode, *, mode: int | None, mtime_ns: int | None) -> Attr:
        given = f"{mode:o}" if mode is not None else f"{mtime_ns}"
        self.events.append(f"set {self.paths[inode]} {given}")
        return self._attr(self.paths[inode])

    def mkdir(self, parent: Inode, name: bytes, mode: int) -> Attr:
        self.events.append(f"mkdir {name.decode()} {mode:o}")
        return self._add(parent, name, None)

    def unlink(self, parent: Inode, name: bytes) -> None:
        path = f"{self.paths[parent]}/{name.decode()}".lstrip("/")
        del self.paths[self.inodes.pop(path)], self.files[path]

    def rmdir(self, parent: Inode, name: bytes) -> None:
        path = f"{self.paths[parent]}/{name.decode()}".lstrip("/")
        if any(other.startswith(path + "/") for other in self.inodes):
            raise FileSystemError(errno.ENOTEMPTY)
        self.unlink(parent, name)

    def rename(
        self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int
    ) -> None:
        old = f"{self.paths[parent]}/{name.decode()}".lstrip("/")
        new = f"{self.paths[new_parent]}/{new_name.decode()}".lstrip("/")
        if flags & RENAME_NOREPLACE and new in self.inodes:
            raise FileSystemError(errno.EEXIST)
        if flags & ~RENAME_NOREPLACE:
            raise FileSystemError(errno.EINVAL)
        inode = self.inodes.pop(old)
        self.inodes[new], self.paths[inode] = inode, new
        self.files[new] = self.files.pop(old)


RENAME_NOREPLACE = 1
