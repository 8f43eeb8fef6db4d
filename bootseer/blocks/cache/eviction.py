"""Making room in the node cache: whole objects or their ends, by their last start."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from bootseer.blocks.cache import present_index
from bootseer.blocks.cache.cached_object import punch
from bootseer.blocks.cache.present_index import ABSENT, Identity
from bootseer.system import file_lock
from bootseer.system.file_lock import FileLock

NEW = ".new-"
DEAD = ".dead-"
ABANDONED_S = 600.0  # a `.new-` folder so old has no living maker
_RUN_BLOCKS = 1024
_OBJECT = re.compile("[0-9a-f]{40}")
_TEMPORARY = re.compile(f"({re.escape(NEW)}|{re.escape(DEAD)})[0-9a-f]{{32}}")


def make_unique_name() -> str:
    """The rest of a temporary folder's name, as `_TEMPORARY` expects it."""
    return os.urandom(16).hex()


def remove_tree(path: str) -> None:
    """Remove a folder, as far as that is possible."""
    import shutil  # takes milliseconds, which a mount would wait for

    shutil.rmtree(path, ignore_errors=True)


class Usage(NamedTuple):
    """One object folder: when it was last opened and the bytes it takes."""

    path: str
    started_ns: int
    used_bytes: int


def survey(directory: str) -> list[Usage]:
    """All objects, least recently opened first. Removes what killed processes left.

    Whatever else lies in the directory is not ours and stays.
    """
    objects = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                continue
            if _TEMPORARY.fullmatch(entry.name):
                _clear(entry.path)
            elif _OBJECT.fullmatch(entry.name):
                try:
                    objects.append(_usage(entry.path))
                except (FileNotFoundError, NotADirectoryError):
                    discard(entry.path)  # half an object, of no use
    return sorted(objects, key=lambda usage: usage.started_ns)


def used_bytes(directory: str) -> int:
    """Allocated bytes of all objects."""
    return sum(usage.used_bytes for usage in survey(directory))


def shrink(directory: str, limit_bytes: int, goal_bytes: int) -> int:
    """Evict down to the goal if more than the limit is used; returns what is used then.

    Objects that are open anywhere are left alone.
    """
    objects = survey(directory)
    used = sum(usage.used_bytes for usage in objects)
    return used if used <= limit_bytes else used - _evict_first(objects, used - goal_bytes)


def evict_share(directory: str, share: float) -> int:
    """Evict about a share of what is cached; returns the bytes that this freed.

    Bytes that other processes write or free meanwhile do not count.
    """
    objects = survey(directory)
    used = sum(usage.used_bytes for usage in objects)
    return _evict_first(objects, used - int(used * (1 - share)))


def _evict_first(objects: Iterable[Usage], wanted_bytes: int) -> int:
    """Evict the first of some objects until enough is freed; returns the bytes freed."""
    freed = 0
    for usage in objects:
        if freed >= wanted_bytes:
            break
        freed += _evict(usage, wanted_bytes - freed)
    return freed


def discard_spoiled(path: str, present_fd: int, identity: Identity) -> bool:
    """Remove a frozen object that lacks blocks, which can never be put there again.

    `present_fd` holds the object's shared lock. When this returns True the lock may be lost, and
    the object must be opened again. An object that others have open is not removed.
    """
    if not present_index.is_frozen(present_fd) or present_index.is_whole(present_fd, identity):
        return False
    try:
        file_lock.lock(present_fd, limit_s=0)
    except OSError:
        file_lock.lock(present_fd, shared=True, limit_s=0)
        return False
    if _remove(path):
        return True
    file_lock.lock(present_fd, shared=True, limit_s=0)  # others may have it open, too
    return False


def discard(path: str, unless: Identity | None = None) -> bool:
    """Remove an object, unless it is open or is a sound one of the given identity."""
    present = _lock_alone(path)
    if present is None:
        return False
    with present:
        fd = present.descriptor
        whole = fd >= 0 and os.path.exists(f"{path}/data")
        if unless is not None and whole and present_index.read_identity(fd) == unless:
            return False
        return _remove(path)


def _evict(usage: Usage, wanted_bytes: int) -> int:
    """Free about so many bytes of an object, or all of it; returns the bytes freed."""
    present = _lock_alone(usage.path)
    if present is None:
        return 0
    with present:
        if present.descriptor >= 0 and wanted_bytes < usage.used_bytes // 2:
            # The end goes first: a start reads what lies in front sooner and more often.
            with contextlib.suppress(OSError):
                freed = _cut(usage.path, present.descriptor, wanted_bytes)
                if freed:
                    return freed
        return usage.used_bytes if _remove(usage.path) else 0


def _cut(path: str, present_fd: int, wanted_bytes: int) -> int:
    """Punch blocks out, from the last one down, until enough is free; returns the bytes freed."""
    identity = present_index.read_identity(present_fd)
    if identity is None or present_index.is_frozen(present_fd):  # a kernel may read it: unlink only
        return 0
    data_fd = os.open(f"{path}/data", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        before = os.fstat(data_fd).st_blocks
        end = identity.blocks
        while end > 0 and (before - os.fstat(data_fd).st_blocks) * 512 < wanted_bytes:
            first = max(0, end - _run_blocks(identity, wanted_bytes))
            if present_index.read_entries(present_fd, first, end - first).strip(b"\0"):
                absent = ABSENT * (end - first)
                os.pwrite(present_fd, absent, present_index.position(first))
                length = (end - first) * identity.block_bytes
                punch(data_fd, first * identity.block_bytes, length)
            end = first
        return (before - os.fstat(data_fd).st_blocks) * 512
    finally:
        os.close(data_fd)


def _run_blocks(identity: Identity, wanted_bytes: int) -> int:
    return max(1, min(_RUN_BLOCKS, wanted_bytes // identity.block_bytes))


def _lock_alone(path: str) -> FileLock | None:
    """An object's `present`, locked; no file's lock where it has none; None when in use."""
    name = f"{path}/present"
    try:
        present = file_lock.acquire(name, create=False, flags=os.O_NOFOLLOW, limit_s=0)
    except FileNotFoundError:
        return FileLock(-1) if os.path.isdir(path) else None
    except OSError:  # held by a reader
        return None
    try:
        if present.is_named(name):
            return present
    except OSError:
        pass
    present.close()  # it was removed meanwhile, or cannot be looked at
    return None


def _remove(path: str) -> bool:
    """Take an object out of the way in one step, then delete it."""
    dead = f"{os.path.dirname(path)}/{DEAD}{make_unique_name()}"
    try:
        os.rename(path, dead)
    except OSError:
        return False
    remove_tree(dead)
    return True


def _clear(path: str) -> None:
    """Remove what a killed process left: evicted objects at once, new ones when they are old."""
    try:
        young = time.time() - os.stat(path).st_mtime < ABANDONED_S
    except OSError:
        return
    if os.path.basename(path).startswith(DEAD) or not young:
        remove_tree(path)


def _usage(path: str) -> Usage:
    present, data = os.stat(f"{path}/present"), os.stat(f"{path}/data")
    # A start that seems to lie in the future (the clock was set back) counts as one of now.
    started_ns = min(os.stat(path).st_mtime_ns, time.time_ns())
    return Usage(path, started_ns, (present.st_blocks + data.st_blocks) * 512)
