"""What a file system must offer to be served: one interface, known to every server.

An `Inode` is a node id of the kernel's FUSE protocol, a `Handle` its file handle (`fh`).
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple, NewType, Protocol

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
    """One name of a directory.

    With an `attr` of mode 0 the kernel looks the name up when it needs more than the name.
    """

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
    """The reply to a read that could not be answered at once: one call, from any thread."""

    def data(self, data: Data) -> None:
        """Reply with bytes (fewer than asked only at the end of the file)."""

    def error(self, number: int) -> None:
        """Reply with an errno, e.g. EIO."""

    @property
    def interrupted(self) -> bool:
        """True once the reader was killed and no longer needs the bytes."""


class Later(Protocol):
    """What `Operations.read` calls in order to reply after it has returned."""

    def __call__(self) -> Reply:
        """The reply to this read; always the same one."""

    @property
    def thread(self) -> int:
        """The thread that reads, by its id in our PID namespace; 0 where it has none there."""


class FileSystemError(OSError):
    """Raised by operations: the errno is the reply to the kernel."""

    def __init__(self, number: int) -> None:
        super().__init__(number, errno.errorcode.get(number, str(number)))


class Operations(ABC):
    """A tree of files that are read. Raise FileSystemError(errno) to refuse a request.

    Called from several threads. Inode numbers and handles must mean the same in a process that
    is started later on the same tree: after a crash it serves the same mount.
    """

    may_block: ClassVar[bool] = False
    """Whether looking up, listing and opening files, and asking for their attributes (GETATTR,
    GETXATTR, LISTXATTR), may wait for a network. Such requests are answered by threads of their
    own, so that they keep no reader waiting; READLINK and STATFS stay on the receiving threads."""
    max_name_bytes: ClassVar[int] = 255
    """The longest name of a file, as `statfs` reports it; Linux takes no longer one."""

    @abstractmethod
    def lookup(self, parent: Inode, name: bytes) -> Attr:
        """The inode of a name. It gains a reference, which `forget` takes back."""

    @abstractmethod
    def getattr(self, inode: Inode) -> Attr: ...

    def readlink(self, inode: Inode) -> bytes:
        raise FileSystemError(errno.EINVAL)

    @abstractmethod
    def readdir(self, inode: Inode) -> Sequence[Entry]:
        """All entries but `.` and `..`, always in the same order."""

    @abstractmethod
    def open(self, inode: Inode, flags: int) -> Opened: ...

    @abstractmethod
    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | memoryview | None:
        """Bytes at `offset`, or None after `later()` gave the reply by which they will be sent.

        One view alone means the same as `Data((view,))`, and is quicker for small reads.
        """

    def release(self, inode: Inode, handle: Handle) -> None:
        """Called when the kernel has closed a handle."""

    @abstractmethod
    def statfs(self) -> tuple[int, int, int, int]:
        """Total bytes, free bytes, total files, free files."""

    def getxattr(self, inode: Inode, name: bytes) -> bytes:
        raise FileSystemError(errno.ENOTSUP)

    def listxattr(self, inode: Inode) -> Sequence[bytes]:
        return ()

    def add_references(self, inodes: Iterable[Inode]) -> None:
        """Count one more reference to each of these, which a listing gave the kernel."""

    def forget(self, inode: Inode, count: int) -> None:
        """Drop `count` references of the kernel, which may be more than this process gave it."""

    def before_unmount(self) -> None:
        """Called when the server ends: before it unmounts, or after others have unmounted.

        `fusepy_server` does not call it: there libfuse unmounts.
        """

    def destroy(self) -> None:
        """Called when the mount has ended: no request follows."""


class WritableOperations(Operations):
    """A tree whose files are written once, from start to end (a checkpoint being saved)."""

    @abstractmethod
    def create(self, parent: Inode, name: bytes, mode: int, flags: int) -> tuple[Attr, Opened]:
        """Make a file and open it; its inode gains a reference, as by `lookup`."""

    @abstractmethod
    def write(
        self, inode: Inode, handle: Handle, offset: int, data: memoryview, *, owner: int = 0
    ) -> int:
        """Append `data`; any offset but the end of what was written is refused (ESPIPE).

        `owner` stands for the process that writes, as in `flush`; 0 = not known.
        """

    def flush(self, inode: Inode, handle: Handle, *, owner: int = 0, thread: int = 0) -> None:
        """A descriptor is being closed; its `close` reports errors. `owner` as in `write`.

        `thread` closes it, by its id in our PID namespace; 0 where it has none there.
        """

    def fsync(self, inode: Inode, handle: Handle) -> None: ...

    def fallocate(self, handle: Handle, offset: int, length: int, mode: int) -> None:
        """Reserve room for bytes that will be written; as fallocate(2)."""
        raise FileSystemError(errno.ENOSYS)

    @abstractmethod
    def truncate(self, inode: Inode, size: int) -> Attr: ...

    def setattr(self, inode: Inode, *, mode: int | None, mtime_ns: int | None) -> Attr:
        """Set the permission bits and the time of the last change; None = leave it as it is."""
        raise FileSystemError(errno.EPERM)

    @abstractmethod
    def mkdir(self, parent: Inode, name: bytes, mode: int) -> Attr:
        """Make a directory; its inode gains a reference, as by `lookup`."""

    def symlink(self, parent: Inode, name: bytes, target: bytes) -> Attr:
        """Make a symbolic link; its inode gains a reference, as by `lookup`."""
        raise FileSystemError(errno.ENOSYS)

    @abstractmethod
    def unlink(self, parent: Inode, name: bytes) -> None: ...

    @abstractmethod
    def rmdir(self, parent: Inode, name: bytes) -> None: ...

    @abstractmethod
    def rename(
        self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int
    ) -> None: ...
