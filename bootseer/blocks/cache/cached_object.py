"""One object of the node cache, opened by one process: `data` (sparse) and `present`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from bootseer.blocks.cache import present_index
from bootseer.blocks.cache.descriptors import check_spare
from bootseer.blocks.cache.direct_reads import DirectReads, Marks, marks_of
from bootseer.blocks.cache.present_index import ABSENT, ENTRY_BYTES, Identity
from bootseer.context_managers import Closing
from bootseer.system.libc import last_error, libc
from bootseer.system.regular_files import read_fully, write_fully

T = TypeVar("T")
_COUNTED = 1024  # blocks whose entries are read at a time


class Room(Protocol):
    """What an object asks of its cache before and after it writes."""

    @property
    def stopped(self) -> str:
        """Why nothing is stored any more; "" while storing goes on."""

    def reserve(self, wanted_bytes: int) -> bool:
        """Whether so many bytes may be written now; quick, never an error."""

    def handle_write_fault(self, error: OSError) -> bool:
        """Handle a failed write; True when there is room now and another try makes sense."""

    def count_corrupt(self) -> None:
        """A block did not match its entry and was dropped."""


class CachedObject(Closing):
    """Blocks of one object; pinned (never evicted) until closed. Every method is thread-safe.

    Into a `frozen` one nothing is written; wrong blocks are dropped all the same. No method raises
    for a fault of the cache: a block that cannot be read or stored is simply not there. `close`
    while other threads read is safe; they finish, or find nothing.
    """

    def __init__(
        self,
        identity: Identity | None,
        room: Room,
        present_fd: int = -1,
        data_fd: int = -1,
        *,
        frozen: bool = False,
    ) -> None:
        self._identity = identity
        self._room, self._frozen = room, frozen
        self._present_fd, self._data_fd = present_fd, data_fd
        self._lock = threading.Lock()
        self._users = 0
        self._open = identity is not None
        self._marks: Marks | None = None
        self._storing: set[int] = set()
        self._direct_reads: weakref.ref[DirectReads] | None = None

    @property
    def usable(self) -> bool:
        """False for an object that is not cached at all, or is closed."""
        return self._open

    @property
    def storing(self) -> bool:
        """Whether `store` may still keep something."""
        return self._open and not self._frozen and not self._room.stopped

    def present(self, index: int) -> bool:
        """Whether the block is there, so that `read` will most likely give it."""
        return self._while_open(
            lambda: present_index.read_entry(self._present_fd, index) != ABSENT, False
        )

    def missing(self, first: int, count: int) -> list[int]:
        """Those of `count` blocks from `first` on that are not there; read in one piece."""
        entries = self._while_open(
            lambda: present_index.read_entries(self._present_fd, first, count), None
        )
        if entries is None:
            return list(range(first, first + count))
        starts = range(0, count * ENTRY_BYTES, ENTRY_BYTES)
        return [first + i for i, start in enumerate(starts) if entries.startswith(ABSENT, start)]

    def count_missing(self, count: int) -> int:
        """How many of all `count` blocks of the object are not there."""
        steps = range(0, count, _COUNTED)
        return sum(len(self.missing(at, min(_COUNTED, count - at))) for at in steps)

    def absent(self, indices: Iterable[int]) -> set[int]:
        """Those of any blocks that are not there; calls `missing` once per run of neighbours."""
        ask = sorted(indices)
        absent: set[int] = set()
        start = 0
        for place in range(1, len(ask) + 1):
            if place == len(ask) or ask[place] != ask[place - 1] + 1:
                absent.update(self.missing(ask[start], place - start))
                start = place
        return absent

    def read(self, index: int, raw: memoryview) -> bool:
        """Fill `raw` with the whole block; False when it is absent.

        The bytes are verified each time. One that does not match its entry is dropped and
        reported as absent; `raw` may then have been written to.
        """
        return self._while_open(lambda: self._read(index, raw), False)

    def _read(self, index: int, raw: memoryview) -> bool:
        identity = self._identity
        entry = present_index.read_entry(self._present_fd, index)
        if entry == ABSENT or identity is None:
            return False
        whole = read_fully(self._data_fd, raw, index * identity.block_bytes) == len(raw)
        return self._check(index, raw, entry, whole)

    def _check(self, index: int, raw: memoryview, entry: bytes, whole: bool) -> bool:
        marks = self._marks
        if whole and present_index.check_of(index, raw) == entry:
            # A process that holds the claim may be writing, and take back what it wrote.
            if marks is not None and not present_index.claimed_elsewhere(self._present_fd, index):
                marks.set(index)
            return True
        if marks is not None:
            marks.drop(index)
        # Another process may have dropped it and stored it again meanwhile; then it is lost once
        # more, and fetched once more. Never wrong, and rare.
        present_index.write_entry(self._present_fd, index, ABSENT)
        self._room.count_corrupt()
        return False

    def direct_reads(self) -> DirectReads | None:
        """Reads past the fetcher of what was verified; None where nothing is cached.

        All that this process reads and stores from now on counts as verified, for the
        `DirectReads` of any opening of the same object.
        """
        return self._while_open(self._make_direct_reads, None)

    def _make_direct_reads(self) -> DirectReads | None:
        identity = self._identity
        if identity is None:
            return None
        with self._lock:
            if self._marks is None:
                self._marks = marks_of(self._data_fd, identity.blocks)
            self._marks.expire()
            made = self._direct_reads() if self._direct_reads is not None else None
            if made is None:
                present_fd, data_fd = self._duplicate_descriptors()
                made = DirectReads(present_fd, data_fd, identity.block_bytes, self._marks)
                self._direct_reads = weakref.ref(made)
        return made

    def _duplicate_descriptors(self) -> tuple[int, int]:
        """Further descriptors of both files. Raises OSError, also where none can be spared."""
        fds: list[int] = []
        try:
            for fd in (self._present_fd, self._data_fd):
                fds.append(os.dup(fd))
                check_spare(fds[-1])
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds[0], fds[1]

    def store(self, index: int, raw: memoryview) -> bool:
        """Keep a verified block, if there is room; returns whether it was new and is kept.

        `raw` must not change meanwhile and is free again on return.
        """
        return self.storing and self._while_open(lambda: self._store(index, raw), False)

    def _store(self, index: int, raw: memoryview) -> bool:
        with self._lock:
            if index in self._storing:
                return False
            self._storing.add(index)
        try:
            # A block that another process claimed is stored all the same if that took too long.
            claimed = present_index.claim_entry(self._present_fd, index)
            try:
                return self._put(index, raw, claimed)
            finally:
                if claimed:
                    present_index.unclaim_entry(self._present_fd, index)
        finally:
            with self._lock:
                self._storing.discard(index)

    def _put(self, index: int, raw: memoryview, claimed: bool) -> bool:
        if self._identity is None:
            return False
        try:
            if present_index.read_entry(self._present_fd, index) != ABSENT:
                return False
            if present_index.is_frozen(self._present_fd):  # since it was opened
                return False
        except OSError as error:  # the medium was removed: reported as a failed write is
            self._room.handle_write_fault(error)
            return False
        if not self._room.reserve(len(raw)):
            return False
        entry = present_index.check_of(index, raw)
        offset = index * self._identity.block_bytes
        for again in (False, True):
            try:
                write_fully(self._data_fd, raw, offset)
                present_index.write_entry(self._present_fd, index, entry)
                if claimed and self._marks is not None:
                    self._marks.set(index)
                return True
            except OSError as error:
                # Without a claim of ours, another process may have stored and verified it.
                if claimed and present_index.read_entry(self._present_fd, index) == ABSENT:
                    _punch_quietly(self._data_fd, offset, len(raw))
                if again or not self._room.handle_write_fault(error):
                    return False
        return False

    def claim(self, index: int) -> bool:
        """Take the right to fetch a block; False while another process holds it.

        A claim ends with `unclaim`, with `close`, or with the process. Threads of one process
        share it. It is advice: a reader that waited long enough for another's claim fetches the
        block all the same.
        Where nothing can be stored there is nothing to wait for, and every claim is granted.
        """
        return not self.storing or self._while_open(
            lambda: present_index.claim_entry(self._present_fd, index), True
        )

    def claimed_elsewhere(self, index: int) -> bool:
        """Whether another process is fetching the block now."""
        return self.storing and self._while_open(
            lambda: present_index.claimed_elsewhere(self._present_fd, index), False
        )

    def unclaim(self, index: int) -> None:
        """Give a claim up; after `store`, or when fetching failed. Not holding one is no error."""
        self._while_open(lambda: present_index.unclaim_entry(self._present_fd, index), None)

    def close(self) -> None:
        """Unpin and close; twice is safe."""
        with self._lock:
            was_open, self._open = self._open, False
            last = was_open and self._users == 0
        if last:
            self._close_files()

    def _while_open(self, act: Callable[[], T], otherwise: T) -> T:
        """Run `act` while the descriptors are certainly open; where it fails, `otherwise`."""
        with self._lock:
            if not self._open:
                return otherwise
            self._users += 1
        try:
            return act()
        except OSError:
            return otherwise  # a failing disk must cost speed only
        finally:
            with self._lock:
                self._users -= 1
                last = self._users == 0 and not self._open
            if last:
                self._close_files()

    def _close_files(self) -> None:
        self._marks = self._direct_reads = None  # of no meaning once the object is not pinned
        for fd in (self._data_fd, self._present_fd):
            os.close(fd)
        self._present_fd = self._data_fd = -1


def punch(fd: int, offset: int, length: int) -> None:
    """Give the space of a range back; OSError where the file system cannot."""
    import ctypes

    keep_size_and_punch = 0x01 | 0x02
    arguments = (ctypes.c_int(fd), ctypes.c_int(keep_size_and_punch))
    arguments_64 = (ctypes.c_int64(offset), ctypes.c_int64(length))
    if libc().fallocate(*arguments, *arguments_64) != 0:
        raise last_error()


def _punch_quietly(fd: int, offset: int, length: int) -> None:
    """Part of a block may have been written: it counts nowhere, so it should take no space."""
    try:
        punch(fd, offset, length)
    except OSError:
        pass  # the space is free again when the object is evicted
