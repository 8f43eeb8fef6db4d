"""Complete objects of the node cache that may be read past it: by a kernel that mounts `data`.

Such a reader compares nothing with any entry, and reads on when this process and its locks have
ended. So two things must be certain: that the bytes are right, and that they stay so.

**Right**: `seal` reads the whole object from the medium once, block by block against the source's
digests, syncs it, and leaves a mark: the file `sealed`, which names inode, size and both times of
the file that it read. Any later write to that file changes its times. Corruption by the disk does
not, so a mark counts for `MARK_LIFE_S`: the first start after that is served block by block, and
seals the object again.

**Stay so**: `open_sealed` freezes the object, once, while no other process has it open; a mark
that does not match the file any more is ignored. From then on every process opens the file for
reading only, and eviction removes the name and nothing else. An older version, which knows no
frozen objects, takes it for a damaged one and does the same. A file without a name keeps its bytes
for as long as anything has it open, even if only the kernel does.

A process that has just verified each block against its entry may have the object read so without a
mark (`open_verified`), as it believes its own reads (see `direct_reads`). That needs no exclusive
lock: all blocks are there, and no process writes to one that is.

In any doubt an object is not sealed: it is read block by block, as every other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer.blocks.cache import direct_reads, present_index
from bootseer.blocks.cache.descriptors import check_spare
from bootseer.blocks.cache.node_cache import check_private
from bootseer.blocks.cache.present_index import Identity, identity_of
from bootseer.blocks.cache.uncached_read import Medium
from bootseer.blocks.source import BlockSource, block_length
from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, CorruptDataError, from_os_error
from bootseer.system import file_lock
from bootseer.system.atomic import replace_file

if TYPE_CHECKING:
    from typing import Self

    from bootseer.blocks.cache.direct_reads import DirectReads

MARK = "sealed"
PAGE_BYTES = 4096
STEP_BYTES = 4 << 20
MARK_LIFE_S = 7 * 24 * 3600.0
SETTLED_NS = 2_000_000_000  # how old a file's times must be so that each later write changes them
_LEAST_PRIORITY = 19
_MARK = struct.Struct("<8s32sQQqq")  # magic, identity, inode, size, mtime and ctime in ns
_MAGIC = b"BSSEAL\x00\x01"


def is_sealed(directory: str, source: BlockSource) -> bool:
    """Whether `seal` has nothing to do for this object in the cache `directory`."""
    identity = identity_of(source)
    if identity is None:
        return False
    folder = f"{directory}/{identity.folder}"
    with contextlib.suppress(OSError):
        return _read(f"{folder}/{MARK}") == _mark_of(identity, os.stat(f"{folder}/data"))
    return False


def seal(
    directory: str,
    source: BlockSource,
    *,
    go_on: Callable[[], bool],
    whole_pages: bool = True,
) -> bool:
    """Verify a complete object of the cache `directory`; returns whether it is marked now.

    With `whole_pages`, only an object of whole pages is, as a block device's content must be.
    `go_on` is called every few megabytes; it may block, and False ends the work. The calling
    thread keeps the lowest priority. A wrong block is dropped. Raises the medium's errors.
    """
    identity = identity_of(source)
    if identity is None or (whole_pages and identity.size_bytes % PAGE_BYTES):
        return False
    if not source.has_raw_digests:
        return False
    if is_sealed(directory, source):
        return True
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
    folder = f"{directory}/{identity.folder}"
    try:
        with _Files.open(folder, alone=False) as files:
            if not files.has(identity):
                return False
            mark = _verify(files, source, identity, go_on)
            if mark is None:
                return False
            os.fsync(files.present_fd)
            replace_file(f"{folder}/{MARK}", mark, mode=0o600)
    except BlockingIOError:
        return False  # it is being evicted
    except OSError as error:
        raise from_os_error(error, f"seal {folder}") from error
    return True


def open_sealed(directory: str, identity: Identity) -> Sealed | None:
    """A sealed object, frozen from now on; None where there is any doubt. Quick."""
    folder = f"{directory}/{identity.folder}"
    try:
        mark = _read(f"{folder}/{MARK}")
        if not mark:
            return None
        check_private(directory)
        with contextlib.ExitStack() as stack:
            files = stack.enter_context(_Files.open(folder, alone=True))
            check_spare(files.data_fd)
            if not files.has(identity) or mark != _mark_of(identity, os.fstat(files.data_fd)):
                return None
            if not files.frozen:
                present_index.freeze(files.present_fd)
                # It may be evicted between the two locks: that takes its name alone.
                file_lock.lock(files.present_fd, shared=True, limit_s=0)
            with contextlib.suppress(OSError):
                os.utime(folder)
            stack.pop_all()
            return Sealed(files)
    except (OSError, BootseerError):
        return None


def open_verified(directory: str, identity: Identity, verified: DirectReads) -> Sealed | None:
    """An object of which this process has verified each block, frozen from now on. Quick.

    None where it has not, or in any doubt. Nothing is said of the object to later openings.
    """
    if not verified.marks.whole:
        return None
    folder = f"{directory}/{identity.folder}"
    try:
        check_private(directory)
        with contextlib.ExitStack() as stack:
            files = stack.enter_context(_Files.open(folder, alone=False))
            check_spare(files.data_fd)
            if not files.has(identity) or not verified.is_of(files.data_fd):
                return None
            if not files.frozen:  # its lock keeps it from being evicted, or cut
                present_index.freeze(files.present_fd)
            if not verified.marks.whole:  # a block was found wrong meanwhile
                return None
            stack.pop_all()
            return Sealed(files, has_mark=False)
    except (OSError, BootseerError):
        return None


class Sealed(Closing):
    """A frozen object; pinned, so that it is not evicted, until closed. Twice is safe.

    One without a mark has been verified by this process alone.
    """

    def __init__(self, files: _Files, *, has_mark: bool = True) -> None:
        self._files, self.has_mark = files, has_mark

    @property
    def path(self) -> str:
        """A path by which this process reaches the verified file itself, whatever has its name."""
        return f"/proc/self/fd/{self._files.data_fd}"

    @property
    def descriptor(self) -> int:
        """Of its data, for reading, until closed."""
        return self._files.data_fd

    @property
    def descriptors(self) -> tuple[int, int]:
        """All that pin it: an inheritor of these keeps it from being evicted."""
        return self._files.data_fd, self._files.present_fd

    def close(self) -> None:
        self._files.close()


class _Files(Closing):
    """`present` of an object, locked, and its `data`, for reading."""

    def __init__(self) -> None:
        self.present_fd = self.data_fd = -1
        self.frozen = False

    @classmethod
    def open(cls, folder: str, *, alone: bool) -> Self:
        """The files of an object's folder.

        With `alone` the lock is exclusive as long as the object is not frozen. Raises OSError,
        BlockingIOError where the lock is held elsewhere.
        """
        files = cls()
        try:
            flags = os.O_CLOEXEC | os.O_NOFOLLOW
            files.present_fd = os.open(f"{folder}/present", os.O_RDWR | flags)
            files.frozen = present_index.is_frozen(files.present_fd)
            shared = files.frozen or not alone
            file_lock.lock(files.present_fd, shared=shared, limit_s=0)
            if not file_lock.is_named(files.present_fd, f"{folder}/present"):
                raise FileNotFoundError(folder)  # evicted between open and flock
            files.data_fd = os.open(f"{folder}/data", os.O_RDONLY | flags)
        except BaseException:  # the caller has nothing to close
            files.close()
            raise
        return files

    def has(self, identity: Identity) -> bool:
        """Whether they are this object's, and whole."""
        return (
            present_index.read_identity(self.present_fd) == identity
            and present_index.is_whole(self.present_fd, identity)
            and os.fstat(self.data_fd).st_size == identity.size_bytes
        )

    def close(self) -> None:
        fds = (self.data_fd, self.present_fd)  # the lock goes last
        self.data_fd = self.present_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


