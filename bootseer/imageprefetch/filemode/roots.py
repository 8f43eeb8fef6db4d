"""The directories that file mode covers, and finding and opening their files safely."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence

from bootseer.context_managers import Closing
from bootseer.system.mount_calls import BENEATH, NO_MOUNTS, NO_SYMLINKS, open_in
from bootseer.system.paths import is_within
from bootseer.system.regular_files import reopen_to_read

DEFAULT_ROOTS = ("/",)
SKIPPED = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/var/cache", "/var/log")
"""Skipped below a root: what changes with every start need not be read ahead."""


def resolve_roots(roots: Sequence[str]) -> tuple[str, ...]:
    """The roots that exist, without symlinks, and none below another on the same file system."""
    devices: dict[str, int] = {}
    for root in roots or DEFAULT_ROOTS:
        path = os.path.realpath(root)
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            devices[path] = status.st_dev
    return tuple(
        path
        for path, device in devices.items()
        if not any(
            other != path and is_within(path, other) and devices[other] == device
            for other in devices
        )
    )


def folders(roots: Sequence[str]) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Every directory of the roots' own file systems, with its regular files.

    Symlinks are not followed and mounts not entered; unreadable directories are skipped.
    """
    for root in roots:
        try:
            device = os.stat(root).st_dev
        except OSError:
            continue
        skipped = {path for path in SKIPPED if path != root and is_within(path, root)}
        waiting = [root]
        while waiting:
            folder = waiting.pop()
            files, inner = _list(folder)
            yield folder, files
            waiting += [e.path for e in inner if e.path not in skipped and _is_on(e, device)]


def _list(folder: str) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    files, inner = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    files.append(entry)
                elif entry.is_dir(follow_symlinks=False):
                    inner.append(entry)
    except OSError:
        pass
    return files, inner


def _is_on(entry: os.DirEntry[str], device: int) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_dev == device
    except OSError:
        return False


class FileOpener(Closing):
    """Opens regular files below given roots, whatever a trace claims; a context manager.

    No symlink is followed, no other mount entered, and no device, socket or pipe opened.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._paths = roots
        self._roots: list[tuple[str, int]] = []
        self._by_kernel = True

    def __enter__(self) -> FileOpener:
        for root in sorted(resolve_roots(self._paths), key=len, reverse=True):
            try:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                self._roots.append((root, os.open(root, flags)))
            except OSError:
                continue
        return self

    def close(self) -> None:
        """Twice is safe."""
        while self._roots:
            os.close(self._roots.pop()[1])

    def open(self, path: str) -> tuple[int, os.stat_result]:
        """Open a file to read; raises OSError for one that is missing, or not to be opened."""
        for root, root_fd in self._roots:
            if path.startswith(root.rstrip("/") + "/"):  # as it is written: the rest is cut off
                return self._open_below(root, root_fd, path)
        raise OSError(errno.EXDEV, "not below the directories that were named", path)

    def _open_below(self, root: str, root_fd: int, path: str) -> tuple[int, os.stat_result]:
        path_fd = self._open_path(root, root_fd, path)
        try:
            fd = reopen_to_read(path_fd, path)
        finally:
            os.close(path_fd)
        return fd, os.fstat(fd)

    def _open_path(self, root: str, root_fd: int, path: str) -> int:
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._by_kernel:
            relative = os.fsencode(path[len(root.rstrip("/")) + 1 :])
            try:
                return open_in(root_fd, relative, flags, NO_MOUNTS | NO_SYMLINKS | BENEATH)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EPERM):
                    raise OSError(error.errno, error.strerror, path) from None
            self._by_kernel = False  # an old kernel, or a filter of system calls
        if os.path.realpath(path) != path:
            raise OSError(errno.ELOOP, "a symlink is on the way", path)
        fd = os.open(path, flags)
        if os.fstat(fd).st_dev != os.stat(root).st_dev:
            os.close(fd)
            raise OSError(errno.EXDEV, "on another file system", path)
        return fd
