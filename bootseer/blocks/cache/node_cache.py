"""The node cache: blocks of immutable objects in a folder that all processes of a node share.

`<directory>/<object>/data` is a sparse file with a block at its place in the object; `present`
says which blocks are there, with a check of each (see `present_index`). `<directory>/usage`
counts bytes.

**Killed at any point** (kill -9): a block's entry is written after the whole of its bytes, in one
write that crosses no page boundary, so there is no entry without its bytes; bytes without an entry
do not count. New objects are made under a temporary name and renamed. Locks and claims end with
the process.

**Power lost**: nothing is synced, so `present`, `data` and folders may come back in any older
mixture, with zeros, or with other files' old bytes. Every read compares the block with its entry
(xxh3-128 of bytes and number), so what does not fit together is dropped and fetched again; a
header that does not fit drops the object. That costs 0.03 s a GB, and no clean stop is needed: a
block is verified at its first use in a process, also for sources that have no digests of their
own. After that the block may be read without these checks (see `direct_reads`).

**Several processes**: readers need no lock at all, since a block that is being replaced merely
fails its check. A shared flock on `present` pins an object while it is open; eviction takes it
exclusively, or leaves the object alone. Blocks are claimed by locks on their entries, so that
two processes rarely fetch the same one. No lock is waited for, so that a stopped process stops no
other: a process that cannot have an object's lock does without the cache for a while, and bytes
that cannot be counted at once are counted with the next ones. What a process did not count before
it ended, or was killed, is counted when the folders are.

**Full**: objects are evicted by their last start, oldest first, down to nine tenths of the limit.
Where that does not help, or the medium is full or broken, storing ends and `on_stop` is called
with the reason, once; reads go on.

**Sealed** (see `sealed_objects`): an object all of whose blocks are here may be frozen, so that
its `data` can be read by the kernel, past all checks. No process opens it for writing from then
on; it is evicted whole, by unlinking, which leaves the bytes to those that have it open.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bootseer.blocks.cache import eviction, present_index
from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.cache.descriptors import check_spare
from bootseer.blocks.cache.present_index import Identity, identity_of
from bootseer.blocks.source import BlockSource
from bootseer.context_managers import Closing
from bootseer.errors import AccessDeniedError, UsageError, from_os_error
from bootseer.system import file_lock

if TYPE_CHECKING:
    from typing import Self

LOW_WATER = 0.9
EVICTED_S = 1.0  # how long the outcome of making room on a full medium counts, for all threads
FULL_PAUSE_S = 5.0  # how long a cache whose objects are all in use is not asked for room again
LOCK_TRIES = 20
LOCK_PAUSE_S = 0.001
MOST_UNCOUNTED_BYTES = 64 << 20
_COUNTER = struct.Struct("<Q")
_MEDIUM_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def _ignore(reason: str) -> None:
    """What is called when storing ends, unless the caller gives something else."""


class NodeCache(Closing):
    """Opens cached objects below `directory` and keeps them within `limit_bytes` together.

    `on_stop` is called once, from any thread, when storing ends: with the reason, for a person.
    The limit counts allocated bytes. Blocks that are just being written may exceed it, and so may
    the bytes that a process could not count yet: a 64th of the limit, at most
    `MOST_UNCOUNTED_BYTES`. Whatever the limit, the part `keep_free` of the file system stays free.
    """

    def __init__(
        self,
        directory: str,
        limit_bytes: int,
        usage_fd: int,
        *,
        keep_free: float,
        on_stop: Callable[[str], None],
    ) -> None:
        """For `at`; `usage_fd` is of the counter's file, -1 where there is none."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._keep_free = keep_free
        self.corrupt_blocks = 0
        self._on_stop = on_stop
        self._lock = threading.Lock()  # of the counter; held over its quick file operations
        self._uncounted_lock = threading.Lock()  # a leaf
        self._uncounted_bytes = 0  # granted, and not in the counter yet
        self.stopped = ""
        """Why nothing is stored any more; "" while storing goes on."""
        self._full_until = 0.0  # 0: there was room at the last look
        self._evict_lock = threading.Lock()  # of threads that met a full medium
        self._evicted_s, self._freed = -math.inf, False
        self._usage_fd = usage_fd

    @classmethod
    def at(
        cls,
        directory: str,
        limit_bytes: int,
        *,
        keep_free: float = 0.0,
        on_stop: Callable[[str], None] = _ignore,
    ) -> Self:
        """The cache in a directory, which is made where it is missing.

        Raises UsageError for an invalid limit, AccessDeniedError for a directory in which other
        users could plant blocks, and the errors of any other fault that keeps it from being used;
        a full medium is no error.
        """
        if limit_bytes <= 0:
            raise UsageError(f"a cache of {limit_bytes} bytes holds nothing; give a larger limit")
        directory, usage_fd = os.path.abspath(directory), -1
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            check_private(directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            usage_fd = os.open(f"{directory}/usage", flags, 0o600)
        except OSError as error:
            if error.errno not in _MEDIUM_FULL:
                raise from_os_error(error, f"use the cache in {directory}") from error
        cache = cls(directory, limit_bytes, usage_fd, keep_free=keep_free, on_stop=on_stop)
        if usage_fd < 0:
            cache._stop(f"the cache in {directory} has no space for anything")
        return cache

    def open(self, source: BlockSource) -> CachedObject:
        """The cached object of a source, made when it is new; it counts as started now.

        For a source without a key, and on any fault of the cache, the object holds nothing and
        stores nothing.
        """
        identity = identity_of(source)
        if identity is None or self._usage_fd < 0:
            return CachedObject(None, self)
        try:
            files = self._open_files(identity)
        except OSError as error:
            self.handle_write_fault(error)
            files = None
        if files is None:
            return CachedObject(None, self)
        present_fd, data_fd, frozen = files
        return CachedObject(identity, self, present_fd, data_fd, frozen=frozen)

    def _open_files(self, identity: Identity) -> tuple[int, int, bool] | None:
        folder = f"{self.directory}/{identity.folder}"
        for _ in range(LOCK_TRIES):
            try:
                files = _open_pinned(folder, identity)
            except FileNotFoundError:
                if os.path.isdir(folder):
                    eviction.discard(folder, unless=identity)
                elif not self.reserve(identity.table_bytes + 4096):
                    return None
                else:
                    self._create(folder, identity)
                continue
            if files is not None:
                return files
            eviction.discard(folder, unless=identity)
            time.sleep(LOCK_PAUSE_S)  # another process may be evicting it
        return None

    def _create(self, folder: str, identity: Identity) -> None:
        """Make an empty object under a temporary name and rename it, unless another process did."""
        new = f"{self.directory}/{eviction.NEW}{eviction.make_unique_name()}"
        os.mkdir(new, 0o700)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(f"{new}/present", flags, 0o600), "wb", buffering=0) as file:
                file.write(identity.header)
                # Reserved, so that entries can always be written, and dropped, on a full medium.
                os.posix_fallocate(file.fileno(), 0, identity.table_bytes)
            with open(os.open(f"{new}/data", flags, 0o600), "wb", buffering=0) as file:
                os.ftruncate(file.fileno(), identity.size_bytes)
            os.rename(new, folder)
        except OSError as error:
            eviction.remove_tree(new)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def reserve(self, wanted_bytes: int) -> bool:
        """Count bytes that are about to be written, evicting where the limit says so."""
        if self._refuses():
            return False
        wanted_bytes = _round_up(wanted_bytes)
        if not self._lock.acquire(timeout=LOCK_TRIES * LOCK_PAUSE_S):
            return self._grant_uncounted(wanted_bytes)  # a thread evicts, or the medium is slow
        failure: OSError | None = None
        granted: bool | None = False
        try:
            if not self._refuses():  # the lock's last owner may have met the limit
                with self._usage_locked() as locked:
                    grant = self._count if locked else self._grant_uncounted
                    granted = grant(wanted_bytes)
        except OSError as error:
            failure = error
        finally:
            self._lock.release()
        if failure is not None:
            self.handle_write_fault(failure)
        if granted is None:
            self._report_stop(
                f"the cache in {self.directory} is at its limit ({self.limit_bytes} bytes, or "
                "a disk that is nearly full) and all of it is in use; give it more room"
            )
        return bool(granted)

    def _refuses(self) -> bool:
        return bool(self.stopped) or time.monotonic() < self._full_until

    def _grant_uncounted(self, wanted_bytes: int) -> bool:
        """Grant bytes that cannot be counted now, up to a limit, rather than lose the block."""
        with self._uncounted_lock:
            uncounted_bytes = self._uncounted_bytes + wanted_bytes
            if uncounted_bytes > min(MOST_UNCOUNTED_BYTES, self.limit_bytes // 64):
                return False
            if self.stopped or self._full_until or not self._has_spare(uncounted_bytes):
                return False
            self._uncounted_bytes = uncounted_bytes
            return True

    def _count(self, wanted_bytes: int) -> bool | None:
        """Whether there is room; None when eviction could not make any."""
        with self._uncounted_lock:
            uncounted_bytes = self._uncounted_bytes
        # Without a usable counter (a new or a spoiled cache) the folders are looked at.
        stored_bytes = self._stored_count()
        counted = (self.limit_bytes if stored_bytes is None else stored_bytes) + uncounted_bytes
        limit_bytes = self._limit_now(counted)
        if counted + wanted_bytes > limit_bytes:
            goal = max(0, int(limit_bytes * LOW_WATER) - wanted_bytes)
            most = max(0, limit_bytes - wanted_bytes)
            counted = eviction.shrink(self.directory, most, goal)
        granted = counted + wanted_bytes <= limit_bytes
        if granted or uncounted_bytes:
            self._write_count(counted + (wanted_bytes if granted else 0), uncounted_bytes)
        self._full_until = 0.0 if granted else time.monotonic() + FULL_PAUSE_S
        return granted or None

    def _stored_count(self) -> int | None:
        stored = os.pread(self._usage_fd, _COUNTER.size, 0)
        return int.from_bytes(stored, "little") if len(stored) == _COUNTER.size else None

    def _write_count(self, counted_bytes: int, newly_counted_bytes: int) -> None:
        os.pwrite(self._usage_fd, _COUNTER.pack(counted_bytes), 0)
        with self._uncounted_lock:
            self._uncounted_bytes -= newly_counted_bytes

    def _limit_now(self, counted_bytes: int) -> int:
        """The limit, or less where other users need the disk."""
        if not self._keep_free:
            return self.limit_bytes
        return max(0, min(self.limit_bytes, counted_bytes + self._spare_bytes()))

    def _has_spare(self, wanted_bytes: int) -> bool:
        """Whether this much of the disk may be used without exceeding `keep_free`."""
        try:
            return not self._keep_free or self._spare_bytes() >= wanted_bytes
        except OSError:
            return False

    def _spare_bytes(self) -> int:
        disk = os.fstatvfs(self._usage_fd)
        return int((disk.f_bavail - disk.f_blocks * self._keep_free) * disk.f_frsize)

    @contextlib.contextmanager
    def _usage_locked(self) -> Iterator[bool]:
        """Hold the counter's file against other processes; False where one of them has it."""
        locked = self._lock_usage()
        try:
            yield locked
        finally:
            if locked:
                file_lock.unlock(self._usage_fd)

    def _lock_usage(self) -> bool:
        for _ in range(LOCK_TRIES):
            if self._usage_fd < 0:
                return False
            try:
                file_lock.lock(self._usage_fd, limit_s=0)
                return True
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_S)
        return False

    def handle_write_fault(self, error: OSError) -> bool:
        """Make room once after a failed write where that can help, else end storing."""
        if error.errno in _NO_DESCRIPTOR:  # that passes
            return False
        if error.errno in _MEDIUM_FULL and self._evict_some():
            return True
        what = error.strerror or str(error)
        self._stop(f"the cache in {self.directory} keeps nothing more: {what}")
        return False

    def _evict_some(self) -> bool:
        """On a full medium give up a tenth of what is cached; True when anything was freed.

        One thread does so for all that met the full medium; the others then try again.
        """
        with self._evict_lock:
            if time.monotonic() - self._evicted_s >= EVICTED_S:
                try:
                    self._freed = eviction.evict_share(self.directory, 1 - LOW_WATER) > 0
                except OSError:
                    self._freed = False
                self._evicted_s = time.monotonic()
            return self._freed

    def count_corrupt(self) -> None:
        """Count a block that did not match its entry."""
        self.corrupt_blocks += 1

    def used_bytes(self) -> int:
        """Allocated bytes of all objects, by looking at each."""
        try:
            return eviction.used_bytes(self.directory)
        except OSError as error:
            raise from_os_error(error, f"look at the cache in {self.directory}") from error

    def _stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason
        self._report_stop(reason)

    def _report_stop(self, reason: str) -> None:
        on_stop, self._on_stop = self._on_stop, _ignore
        on_stop(reason)

    def close(self) -> None:
        """Close the counter; open objects live on without storing. Twice is safe."""
        self.stopped = self.stopped or "the cache was closed"
        with self._lock:
            if self._uncounted_bytes and self._usage_fd >= 0:
                with contextlib.suppress(OSError), self._usage_locked() as locked:
                    stored_bytes = self._stored_count() if locked else None
                    if stored_bytes is not None:
                        uncounted_bytes = self._uncounted_bytes
                        self._write_count(stored_bytes + uncounted_bytes, uncounted_bytes)
            fd, self._usage_fd = self._usage_fd, -1
        if fd >= 0:
            os.close(fd)


