"""Folders of what installs changed: read by the container and, longer perhaps, by their publisher.

`<cache>/layers/<random>/` is locked, shared, by each process that needs it. Whoever lets go last
removes it. What killed processes left is removed at the end of the next start, unless a container
still has it. Files are deleted under another name, and with no lock: there may be many of them.
"""

from __future__ import annotations

import contextlib
import os

from bootseer.errors import from_os_error
from bootseer.imageprefetch.mount.container_folders import (
    delete_renamed,
    is_layer_used,
    rename_away,
)
from bootseer.system import file_lock
from bootseer.system.file_lock import FileLock, acquire_directory

FOLDER = "layers"
LOCK_S = 5.0
"""How long a start waits for whoever sweeps here."""


def make(cache: str) -> tuple[str, FileLock]:
    """Make a folder, and hold it. Raises the errors of `from_os_error`."""
    base = os.path.join(cache, FOLDER)
    folder = os.path.join(base, os.urandom(8).hex())
    try:
        os.makedirs(base, mode=0o700, exist_ok=True)
        with acquire_directory(base, limit_s=LOCK_S):
            os.mkdir(folder, mode=0o700)
            return folder, hold(folder)
    except OSError as error:
        raise from_os_error(error, f"make a folder in {base}") from error


def hold(folder: str) -> FileLock:
    """Keep a folder from being removed until `let_go`. Raises OSError."""
    lock = FileLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        file_lock.lock(lock.descriptor, shared=True)
    except BaseException:
        lock.close()
        raise
    return lock


def let_go(folder: str, lock: FileLock) -> None:
    """Let go of a folder, and remove it if nobody else holds it."""
    lock.close()
    _take_away(folder)
    delete_renamed(os.path.dirname(folder))


def sweep(cache: str) -> None:
    """Remove what killed processes left, unless another process makes or sweeps such folders."""
    base = os.path.join(cache, FOLDER)
    with contextlib.suppress(OSError), acquire_directory(base, limit_s=0):
        for name in os.listdir(base):
            _take_away(os.path.join(base, name))
    delete_renamed(base)


def sweep_node(_runtime: str, cache: str, _kept_limit_bytes: int) -> None:
    """As `sweep`, for the agent: see `imageprefetch.mount.node_sweep`."""
    sweep(cache)


def _take_away(folder: str) -> None:
    with contextlib.suppress(OSError), acquire_directory(folder, limit_s=0):
        if not is_layer_used(folder):
            rename_away(folder)
