"""Trees that are mounted for as long as a command runs, and go with it however it ends.

Each has a folder of its own: see `container_folders`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from bootseer.errors import BootseerError, BusyError, from_os_error
from bootseer.imageprefetch.mount import mount
from bootseer.imageprefetch.run.container_folders import FOLDER, TREE, remove, sweep_locked
from bootseer.imageprefetch.run.interrupts import ending
from bootseer.system.file_lock import acquire_directory

__all__ = ["directory", "ending", "unmounting"]

_UNMOUNT_S = 10.0


@contextlib.contextmanager
def directory(runtime: str) -> Iterator[str]:
    """A directory to mount at, below one that root alone may enter: for setuid programs.

    What else is put beside it goes with it.
    """
    folder = os.path.join(runtime, FOLDER)
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with acquire_directory(folder):
                sweep_locked(folder)
                above = os.path.join(folder, os.urandom(8).hex())
                os.mkdir(above, mode=0o700)
                stack.enter_context(acquire_directory(above))
            tree = os.path.join(above, TREE)
            os.mkdir(tree)
        except OSError as error:
            raise from_os_error(error, f"make a directory to mount at in {folder}") from error
        try:
            yield tree
        finally:
            remove(above)


@contextlib.contextmanager
def unmounting(tree: str, runtime: str) -> Iterator[None]:
    """Whatever is mounted at `tree` is unmounted at the end; if that fails, it is swept later."""
    try:
        yield
    finally:
        with contextlib.suppress(BootseerError):
            _unmount_when_free(tree, runtime)


def _unmount_when_free(tree: str, runtime: str) -> None:
    """A container that is still going away keeps the tree busy for a moment."""
    end_s = time.monotonic() + _UNMOUNT_S
    try:
        while True:
            try:
                return mount.umount(tree, runtime_dir=runtime)
            except BusyError:
                if time.monotonic() > end_s:
                    return mount.umount(tree, lazily=True, runtime_dir=runtime)
            time.sleep(0.1)
    except (KeyboardInterrupt, SystemExit):  # whoever has no patience leaves no tree either
        with contextlib.suppress(BootseerError):
            mount.umount(tree, lazily=True, runtime_dir=runtime)
        raise
