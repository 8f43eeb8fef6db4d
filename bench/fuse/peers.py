"""One file served by another Python binding: `python -m bench.fuse.peers NAME DIRECT FILE MOUNT`.

Each in its fastest form found: no path work, 1 MiB requests where the library can ask for them;
a pread for a read, but for pyfuse3, which sends a slice of a memory map without a copy. Runs in
the foreground until unmounted.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from typing import Any

NAME = "data"
REQUEST_BYTES = 1 << 20


def attributes(is_file: bool, size: int) -> dict[str, int]:
    mode = stat.S_IFREG | 0o444 if is_file else stat.S_IFDIR | 0o755
    return {"st_mode": mode, "st_nlink": 1 if is_file else 2, "st_size": size}


class PathTree:
    """The operations of fusepy and mfusepy, which name files by path."""

    use_ns = True

    def __init__(self, path: str, direct: bool) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.fd).st_size
        self.direct = direct

    def getattr(self, path: str, fh: object = None) -> dict[str, int]:
        if path == "/":
            return attributes(False, 0)
        if path == f"/{NAME}":
            return attributes(True, self.size)
        raise OSError(errno.ENOENT, path)

    def readdir(self, path: str, fh: object) -> list[str]:
        return [".", "..", NAME]

    def open(self, path: str, info: Any) -> int:
        info.direct_io = int(self.direct)
        info.keep_cache = 1
        return 0

    def read(self, path: str, size: int, offset: int, fh: object) -> bytes:
        return os.pread(self.fd, size, offset)

    def init_with_config(self, conn: Any, config: Any) -> None:
        """Of mfusepy alone."""
        conn.max_write = REQUEST_BYTES
        conn.max_background = 64


class CalledPathTree(PathTree):
    """The same, as fusepy wants it called."""

    def __call__(self, name: str, *arguments: Any) -> Any:
        if name in ("init", "destroy"):
            return None
        method = getattr(self, name, None)
        if method is None:
            raise OSError(errno.ENOSYS, name)
        return method(*arguments)


def serve_fusepy(path: str, mountpoint: str, direct: bool) -> None:
    import fuse

    options = {"attr_timeout": 60, "entry_timeout": 60, "max_background": 64}
    fuse.FUSE(
        CalledPathTree(path, direct), mountpoint, raw_fi=True, foreground=True, ro=True,
        allow_other=True, **options,
    )  # fmt: skip


def serve_mfusepy(path: str, mountpoint: str, direct: bool) -> None:
    # Without it the first library found is libfuse 2: 128 KiB requests and no clone_fd.
    os.environ.setdefault("FUSE_LIBRARY_PATH", "libfuse3.so.3")
    import mfusepy

    options = {"attr_timeout": 60, "entry_timeout": 60, "clone_fd": True}
    mfusepy.FUSE(
        PathTree(path, direct), mountpoint, raw_fi=True, foreground=True, ro=True,
        allow_other=True, **options,
    )  # fmt: skip


def serve_pyfuse3(path: str, mountpoint: str, direct: bool) -> None:
    import pyfuse3
    import trio

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(fd).st_size
    view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))

    class Tree(pyfuse3.Operations):  # type: ignore[misc, name-defined, unused-ignore]
        async def getattr(self, inode: int, ctx: Any = None) -> Any:
            found = pyfuse3.EntryAttributes()
            for name, value in attributes(inode != pyfuse3.ROOT_INODE, size).items():
                setattr(found, name, value)
            found.st_ino = inode
            found.attr_timeout = found.entry_timeout = 60
            return found

        async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
            if name != NAME.encode():
                raise pyfuse3.FUSEError(errno.ENOENT)
            return await self.getattr(2)

        async def open(self, inode: int, flags: int, ctx: Any) -> Any:
            return pyfuse3.FileInfo(fh=fd, direct_io=direct, keep_cache=True)

        async def read(self, fh: int, offset: int, length: int) -> memoryview:
            return view[offset : offset + length]

    options = {*pyfuse3.default_options, "fsname=bench", "allow_other", "ro"}
    options.discard("default_permissions")
    pyfuse3.init(Tree(), mountpoint, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()


SERVERS = {"fusepy": serve_fusepy, "mfusepy": serve_mfusepy, "pyfuse3": serve_pyfuse3}


def main() -> None:
    name, direct, path, mountpoint = sys.argv[1:]
    SERVERS[name](path, mountpoint, direct == "1")


if __name__ == "__main__":
    main()
