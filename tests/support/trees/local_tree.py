"""A local directory as read-only `Operations`: what tests of the server serve.

Inode numbers are those of the local file system, and a handle is its file's inode number, so a
process started later on the same directory understands both. A file is served from a memory map
by default: nothing is copied in user space, since only the kernel touches the pages while it
takes the answer (beside `preadv` into reused buffers a tenth more bytes a second through the page
cache, a quarter more past it). A file that shrank under its map cannot end the server by SIGBUS
for the same reason: the kernel's own access fails, the answer is refused with EFAULT, and the
reader gets EIO. A server that copies answers in user space must ask for `mapped=False`, and so
must one whose workers may be killed unnoticed (`handover.supervise`): the kernel ends a request
with EIO when the worker dies while pages of the map are brought in for its answer.

Nothing outside the directory is served: every path is walked from its descriptor without
following a symbolic link, and other file systems mounted below it are not there.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from bootseer.errors import NotFoundError, from_os_error
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
)

IDLE_FILES = 64
"""Closed files whose descriptor and map are kept, for whoever opens them next."""

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _File:
    """One open file; `opens` counts the kernel's handles."""

    __slots__ = ("fd", "opens", "stamp", "view")

    def __init__(self, fd: int, mapped: bool) -> None:
        status = os.fstat(fd)
        self.fd = fd
        self.opens = 0
        self.stamp = (status.st_size, status.st_mtime_ns)
        self.view: memoryview | None = None
        if mapped and status.st_size:
            self.view = memoryview(mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ))

    def close(self) -> None:
        # An answer under way may still show the map: it goes with its last view.
        self.view = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LocalTree(Operations):
    """Serve the directory `root`; see `Operations` for the methods.

    `direct` and `keep_cache` are told of every file opened; `passthrough` offers the kernel each
    file's descriptor. Raises NotFoundError and its relatives when `root` is no directory we can
    open. Close it after the mount is gone.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        mapped: bool = True,
        direct: bool = False,
        keep_cache: bool = True,
        passthrough: bool = False,
    ) -> None:
        try:
            self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotADirectoryError as error:
            raise NotFoundError(f"{os.fspath(root)} is not a directory; name one") from error
        except OSError as error:
            raise from_os_error(error, f"open the directory {os.fspath(root)}") from error
        status = os.fstat(self._root)
        self._device, self._root_inode = status.st_dev, status.st_ino
        self._mapped, self._passthrough = mapped, passthrough
        self._direct, self._keep_cache = direct, keep_cache
        self._lock = threading.Lock()
        self._names: dict[int, tuple[int, bytes]] = {}
        self._files: dict[int, _File] = {}
        self._views: dict[int, memoryview] = {}  # maps of those files
        self._idle: OrderedDict[int, _File] = OrderedDict()
        self._buffers: list[memoryview] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor; safe to call again."""
        with self._lock:
            files = [*self._files.values(), *self._idle.values()]
            self._files.clear()
            self._views.clear()
            self._idle.clear()
            root, self._root = self._root, -1
        for file in files:
            file.close()
        if root >= 0:
            os.close(root)

    # --- names and attributes -----------------------------------------------------------------

    def lookup(self, parent: Inode, name: bytes) -> Attr:
        with self._directory(parent) as fd:
            attr = self._attr(_stat(name, fd))
        self._names[attr.inode] = (parent, name)
        return attr

    def getattr(self, inode: Inode) -> Attr:
        if inode == ROOT:
            return self._attr(os.fstat(self._root))
        with self._place(inode) as (fd, name):
            return self._attr(_stat(name, fd), expected=inode)

    def readlink(self, inode: Inode) -> bytes:
        with self._place(inode) as (fd, name), _answered():
            return os.readlink(name, dir_fd=fd)

    def readdir(self, inode: Inode) -> Sequence[Entry]:
        with self._directory(inode) as fd:
            entries = []
            for name in sorted(os.fsencode(n) for n in self._list(fd)):
                try:
                    attr = self._attr(_stat(name, fd))
                except FileSystemError:
                    continue  # gone since it was listed, or on another file system
                self._names[attr.inode] = (inode, name)
                entries.append(Entry(name, attr))
        return entries

    def statfs(self) -> tuple[int, int, int, int]:
        status = os.fstatvfs(self._root)
        size = status.f_frsize
        return status.f_blocks * size, status.f_bavail * size, status.f_files, status.f_favail

    def getxattr(self, inode: Inode, name: bytes) -> bytes:
        with self._extended(inode) as path, _answered():
            return os.getxattr(path, name, follow_symlinks=False)

    def listxattr(self, inode: Inode) -> Sequence[bytes]:
        with self._extended(inode) as path, _answered():
            return [os.fsencode(n) for n in os.listxattr(path, follow_symlinks=False)]

    def forget(self, inode: Inode, count: int) -> None:
        """Nothing to do: names are bounded by the tree and found again when they are missing."""

    def destroy(self) -> None:
        """Nothing to do: who made the tree closes it."""

    # --- files --------------------------------------------------------------------------------

    def open(self, inode: Inode, flags: int) -> Opened:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FileSystemError(errno.EROFS)
        file = self._file(inode, opens=1)
        backing = file.fd if self._passthrough else -1
        return Opened(Handle(inode), self._direct, self._keep_cache, backing)

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Callable[[], Reply]
    ) -> Data | memoryview | None:
        view = self._views.get(inode)
        if view is not None:
            data = view[offset : offset + size]
            if len(data) == size:
                return data
        file = self._files.get(inode) or self._file(inode, opens=0)
        return self._copied(file, offset, size)

    def release(self, inode: Inode, handle: Handle) -> None:
        surplus = None
        with self._lock:
            file = self._files.get(inode)
            if file is None:
                return  # opened by a process before us and never read since
            file.opens -= 1
            if file.opens <= 0:
                file.opens = 0
                self._idle[inode] = self._files.pop(inode)
                self._views.pop(inode, None)
                if len(self._idle) > IDLE_FILES:
                    _, surplus = self._idle.popitem(last=False)
        if surplus is not None:
            surplus.close()

    def _copied(self, file: _File, offset: int, size: int) -> Data:
        """Read into a buffer that goes back to the others once its bytes were sent."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(b"")
        if len(buffer) < size:
            buffer = memoryview(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))
        done = 0
        with _answered():
            while done < size:
                count = os.preadv(file.fd, (buffer[done:size],), offset + done)
                if not count:
                    break
                done += count
        return Data((buffer[:done],), lambda: self._buffers.append(buffer))

    def _file(self, inode: Inode, *, opens: int) -> _File:
        """The open file of an inode, opened when it is not; counts `opens` more handles.

        One kept since an earlier opening serves again only while size and time are its own.
        """
        with self._place(inode) as (directory, name), _answered():
            fd = os.open(name, _FILE, dir_fd=directory)
        status = os.fstat(fd)
        if status.st_ino != inode or status.st_dev != self._device:
            os.close(fd)
            raise FileSystemError(errno.ESTALE)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise FileSystemError(errno.EINVAL)
        stamp = (status.st_size, status.st_mtime_ns)
        unused: _File | None = None
        with self._lock:
            file = self._files.get(inode)
            if file is None:
                file = self._idle.pop(inode, None)
                if file is not None and file.stamp != stamp:
                    unused, file = file, None
                if file is None:
                    file, fd = _File(fd, self._mapped), -1
                self._files[inode] = file
                if file.view is not None:
                    self._views[inode] = file.view
            file.opens += opens
        if fd >= 0:
            os.close(fd)
        if unused is not None:
            unused.close()
        return file

    # --- from inodes to places ----------------------------------------------------------------

    def _attr(self, status: os.stat_result, expected: int | None = None) -> Attr:
        inode = status.st_ino
        if status.st_dev != self._device or expected not in (None, inode):
            raise FileSystemError(errno.ENOENT if expected is None else errno.ESTALE)
        return Attr(
            inode=ROOT if inode == self._root_inode else Inode(inode),
            mode=status.st_mode,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            nlink=status.st_nlink,
            uid=status.st_uid,
            gid=status.st_gid,
            rdev=status.st_rdev,
        )

    def _path(self, inode: int) -> list[bytes]:
        """Names from the root down to an inode; raises ESTALE when it is not in the tree."""
        for attempt in range(2):
            path: list[bytes] = []
            at = inode
            while at != ROOT:
                place = self._names.get(at)
                if place is None or len(path) > 4096:
                    break
                at = place[0]
                path.append(place[1])
            else:
                return path[::-1]
            if not attempt:
                self._survey()
        raise FileSystemError(errno.ESTALE)

    def _survey(self) -> None:
        """Learn every name: an inode was asked for that only a process before us looked up."""
        waiting: list[int] = [ROOT]
        while waiting:
            parent = waiting.pop()
            try:
                with self._directory(Inode(parent)) as fd, os.scandir(_readable(fd)) as found:
                    entries = [(e.inode(), e.name, e.is_dir(follow_symlinks=False)) for e in found]
            except OSError:
                continue  # gone since it was seen, or on another file system
            for inode, name, is_directory in entries:
                self._names[inode] = (parent, os.fsencode(name))
                if is_directory:
                    waiting.append(inode)

    @staticmethod
    def _list(fd: int) -> list[str]:
        with _answered():
            return os.listdir(_readable(fd))

    @contextmanager
    def _directory(self, inode: Inode) -> Iterator[int]:
        """A descriptor (O_PATH) of a directory, reached without following any link."""
        fd = os.dup(self._root)
        try:
            if inode != ROOT:
                with _answered():
                    for name in self._path(inode):
                        below = os.open(name, _DIRECTORY, dir_fd=fd)
                        os.close(fd)
                        fd = below
                    if os.fstat(fd).st_dev != self._device:
                        raise FileSystemError(errno.ENOENT)
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _place(self, inode: Inode) -> Iterator[tuple[int, bytes]]:
        """The directory (O_PATH) and name of an inode other than the root."""
        if inode == ROOT:
            raise FileSystemError(errno.EINVAL)
        self._path(inode)
        parent, name = self._names[inode]
        with self._directory(Inode(parent)) as fd:
            yield fd, name

    @contextmanager
    def _extended(self, inode: Inode) -> Iterator[bytes]:
        """A path for the xattr calls, which take neither `dir_fd` nor an O_PATH descriptor."""
        if inode == ROOT:
            yield b"/proc/self/fd/%d/." % self._root
            return
        with self._place(inode) as (fd, name):
            yield b"/proc/self/fd/%d/%s" % (fd, name)


def _readable(fd: int) -> str:
    """A path to list an O_PATH directory by."""
    return f"/proc/self/fd/{fd}/."


def _stat(name: bytes, fd: int) -> os.stat_result:
    with _answered():
        return os.stat(name, dir_fd=fd, follow_symlinks=False)


@contextmanager
def _answered() -> Iterator[None]:
    """Make an operating-system error the answer to the kernel."""
    try:
        yield
    except FileSystemError:
        raise
    except OSError as error:
        raise FileSystemError(error.errno or errno.EIO) from error
