"""Which directories file mode looks at, and how their files are found and opened safely."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence

from bootseer.system.mount_calls import BENEATH, NO_MOUNTS, NO_SYMLINKS, open_in
from bootseer.system.paths import is_within

DEFAULT_ROOTS = ("/",)
PASSED_OVER = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/var/cache", "/var/log")
"""Not looked at below a root: what changes with every start is nothing to read ahead."""


def resolved(roots: Sequence[str]) -> tuple[str, ...]:
    """The roots that there are, without symlinks, none below another on the same file system."""
    found: dict[str, int] = {}
    for root in roots or DEFAULT_ROOTS:
        path = os.path.realpath(root)
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            found[path] = status.st_dev
    return tuple(
        path
        for path, device in found.items()
        if not any(
            other != path and is_within(path, other) and found[other] == device for other in found
        )
    )


def folders(roots: Sequence[str]) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Every directory of the roots' own file systems, with its regular files.

    Symlinks are not followed, mounts not entered; what cannot be read is passed over.
    """
    for root in roots:
        try:
            device = os.stat(root).st_dev
        except OSError:
            continue
        over = {path for path in PASSED_OVER if path != root and is_within(path, root)}
        waiting = [root]
        while waiting:
            folder = waiting.pop()
            files, inner = _listed(folder)
            yield folder, files
            waiting += [e.path for e in inner if e.path not in over and _is_on(e, device)]


def _listed(folder: str) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
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


class Opener:
    """Opens regular files below given roots, whatever a trace claims; a context manager.

    A path leads nowhere else: no symlink, no other mount, no device, socket or pipe is opened.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots: list[tuple[str, int]] = []
        self._by_kernel = True
        for root in sorted(resolved(roots), key=len, reverse=True):
            try:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                self._roots.append((root, os.open(root, flags)))
            except OSError:
                continue

    def __enter__(self) -> Opener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Twice is safe."""
        while self._roots:
            os.close(self._roots.pop()[1])

    def open(self, path: str) -> tuple[int, os.stat_result]:
        """Open a file to read; raises OSError where it is none of ours, or gone."""
        for root, root_fd in self._roots:
            if path != root and is_within(path, root):
                return self._open_below(root, root_fd, path)
        raise OSError(errno.EXDEV, "not below the directories that were named", path)

    def _open_below(self, root: str, root_fd: int, path: str) -> tuple[int, os.stat_result]:
        # O_PATH first: opening a device or a pipe for real can already do something.
        place = self._place(root, root_fd, path)
        try:
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(place)
        return fd, os.fstat(fd)

    def _place(self, root: str, root_fd: int, path: str) -> int:
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
