"""The directories of snapshots that have files of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import threading
from collections.abc import Set as AbstractSet

from bootseer.errors import from_os_error
from bootseer.imageprefetch.snapshotter.types import Kind, Usage

_SECTOR_BYTES = 512  # st_blocks counts these, whatever the file system's own block is


class SnapshotDirs:
    """The directories `<root>/<folder>/{fs,work}`; `sweep` removes those without a snapshot."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._making: set[str] = set()

    def upper(self, folder: str) -> str:
        return os.path.join(self.root, folder, "fs")

    def work(self, folder: str) -> str:
        return os.path.join(self.root, folder, "work")

    def make(self, kind: Kind, parent_tree: str) -> str:
        """Make a folder and return its name; `made` or `remove` must follow.

        The tree's root has owner and mode of `parent_tree`, the nearest parent: in an overlay the
        root of the upper directory is the visible one.
        """
        folder = secrets.token_hex(6)  # short: up to 128 of them must fit into mount options
        with self._lock:
            self._making.add(folder)
        upper = self.upper(folder)
        try:
            os.mkdir(os.path.dirname(upper), 0o700)
            os.mkdir(upper, 0o755)
            os.chmod(upper, 0o755)  # whatever the umask is
            if kind is Kind.ACTIVE:
                os.mkdir(self.work(folder), 0o711)
            if parent_tree:
                status = os.stat(parent_tree)
                os.chown(upper, status.st_uid, status.st_gid)
                os.chmod(upper, stat.S_IMODE(status.st_mode))
        except OSError as error:
            self.remove(folder)
            raise from_os_error(error, f"make the snapshot's directory {upper}") from error
        return folder

    def note_made(self, folder: str) -> None:
        """The folder has a snapshot now."""
        with self._lock:
            self._making.discard(folder)

    def remove(self, folder: str) -> None:
        """Remove a folder; what cannot be removed now is left to the next sweep."""
        shutil.rmtree(os.path.join(self.root, folder), ignore_errors=True)
        self.note_made(folder)

    def list_all(self) -> set[str]:
        """All folders except those that are just being made."""
        names = set(os.listdir(self.root))
        with self._lock:
            return names - self._making

    def sweep(self, listed: AbstractSet[str], used: AbstractSet[str]) -> int:
        """Remove folders that `list_all` gave and no snapshot uses now; returns how many."""
        unused = listed - used
        for name in unused:
            self.remove(name)
        return len(unused)


def usage(tree: str) -> Usage:
    """What a tree takes on disk, with hard links counted once.

    Raises our errors; files that disappear meanwhile are not counted.
    """
    size_bytes, seen, waiting = 0, set[tuple[int, int]](), [tree]
    try:
        status = os.lstat(tree)
    except OSError as error:
        raise from_os_error(error, f"measure the snapshot {tree}") from error
    seen.add((status.st_dev, status.st_ino))
    size_bytes += status.st_blocks * _SECTOR_BYTES
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if (status.st_dev, status.st_ino) in seen:
                        continue
                    seen.add((status.st_dev, status.st_ino))
                    size_bytes += status.st_blocks * _SECTOR_BYTES
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
        except FileNotFoundError:
            continue  # the container of an active snapshot is running
        except OSError as error:
            raise from_os_error(error, f"measure the snapshot {tree}") from error
    return Usage(size_bytes, len(seen))