def check_private(directory: str) -> None:
    """Refuse a directory that other users may write to: entries do not prove a block's origin."""
    status = os.stat(directory)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise AccessDeniedError(
            f"the cache {directory} belongs to another user or is writable for all users, so that "
            "bytes could be planted in it; take a directory of your own, or chmod o-w"
        )


def _open_pinned(folder: str, identity: Identity) -> tuple[int, int, bool] | None:
    """Descriptors of `present` and `data`, pinned, and whether it is frozen.

    None when the object cannot be used as it is. Raises FileNotFoundError where there is none,
    and OSError(EMFILE) where no descriptors can be spared.
    """
    present_fd = os.open(f"{folder}/present", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    data_fd = -1
    try:
        file_lock.lock(present_fd, shared=True, limit_s=0)
        # Evicted between open and lock: the name leads elsewhere, or nowhere.
        if (
            file_lock.is_named(present_fd, f"{folder}/present")
            and present_index.read_identity(present_fd) == identity
            and not eviction.discard_spoiled(folder, present_fd, identity)
        ):
            frozen = present_index.is_frozen(present_fd)
            mode = os.O_RDONLY if frozen else os.O_RDWR
            data_fd = os.open(f"{folder}/data", mode | os.O_CLOEXEC | os.O_NOFOLLOW)
            check_spare(max(present_fd, data_fd))
            os.utime(folder)
            files, present_fd, data_fd = (present_fd, data_fd, frozen), -1, -1
            return files
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        for fd in (present_fd, data_fd):
            if fd >= 0:
                os.close(fd)
    return None


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // 4096) * 4096