# --- verifying --------------------------------------------------------------------------------


def _verify(
    files: _Files, source: BlockSource, identity: Identity, go_on: Callable[[], bool]
) -> bytes | None:
    """The mark of a file all of whose blocks are right on the medium; None if it cannot be."""
    if not _await_settled(files.data_fd, go_on):
        return None
    before = _mark_of(identity, os.fstat(files.data_fd))
    os.fsync(files.data_fd)
    step_blocks = max(1, STEP_BYTES // identity.block_bytes)
    with Medium(files.data_fd, step_blocks * identity.block_bytes) as medium:
        for first in range(0, identity.blocks, step_blocks):
            end = min(identity.blocks, first + step_blocks)
            if not go_on() or not _step(files, source, identity, range(first, end), medium):
                return None
    return before if before == _mark_of(identity, os.fstat(files.data_fd)) else None


def _await_settled(fd: int, go_on: Callable[[], bool]) -> bool:
    """Wait until a write would certainly change the file's times, which are coarse."""
    for _ in range(2):
        status = os.fstat(fd)
        age_ns = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
        if age_ns > SETTLED_NS:
            return True
        if not go_on():
            return False
        time.sleep(SETTLED_NS / 1e9)
    return False  # it is still written to, or the clock was set back


def _step(
    files: _Files, source: BlockSource, identity: Identity, blocks: range, medium: Medium
) -> bool:
    """Verify some blocks as the medium has them; the wrong ones are dropped."""
    offset = blocks.start * identity.block_bytes
    length = min(identity.size_bytes, blocks.stop * identity.block_bytes) - offset
    room = medium.read(offset, length)
    if room is None:
        return False
    right = True
    for index in blocks:
        at = index * identity.block_bytes - offset
        try:
            source.check_raw(index, room[at : at + block_length(source, index)])
        except CorruptDataError:
            present_index.write_entry(files.present_fd, index, present_index.ABSENT)
            direct_reads.drop_mark(files.data_fd, index)
            right = False
    return right


# --- the mark ---------------------------------------------------------------------------------


def _mark_of(identity: Identity, status: os.stat_result) -> bytes:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    body = _MARK.pack(_MAGIC, identity.digest, status.st_ino, status.st_size, *times)
    return body + hashlib.sha256(body).digest()


def _read(path: str) -> bytes:
    """A mark's bytes; empty where there is none that still counts."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b""
    try:
        if abs(time.time() - os.fstat(fd).st_mtime) > MARK_LIFE_S:
            return b""
        return os.read(fd, PAGE_BYTES)
    finally:
        os.close(fd)
