"""What a file system must offer to be served: one small interface, known to every server."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import NamedTuple, NewType, Protocol

Inode = NewType("Inode", int)
Handle = NewType("Handle", int)

ROOT = Inode(1)

Buffer = bytes | bytearray | memoryview


class Attr(NamedTuple):
    """Attributes of one inode; sizes in bytes, times in nanoseconds since the epoch."""

    inode: Inode
    mode: int
    size_bytes: int
    mtime_ns: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0


class Entry(NamedTuple):
    """One name of a directory. `attr` of mode 0: who asks for more than the name has a `lookup`."""

    name: bytes
    attr: Attr


class Opened(NamedTuple):
    """How an opened file is served.

    `direct` bypasses the page cache (best for one pass over a checkpoint); `keep_cache` keeps
    pages from one opening to the next (immutable files); `backing_fd` lets the kernel serve the
    file itself by passthrough where it can, -1 = no.
    """

    handle: Handle
    direct: bool = False
    keep_cache: bool = True
    backing_fd: int = -1


class Data(NamedTuple):
    """Bytes of one read as one or more buffers, sent without a copy.

    `release` is called once they have been sent, so that the memory may be used again.
    """

    views: Sequence[Buffer]
    release: Callable[[], None] | None = None


class Reply(Protocol):
    """The answer to a read that could not be given at once; exactly one call, from any thread."""

    def data(self, data: Data) -> None:
        """Answer with bytes (fewer than asked only at the end of the file)."""

    def error(self, number: int) -> None:
        """Answer with an errno, e.g. EIO."""

    @property
    def interrupted(self) -> bool:
        """True once the reader was killed or signalled and no longer wants the bytes."""


class FileSystemError(OSError):
    """Raised by operations: the errno is the answer to the kernel."""

    def __init__(self, number: int) -> None:
        super().__init__(number, errno.errorcode.get(number, str(number)))


class Operations(Protocol):
    """A tree of files. Raise FileSystemError(errno) to refuse; called from several threads.

    Inode numbers must mean the same in a process started later on the same tree, and `handle`
    must be understood there too: after a crash another process answers for the same mount.
    """

    def lookup(self, parent: Inode, name: bytes) -> Attr: ...

    def getattr(self, inode: Inode) -> Attr: ...

    def readlink(self, inode: Inode) -> bytes: ...

    def readdir(self, inode: Inode) -> Sequence[Entry]:
        """All entries but `.` and `..`, always in the same order."""

    def open(self, inode: Inode, flags: int) -> Opened: ...

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Callable[[], Reply]
    ) -> Data | memoryview | None:
        """Bytes at `offset`, or None after taking `later()`, through which they will be sent.

        One view of bytes alone is the same as `Data((view,))`, and quicker for small reads.
        """

    def release(self, inode: Inode, handle: Handle) -> None: ...

    def statfs(self) -> tuple[int, int, int, int]:
        """Total bytes, free bytes, total files, free files."""

    def getxattr(self, inode: Inode, name: bytes) -> bytes: ...

    def listxattr(self, inode: Inode) -> Sequence[bytes]: ...

    def forget(self, inode: Inode, count: int) -> None:
        """The kernel dropped `count` references that `lookup` gave it."""

    def destroy(self) -> None:
        """The mount is gone."""


class WritableOperations(Operations, Protocol):
    """A tree whose files are written once, from start to end (a checkpoint being saved)."""

    def create(self, parent: Inode, name: bytes, mode: int, flags: int) -> tuple[Attr, Opened]: ...

    def write(
        self, inode: Inode, handle: Handle, offset: int, data: memoryview, *, owner: int = 0
    ) -> int:
        """Take bytes at the end of what was written; any other offset is refused (ESPIPE).

        `owner` stands for the process that asks: the same number in `flush`; 0 = not known.
        """

    def flush(self, inode: Inode, handle: Handle, *, owner: int = 0, thread: int = 0) -> None:
        """A descriptor was closed: errors of writing must be told now. `owner` as in `write`.

        `thread` is who closes it, as our PID namespace knows it; 0 where it does not.
        """

    def fallocate(self, handle: Handle, offset: int, length: int, mode: int) -> None:
        """Room is wanted for bytes that will come; as fallocate(2)."""

    def fsync(self, inode: Inode, handle: Handle) -> None: ...

    def truncate(self, inode: Inode, size: int) -> Attr: ...

    def setattr(self, inode: Inode, *, mode: int | None, mtime_ns: int | None) -> Attr:
        """Keep permission bits and the time of the last change; None = as it is."""

    def mkdir(self, parent: Inode, name: bytes, mode: int) -> Attr: ...

    def symlink(self, parent: Inode, name: bytes, target: bytes) -> Attr: ...

    def unlink(self, parent: Inode, name: bytes) -> None: ...

    def rmdir(self, parent: Inode, name: bytes) -> None: ...

    def rename(
        self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int
    ) -> None: ...
