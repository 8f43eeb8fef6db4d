"""Fill a staging directory from a shared tree by hard links, reflinks or copies."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import ExitStack
from typing import Literal

from bootseer.depsnap.format.index_records import Index, IndexRoot
from bootseer.depsnap.restore.unpack_worker import set_xattrs
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK

FarmForm = Literal["reflink", "hardlink", "copy"]
FICLONE = 0x40049409
"""ioctl of `linux/fs.h`: share the other file's blocks, copy on write."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def fill(index: Index, root: IndexRoot, source: str, target: str, form: FarmForm) -> None:
    """Fill `target` (private, empty) with what `source`, the tree's directory of `root`, holds.

    Modes come from the index, so that a tree without write bits gives directories that can be
    written; hard-linked files share the tree's own mode. Raises OSError (EXDEV, EOPNOTSUPP,
    EMLINK, ENOSPC, …) with part of it done.
    """
    with ExitStack() as stack:
        descriptors = []
        for folder in (source, target):
            descriptors.append(os.open(folder, _FOLDER))
            stack.callback(os.close, descriptors[-1])
        numbers = range(root.first, root.first + root.count)
        _Farm(index, numbers, descriptors[0], descriptors[1], form).run()


class _Farm:
    def __init__(
        self, index: Index, numbers: range, source: int, target: int, form: FarmForm
    ) -> None:
        self._index, self._numbers = index, numbers
        self._source, self._target = source, target
        self._form = form
        self._is_root = os.geteuid() == 0

    def run(self) -> None:
        index = self._index
        now_ns = time.time_ns()
        for number in self._numbers:
            kind, path = index.kind[number], index.path[number]
            if kind == DIRECTORY:
                if path:
                    os.mkdir(path, 0o700, dir_fd=self._target)
            elif kind == FILE:
                self._make_file(number, now_ns)
        for number in self._numbers:
            if index.kind[number] not in (DIRECTORY, FILE):
                self._make_link(number, now_ns)
        for number in reversed(self._numbers):
            if index.kind[number] == DIRECTORY:
                self._set_directory_metadata(number, now_ns)

    def _make_file(self, number: int, now_ns: int) -> None:
        path = self._index.path[number]
        if self._form == "hardlink":
            os.link(
                path,
                path,
                src_dir_fd=self._source,
                dst_dir_fd=self._target,
                follow_symlinks=False,
            )
            return
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._source)
        try:
            target = os.open(path, _NEW, 0o600, dir_fd=self._target)
            try:
                if self._form == "reflink":
                    fcntl.ioctl(target, FICLONE, source)
                else:
                    self._copy(source, target, number)
                self._set_metadata(number, source, target, now_ns)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _copy(self, source: int, target: int, number: int) -> None:
        size = self._index.size[number]
        segments = self._index.segments.get(number)
        if segments is not None:
            os.ftruncate(target, size)
        for offset, length in segments if segments is not None else ((0, size),):
            os.lseek(source, offset, os.SEEK_SET)
            os.lseek(target, offset, os.SEEK_SET)
            left = length
            while left > 0:
                done = os.sendfile(target, source, None, left)
                if not done:
                    raise OSError(errno.EIO, "shorter than recorded", self._index.path[number])
                left -= done

    def _set_metadata(self, number: int, source: int, target: int, now_ns: int) -> None:
        status = os.fstat(source)
        privileged = status.st_mode & 0o6000
        mode = (self._index.mode[number] & 0o1777) | privileged
        if self._is_root:
            os.fchown(target, status.st_uid, status.st_gid)
        os.fchmod(target, mode)
        for name in os.listxattr(source):
            set_xattrs(target, ((name, os.getxattr(source, name)),))
        os.utime(target, ns=(now_ns, status.st_mtime_ns))

    def _make_link(self, number: int, now_ns: int) -> None:
        index = self._index
        path, text = index.path[number], index.link[number]
        if index.kind[number] == HARDLINK:
            target = self._target
            os.link(text, path, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)
            return
        os.symlink(text, path, dir_fd=self._target)
        status = os.stat(path, dir_fd=self._source, follow_symlinks=False)
        if self._is_root:
            os.chown(path, status.st_uid, status.st_gid, dir_fd=self._target, follow_symlinks=False)
        times = (now_ns, status.st_mtime_ns)
        os.utime(path, ns=times, dir_fd=self._target, follow_symlinks=False)

    def _set_directory_metadata(self, number: int, now_ns: int) -> None:
        path = self._index.path[number] or "."
        status = os.stat(path, dir_fd=self._source, follow_symlinks=False)
        if self._is_root:
            os.chown(path, status.st_uid, status.st_gid, dir_fd=self._target)
        os.chmod(path, stat.S_IMODE(self._index.mode[number]), dir_fd=self._target)
        times = (now_ns, status.st_mtime_ns)
        os.utime(path, ns=times, dir_fd=self._target, follow_symlinks=False)
