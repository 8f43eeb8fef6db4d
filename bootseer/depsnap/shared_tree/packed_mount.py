"""Mount a packed tree (`format.packed_tree`): two files that the kernel shows as a file system.

Unpacking writes one large file in place of many small ones, and the metadata of the two files
shows whether the tree was changed: their inode, size, owner, mode, mtime and ctime, which no
program can set. A packed tree is only used below an overlay, and needs Linux 6.12 (EROFS over plain
files).
"""

from __future__ import annotations

import os

from bootseer.depsnap.restore import staging
from bootseer.depsnap.types import PACKED_DATA, PACKED_META
from bootseer.errors import NotSupportedError
from bootseer.system import mount_calls
from bootseer.system.file_lock import FileLock, acquire_directory
from bootseer.system.mountinfo import is_mounted

_TRIAL = ".trial-"
_IN_TRIAL = ("image", "upper", "work", "shown")
_META_AHEAD_BYTES = 16 << 20


def compute_fingerprint(folder: str) -> list[list[int]]:
    """The metadata that shows whether either file was changed. Raises OSError where one is
    missing."""
    out = []
    for name in (PACKED_DATA, PACKED_META):
        s = os.lstat(os.path.join(folder, name))
        times = [s.st_mtime_ns, s.st_ctime_ns]
        out.append([s.st_mode, s.st_ino, s.st_size, s.st_uid, *times])
    return out


def mount(folder: str, target: str) -> None:
    """Mount a packed tree read-only. Raises OSError, NotSupportedError."""
    data = os.path.join(folder, PACKED_DATA)
    if "," in data:
        raise NotSupportedError("the cache's path holds a comma, which mount(2) cannot")
    meta = os.path.join(folder, PACKED_META)
    read_ahead(folder)
    flags = mount_calls.MS_RDONLY | mount_calls.MS_NODEV | mount_calls.MS_NOATIME
    mount_calls.mount(meta, target, "erofs", flags, f"device={data}")


def read_ahead(folder: str) -> None:
    """Have the kernel read the metadata at once, without waiting for it: a mount reads one block
    after the other. Raises OSError where there is none.
    """
    descriptor = os.open(
        os.path.join(folder, PACKED_META), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    )
    try:
        os.posix_fadvise(descriptor, 0, _META_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
    except OSError:
        pass  # a file system that takes no advice
    finally:
        os.close(descriptor)


def works_in(folder: str) -> bool:
    """Whether this process may mount an overlay over a packed tree whose files are in `folder`.

    Tried with an empty one, since it depends on the kernel, on privileges and on the file system.
    """
    if os.geteuid() != 0:
        return False
    from bootseer.depsnap.format import packed_tree  # a tree that is there was tried before

    for name in os.listdir(folder):
        if name.startswith(_TRIAL):
            _clear_abandoned(os.path.join(folder, name))
    trial = os.path.join(folder, _TRIAL + os.urandom(8).hex())
    lower, upper, work, shown = (os.path.join(trial, name) for name in _IN_TRIAL)
    lock = FileLock(-1)
    try:
        os.mkdir(trial)
        lock = _lock(trial)
        for path in (lower, upper, work, shown):
            os.mkdir(path)
        content = {
            PACKED_META: packed_tree.empty_metadata(),
            PACKED_DATA: bytes(packed_tree.BLOCK_BYTES),
        }
        for name, data in content.items():
            with open(os.path.join(trial, name), "wb") as file:
                file.write(data)
        mount(trial, lower)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount_calls.mount("overlay", shown, "overlay", 0, options)
    except (OSError, NotSupportedError):
        return False
    finally:
        _clear(trial)
        lock.close()
    return True


def _lock(trial: str) -> FileLock:
    """A lock that shows that this trial is under way. Raises OSError when it is.

    A process id could not show it: containers that share a cache number processes differently.
    """
    return acquire_directory(trial, limit_s=0)


def _clear_abandoned(trial: str) -> None:
    """Remove a trial whose process was killed."""
    try:
        lock = _lock(trial)
    except OSError:
        return  # it is under way, or removed
    with lock:
        try:
            _clear(trial)
        except OSError:
            pass  # mounted in another mount namespace, perhaps: it does no harm


def _clear(trial: str) -> None:
    for name in ("shown", "image"):
        place = os.path.join(trial, name)
        if is_mounted(place):
            mount_calls.unmount(place)
    staging.remove_tree(trial)
