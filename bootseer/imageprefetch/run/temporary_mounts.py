"""Directories to mount at for as long as a command runs, removed however it ends.

Each is in a folder of its own: see `container_folders`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from bootseer.errors import BootseerError, BusyError, from_os_error
from bootseer.imageprefetch.mount import mount
from bootseer.imageprefetch.mount.container_folders import FOLDER, TREE, remove, sweep_locked
from bootseer.system.file_lock import acquire_directory

_UNMOUNT_S = 10.0
_LOCK_S = 5.0  # a start does not wait for whoever sweeps here, and was stopped


@contextlib.contextmanager
def directory(runtime: str) -> Iterator[str]:
    """A directory to mount at, below one that only root may enter, because of setuid programs.

    Other files in its parent are removed with it.
    """
    folder = os.path.join(runtime, FOLDER)
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with acquire_directory(folder, limit_s=_LOCK_S):
                sweep_locked(folder)
                own_folder = os.path.join(folder, os.urandom(8).hex())
                os.mkdir(own_folder, mode=0o700)
                stack.enter_context(acquire_directory(own_folder))
            tree = os.path.join(own_folder, TREE)
            os.mkdir(tree)
        except OSError as error:
            raise from_os_error(error, f"make a directory to mount at in {folder}") from error
        try:
            yield tree
        finally:
            remove(own_folder)


@contextlib.contextmanager
def unmounting(tree: str, runtime: str) -> Iterator[None]:
    """Unmount `tree` at the end; if that fails, it is swept later."""
    try:
        yield
    finally:
        with contextlib.suppress(BootseerError):
            _unmount_when_free(tree, runtime)


def _unmount_when_free(tree: str, runtime: str) -> None:
    """Wait for a container that is just ending, which keeps the tree busy for a moment."""
    end_s = time.monotonic() + _UNMOUNT_S
    try:
        while True:
            try:
                return mount.umount(tree, runtime_dir=runtime)
            except BusyError:
                if time.monotonic() > end_s:
                    return mount.umount(tree, lazily=True, runtime_dir=runtime)
            time.sleep(0.1)
    except (KeyboardInterrupt, SystemExit):  # an interrupt leaves no tree either
        with contextlib.suppress(BootseerError):
            mount.umount(tree, lazily=True, runtime_dir=runtime)
        raise
