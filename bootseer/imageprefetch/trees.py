"""Trees that are mounted for as long as a command runs, and go with it however it ends.

`<runtime>/containers/<random>/` is one command's, locked as long as that lives: `tree` is what is
mounted; all else there is the command's own. What a killed one left is swept by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from bootseer.errors import BootseerError, BusyError, from_os_error
from bootseer.fuse.mounts import unmount
from bootseer.imageprefetch import mounting
from bootseer.imageprefetch.interrupts import ending

__all__ = ["directory", "ending", "unmounting"]

_FOLDER, _TREE = "containers", "tree"
_UNMOUNT_S = 10.0


@contextlib.contextmanager
def directory(runtime: str) -> Iterator[str]:
    """A directory to mount at, below one that root alone may enter: for setuid programs.

    What else is put beside it goes with it.
    """
    folder = os.path.join(runtime, _FOLDER)
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with _locked(folder, fcntl.LOCK_EX):
                _sweep(folder)
                above = os.path.join(folder, os.urandom(8).hex())
                os.mkdir(above, mode=0o700)
                stack.enter_context(_locked(above, fcntl.LOCK_EX))
            tree = os.path.join(above, _TREE)
            os.mkdir(tree)
        except OSError as error:
            raise from_os_error(error, f"make a directory to mount at in {folder}") from error
        try:
            yield tree
        finally:
            _remove(above)


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
                return mounting.umount(tree, runtime_dir=runtime)
            except BusyError:
                if time.monotonic() > end_s:
                    return mounting.umount(tree, lazily=True, runtime_dir=runtime)
            time.sleep(0.1)
    except (KeyboardInterrupt, SystemExit):  # whoever has no patience leaves no tree either
        with contextlib.suppress(BootseerError):
            mounting.umount(tree, lazily=True, runtime_dir=runtime)
        raise


def _sweep(folder: str) -> None:
    """Unmount what killed ones left behind; containers that run on it keep what they have."""
    for name in os.listdir(folder):
        above = os.path.join(folder, name)
        with contextlib.suppress(OSError), _locked(above, fcntl.LOCK_EX | fcntl.LOCK_NB):
            with contextlib.suppress(BootseerError):
                unmount(os.path.join(above, _TREE), lazily=True)
            _remove(above)


def _remove(above: str) -> None:
    """What is mounted still is swept another time."""
    try:
        os.rmdir(os.path.join(above, _TREE))
    except FileNotFoundError:
        pass
    except OSError:
        return
    import shutil  # milliseconds, which a start shall not wait for

    shutil.rmtree(above, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: str, how: int) -> Iterator[None]:
    """The directory's lock: of one that was killed, anyone may have it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)
