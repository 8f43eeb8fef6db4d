"""A second, thin server for the same operations: fusepy over libfuse 2, read-only.

For systems where ours cannot run: macOS (macFUSE, FUSE-T) and others with libfuse; on Linux ours
is several times as fast. Needs the extra `fusepy` and libfuse 2. It lacks writing, reads that end
when their reader is killed (they end with the operations' own deadline), passthrough, the
hand-over to another process, mounts passed as descriptors, and `Operations.before_unmount`.

libfuse names files by paths, so each request walks its path by `lookup`; an open file keeps the
inode that it was opened as. Names are bytes to us and must not be decoded, so fusepy gets
Latin-1 as its encoding, which maps every byte to a character and back.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bootseer.errors import (
    BootseerError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.operations import ROOT, Attr, Data, FileSystemError, Handle, Inode, Operations
from bootseer.reporting import Reporter

ENCODING = "latin-1"
_BLOCK_BYTES = 4096


class _Reply:
    """A reply for which the thread of its request waits."""

    interrupted = False  # libfuse does not say

    def __init__(self) -> None:
        self._sent = threading.Event()
        self._data: Data | None = None
        self._errno = 0

    def data(self, data: Data) -> None:
        self._data = data
        self._sent.set()

    def error(self, number: int) -> None:
        self._errno = number
        self._sent.set()

    def wait(self) -> Data:
        self._sent.wait()
        if self._data is None:
            raise FileSystemError(self._errno)
        return self._data


class _Later:
    """The `Later` of one read."""

    thread = 0

    def __init__(self) -> None:
        self._reply: _Reply | None = None

    def __call__(self) -> _Reply:
        if self._reply is None:
            self._reply = _Reply()
        return self._reply


class _Paths:
    """fusepy's operations, which take paths, by way of ours; fusepy calls the object itself."""

    use_ns = True

    def __init__(self, operations: Operations, faults: Reporter, ready: Callable[[], None]) -> None:
        self._operations = operations
        self._faults = faults
        self._ready = ready
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Inode, Handle]] = {}

    def __call__(self, name: str, path: str, *arguments: Any) -> Any:
        try:
            return getattr(self, name)(path, *arguments)
        except FileSystemError as error:
            raise OSError(error.errno or errno.EIO, path) from error
        except BootseerError as error:
            self._faults.report(f"{name} {type(error).__name__}", f"{name} failed: {error}")
            raise OSError(errno.EIO, path) from error
        except Exception as error:  # whatever fails must cost one request, never the mount
            self._faults.report_failure(name, error)
            raise OSError(errno.EIO, path) from error

    def init(self, path: str) -> None:
        self._ready()

    def destroy(self, path: str) -> None:
        self._operations.destroy()

    def getattr(self, path: str, info: Any = None) -> dict[str, int]:
        with self._hold_walked(path) as attr:
            return _stat_of(attr)

    def readlink(self, path: str) -> str:
        with self._hold_walked(path) as attr:
            return self._operations.readlink(attr.inode).decode(ENCODING)

    def opendir(self, path: str) -> int:
        return 0

    def releasedir(self, path: str, number: int) -> int:
        return 0

    def readdir(self, path: str, number: int) -> list[tuple[str, dict[str, int] | None, int]]:
        with self._hold_walked(path) as attr:
            entries = self._operations.readdir(attr.inode)
        named = [
            (e.name.decode(ENCODING), _stat_of(e.attr) if e.attr.mode else None, 0) for e in entries
        ]
        return [(".", None, 0), ("..", None, 0), *named]

    def open(self, path: str, info: Any) -> int:
        if info.flags & os.O_ACCMODE != os.O_RDONLY:
            raise FileSystemError(errno.EROFS)
        attr = self._walk(path)
        try:
            opened = self._operations.open(attr.inode, info.flags)
        except BaseException:  # without a handle, libfuse sends no release
            self._forget(attr)
            raise
        info.fh = next(self._numbers)
        info.direct_io, info.keep_cache = opened.direct, opened.keep_cache
        self._open[info.fh] = (attr.inode, opened.handle)
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        inode, handle = self._open[info.fh]
        later = _Later()
        data = self._operations.read(inode, handle, offset, size, later)
        if data is None:
            data = later().wait()
        if isinstance(data, memoryview):
            return bytes(data)
        try:
            return b"".join(data.views)
        finally:
            if data.release is not None:
                data.release()

    def release(self, path: str, info: Any) -> int:
        inode, handle = self._open.pop(info.fh)
        try:
            self._operations.release(inode, handle)
        finally:
            if inode != ROOT:
                self._operations.forget(inode, 1)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        total, free, files, free_files = self._operations.statfs()
        blocks, left = -(-total // _BLOCK_BYTES), free // _BLOCK_BYTES
        return {
            "f_bsize": _BLOCK_BYTES,
            "f_frsize": _BLOCK_BYTES,
            "f_blocks": blocks,
            "f_bfree": left,
            "f_bavail": left,
            "f_files": files,
            "f_ffree": free_files,
            "f_favail": free_files,
            "f_namemax": 255,
        }

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        with self._hold_walked(path) as attr:
            return self._operations.getxattr(attr.inode, name.encode(ENCODING))[position:]

    def listxattr(self, path: str) -> list[str]:
        with self._hold_walked(path) as attr:
            return [name.decode(ENCODING) for name in self._operations.listxattr(attr.inode)]

    def _walk(self, path: str) -> Attr:
        """The attributes at a path; of the references on the way only the last one is kept."""
        attr: Attr | None = None
        for name in path.encode(ENCODING).split(b"/"):
            if not name:
                continue
            parent = attr
            try:
                attr = self._operations.lookup(parent.inode if parent else ROOT, name)
            finally:
                if parent is not None:
                    self._forget(parent)
        return attr if attr is not None else self._operations.getattr(ROOT)

    def _forget(self, attr: Attr) -> None:
        if attr.inode != ROOT:
            self._operations.forget(attr.inode, 1)

    @contextlib.contextmanager
    def _hold_walked(self, path: str) -> Iterator[Attr]:
        """`_walk` for the time of a block."""
        attr = self._walk(path)
        try:
            yield attr
        finally:
            self._forget(attr)


def _stat_of(attr: Attr) -> dict[str, int]:
    return {
        "st_ino": attr.inode,
        "st_mode": attr.mode,
        "st_size": attr.size_bytes,
        "st_blocks": -(-attr.size_bytes // 512),
        "st_nlink": attr.nlink,
        "st_uid": attr.uid,
        "st_gid": attr.gid,
        "st_rdev": attr.rdev,
        "st_atime": attr.mtime_ns,
        "st_mtime": attr.mtime_ns,
        "st_ctime": attr.mtime_ns,
    }


def load() -> Any:
    """fusepy's module. Raises NotSupportedError when it or its libfuse is missing."""
    try:
        import fuse
    except ImportError as error:
        raise NotSupportedError(
            "the fusepy server needs fusepy: pip install 'bootseer[fusepy]'"
        ) from error
    except OSError as error:
        raise NotSupportedError(
            f"the fusepy server needs libfuse 2 ({error}): install it (Debian: libfuse2)"
        ) from error
    if not hasattr(fuse, "FuseOSError"):
        raise NotSupportedError("the Python module fuse is not fusepy's: uninstall the other one")
    return fuse


def serve(
    operations: Operations,
    mountpoint: str,
    *,
    options: MountOptions | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Mount and serve until it is unmounted; `ready` is called once the mount is there.

    Of the options it knows `allow_other`, `fsname`, `timeout_s`, `max_background` and
    `on_fault`; the mount is always read-only. SIGTERM and SIGINT unmount, when called from the
    main thread. Raises NotSupportedError, NotFoundError, UsageError and StoreUnavailableError
    (libfuse says why on standard error).
    """
    options = options or MountOptions()
    fuse = load()
    if not os.path.exists(mountpoint):
        raise NotFoundError(f"cannot mount at {mountpoint}: it does not exist; make the directory")
    if not os.path.isdir(mountpoint):
        raise UsageError(f"cannot mount at {mountpoint}: it is no directory; name one")
    paths = _Paths(operations, Reporter("fuse.fault", options.on_fault), ready)
    words = {
        "fsname": options.fsname,
        "subtype": "bootseer",
        "entry_timeout": options.timeout_s,
        "attr_timeout": options.timeout_s,
        "negative_timeout": options.timeout_s,
        "max_background": options.max_background,
    }
    flags = {"ro": True, "use_ino": True, "default_permissions": True}
    try:
        fuse.FUSE(
            paths,
            os.fsencode(mountpoint).decode(ENCODING),
            raw_fi=True,
            encoding=ENCODING,
            foreground=True,
            allow_other=options.allow_other,
            **words,
            **flags,
        )
    except RuntimeError as error:
        raise StoreUnavailableError(
            f"libfuse did not mount at {mountpoint} (code {error}); its own message is above"
        ) from error
