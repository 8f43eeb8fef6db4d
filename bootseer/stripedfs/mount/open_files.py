"""Open files of a mounted tree: replies at once from memory, or later from fetch threads."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import xxhash

from bootseer.blocks.fetch.readahead import ReadAhead
from bootseer.blocks.settings import Priority
from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    DeadlineError,
    NoSpaceError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.fuse.operations import Data, FileSystemError, Handle, Inode, Reply
from bootseer.fuse.serve.pending_replies import PendingRead
from bootseer.reporting import Reporter
from bootseer.stripedfs.read.sources import FileSource, as_damage
from bootseer.stripedfs.shared_fetcher import share_of
from bootseer.system.lru import put_youngest

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from bootseer.blocks.cache.direct_reads import DirectReads
    from bootseer.blocks.fetch.fetcher import Fetcher, HeldBytes

NOTHING = Data((b"",))
COUNTER_BITS = 24
HELPERS = 4
ONE_READ_BYTES = 128 << 10
MOST_KEPT_SOURCES = 256
"""Sources of closed files kept for the next opening; one costs 16 bytes a chunk."""

_ERRNOS = (
    (NotFoundError, errno.ENOENT),
    (AccessDeniedError, errno.EACCES),
    (NoSpaceError, errno.ENOSPC),
    (UsageError, errno.EINVAL),
)


class Complaints:
    """Reports each fault to `say` and as an event; one of the same text only once."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._faults = Reporter("checkpoint.fault", say)

    def number(self, error: BaseException, where: str, *, reading: bool = False) -> int:
        """The errno for an error, which is reported unless it is an ordinary refusal."""
        if isinstance(error, FileSystemError):
            return error.errno or errno.EIO
        number = next((n for kind, n in _ERRNOS if isinstance(error, kind)), errno.EIO)
        if reading:
            number = errno.EIO  # the file was found and opened before
        text = str(error) if isinstance(error, BootseerError) else f"internal fault: {error!r}"
        if number == errno.EIO:
            self._faults.report(type(error).__name__, f"{where}: {text}", same=text)
        return number


class Answered:
    """A block whose errors become the reply to the kernel."""

    __slots__ = ("_complaints", "_what")

    def __init__(self, complaints: Complaints, what: str) -> None:
        self._complaints, self._what = complaints, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BootseerError):
            raise FileSystemError(self._complaints.number(error, self._what)) from error


class OpenFile:
    """One opening of a file: its source, and how it was read so far."""

    __slots__ = (
        "_ahead",
        "_direct_reads",
        "_files",
        "_is_stable",
        "_where",
        "after",
        "place",
        "source",
    )

    def __init__(
        self,
        files: OpenFiles,
        source: FileSource,
        where: str,
        place: object,
        direct_reads: DirectReads | None = None,
    ) -> None:
        self._files = files
        self.place = place
        self.source = source
        self.after: OpenFile | None = None
        """What replaced it when its bytes moved, or when its pages were given to other bytes."""
        self._where = where
        self._direct_reads = direct_reads
        self._is_stable = not source.volatile
        share = share_of(files.fetcher)
        self._ahead = ReadAhead(source.size_bytes, share, block_bytes=source.block_bytes)

    @classmethod
    def open(cls, files: OpenFiles, source: FileSource, where: str, place: object) -> OpenFile:
        """Open a source to be read. May wait for the node cache."""
        # A file of one request is seldom read twice: not worth two descriptors.
        is_long = source.size_bytes > ONE_READ_BYTES
        direct_reads = files.fetcher.direct_reads(source) if is_long else None
        return cls(files, source, where, place, direct_reads)

    @property
    def identity(self) -> str:
        """Identifies its bytes."""
        return self.source.identity

    def make_outdated(self) -> OpenFile:
        """Make its replacement for when its pages hold other bytes."""
        return _Outdated(self._files, self.source, self._where, self.place)

    def make_moved(self, source: FileSource, where: str) -> OpenFile:
        """Make its replacement for when its bytes lie elsewhere."""
        return OpenFile.open(self._files, source, where, self.place)

    def replaced_by(self, after: OpenFile) -> OpenFile:
        """Close this one; returns `after`, which repeats its reads that fail from now on."""
        self.close()
        self.after = after
        return after

    def close(self) -> None:
        """End its reads and its read-ahead."""
        self._direct_reads = None
        self._ahead.close()

    def read(self, offset: int, size: int, later: Callable[[], Reply]) -> Data | memoryview | None:
        """See `Operations.read`."""
        source, direct_reads = self.source, self._direct_reads
        if offset + size > source.size_bytes:
            size = source.size_bytes - offset
            if size <= 0:
                return NOTHING
        # Bytes verified in the node cache are read from there, as by nearly every small read.
        if direct_reads is None or not direct_reads.marks.whole:
            for begin, length in self._ahead.note(offset, size):
                self._files.fetcher.prefetch(source, begin, length, Priority.HOT)
        if direct_reads is not None and (self._is_stable or not source.doubtful(offset, size)):
            view = direct_reads.read(offset, size)
            if view is not None:
                return view
        return self._fetch(offset, size, later)

    def read_for(self, reply: Reply, offset: int, size: int) -> None:
        """Read, in a thread that may wait for the store, and reply. Raises as `read`."""
        data = self.read(offset, size, lambda: reply)
        if isinstance(data, memoryview):  # this thread's own, until its next read
            data = Data((data,))
        if data is not None:
            reply.data(data)

    def _fetch(self, offset: int, size: int, later: Callable[[], Reply]) -> Data | None:
        """Read from the fetcher's memory, now or later."""
        read = _FileRead(self._files, self, offset, size, self._where)
        try:
            data = read.collect()
            if data is not None and (self._is_stable or not self.source.doubtful(offset, size)):
                return data
        except BootseerError as error:
            if self.after is None and not self._files.renames():
                raise
            read.fail(later(), error)
            return None
        if data is None:
            read.reply_by(later())
        else:
            read.send(later(), data)
        return None


class _Outdated(OpenFile):
    """An opening whose pages in the page cache hold other bytes by now."""

    __slots__ = ()

    def make_moved(self, source: FileSource, where: str) -> OpenFile:
        return _Outdated(self._files, self.source, where, self.place)

    def read(self, offset: int, size: int, later: Callable[[], Reply]) -> Data | memoryview | None:
        raise FileSystemError(errno.ESTALE)


class _FileRead(PendingRead):
    """A read whose bytes are not in memory yet, or may have changed at the store."""

    __slots__ = (
        *("_arrived", "_files", "_offset", "_opened", "_renames_met"),
        *("_size", "_source", "_where"),
    )

    def __init__(
        self, files: OpenFiles, opened: OpenFile, offset: int, size: int, where: str
    ) -> None:
        super().__init__()
        self._files, self._opened, self._where = files, opened, where
        self._source = opened.source
        self._offset, self._size = offset, size
        self._arrived: HeldBytes | Exception | None = None
        self._renames_met: frozenset[object] | None = None
        """The renames that were under way when it failed."""

    def deliver(self, arrived: HeldBytes | Exception) -> None:
        """The bytes are there or have failed; called from a fetch thread."""
        self._arrived = arrived
        self.resume()

    def collect(self) -> Data | None:
        arrived, self._arrived = self._arrived, None
        if arrived is None:  # the first time
            fetcher = self._files.fetcher
            arrived = fetcher.hold(self._source, self._offset, self._size, self.deliver)
        if isinstance(arrived, Exception):
            raise arrived
        return None if arrived is None else Data(arrived.views, arrived.release)

    def send(self, reply: Reply, data: Data) -> None:
        if self._source.doubtful(self._offset, self._size):
            self._files.help(functools.partial(self._confirm, reply, data))
        else:
            reply.data(data)

    def _confirm(self, reply: Reply, data: Data) -> None:
        """Ask the store whether the bytes are still its own, and reply."""
        try:
            if not reply.interrupted:  # else the bytes are only released
                self._source.confirm()
        except Exception as error:  # whatever it is, the reader must not wait for ever
            if data.release is not None:
                data.release()
            self.fail(reply, error)
            return
        reply.data(data)

    def fail(self, reply: Reply, error: Exception) -> None:
        """Repeat the read by the file's replacement, if it was moved; else reply with the error.

        A rename that is under way may be why the read failed, so its end is waited for.
        """
        if self._renames_met is None:
            # A rename causes no outage, which was waited for long enough.
            is_outage = isinstance(error, (DeadlineError, StoreUnavailableError))
            self._renames_met = frozenset() if is_outage else self._files.renames()
        after = self._opened.after
        if after is None and self._files.await_end(
            self._renames_met, lambda: self.fail(reply, error)
        ):
            return
        after = self._opened.after  # it may have come as the last of them ended
        if after is None:
            self._refuse(reply, error, self._opened)
            return
        while after.after is not None:
            after = after.after
        self._files.help(functools.partial(self._repeat, reply, after))

    def _repeat(self, reply: Reply, after: OpenFile) -> None:
        """In a helper thread."""
        if reply.interrupted:
            return
        try:
            after.read_for(reply, self._offset, self._size)
        except Exception as error:  # whatever it is, the reader must not wait for ever
            self._refuse(reply, error, after)

    def _refuse(self, reply: Reply, error: Exception, opened: OpenFile) -> None:
        if isinstance(error, BootseerError):
            error = as_damage(error, opened.source)
        reply.error(self._files.complaints.number(error, self._where, reading=True))


class OpenFiles:
    """The files that are open, by handle.

    A handle identifies the bytes it was opened for, so that another process can take it over: it
    serves the same bytes only, and gives ESTALE when the file was replaced meanwhile.
    """

    def __init__(self, fetcher: Fetcher, complaints: Complaints) -> None:
        self.fetcher = fetcher
        self.complaints = complaints
        self._lock = threading.Lock()
        self.by_handle: dict[Handle, OpenFile] = {}
        self._openings: Counter[object] = Counter()
        """The number of openings of each place."""
        self._sources: dict[Inode, tuple[object, FileSource]] = {}
        self._counter = itertools.count(int.from_bytes(os.urandom(3)))
        self._pool: ThreadPoolExecutor | None = None
        self._renames: frozenset[object] = frozenset()
        self._waiting: list[tuple[frozenset[object], Callable[[], None]]] = []
        """Renames, and what is called once they have ended."""

    def source(self, inode: Inode, stamp: object, opening: Callable[[], FileSource]) -> FileSource:
        """The source of a file, opened unless one of the same `stamp` is kept. May wait."""
        with self._lock:
            kept = self._sources.get(inode)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        source = opening()
        with self._lock:
            put_youngest(self._sources, inode, (stamp, source), MOST_KEPT_SOURCES)
        return source

    def number(self, source: FileSource) -> Handle:
        """A new handle for a file; reads by it need `revive` first."""
        number = next(self._counter) & (1 << COUNTER_BITS) - 1
        return Handle(_tag(source) << COUNTER_BITS | number)

    def add(self, source: FileSource, where: str, place: object) -> Handle:
        """Open a file; returns its handle. Openings of the same `place` share their pages."""
        handle = self.number(source)
        opened = OpenFile.open(self, source, where, place)
        with self._lock:
            self.by_handle[handle] = opened
            self._openings[place] += 1
        return handle

    def get(self, handle: Handle) -> OpenFile | None:
        """The open file; None where another process opened it."""
        return self.by_handle.get(handle)

    def outdate(self, place: object, *, but: str = "") -> None:
        """Give the pages of `place` to other bytes: readers of the earlier ones get ESTALE."""
        with self._lock:
            for handle, opened in list(self.by_handle.items()):
                if opened.place == place and not (but and opened.identity == but):
                    self.by_handle[handle] = opened.replaced_by(opened.make_outdated())

    def places(self) -> set[object]:
        """The places of all that is open."""
        with self._lock:
            return set(self._openings)

    def is_open(self, place: object) -> bool:
        """Whether something is open at a place."""
        return place in self._openings

    def move(self, place: object, source: FileSource, where: str) -> None:
        """Openings of the file at `place` read the same bytes from `source` from now on.

        An opening of a plain file that was replaced unnoticed stays with the earlier bytes.
        """
        with self._lock:
            for handle, opened in list(self.by_handle.items()):
                is_other = source.volatile and opened.identity != source.identity
                if opened.place == place and not is_other:
                    self.by_handle[handle] = opened.replaced_by(opened.make_moved(source, where))

    @contextlib.contextmanager
    def moves(self) -> Iterator[None]:
        """Hold it from before the store is asked for a rename until `move` has been called."""
        this = object()
        with self._lock:
            self._renames |= {this}
        try:
            yield
        finally:
            with self._lock:
                left = self._renames = self._renames - {this}
                due = [then for renames, then in self._waiting if not renames & left]
                self._waiting = [each for each in self._waiting if each[0] & left]
            for then in due:
                self.help(then)

    def renames(self) -> frozenset[object]:
        """The renames that are under way."""
        return self._renames

    def await_end(self, renames: frozenset[object], then: Callable[[], None]) -> bool:
        """Call `then` in a helper thread once these have ended; False where all have."""
        with self._lock:
            if not renames & self._renames:
                return False
            self._waiting.append((renames, then))
            return True

    def revive(self, handle: Handle, source: FileSource, where: str, place: object) -> OpenFile:
        """Take over a handle of the process before this one. Raises FileSystemError(ESTALE)."""
        if handle >> COUNTER_BITS != _tag(source):
            raise FileSystemError(errno.ESTALE)
        return self.adopt(handle, source, where, place)

    def adopt(
        self, handle: Handle, source: FileSource, where: str, place: object = None
    ) -> OpenFile:
        """Read a source by a handle that was made elsewhere."""
        opened = OpenFile.open(self, source, where, place)
        with self._lock:
            kept = self.by_handle.setdefault(handle, opened)
            if kept is opened:
                self._openings[place] += 1
            return kept

    def drop(self, handle: Handle) -> FileSource | None:
        """Drop a handle that the kernel closed; returns what was read by it."""
        with self._lock:
            opened = self.by_handle.pop(handle, None)
            if opened is None:
                return None
            self._openings[opened.place] -= 1
            if not self._openings[opened.place]:
                del self._openings[opened.place]
        opened.close()
        return opened.source

    def help(self, work: Callable[[], None]) -> None:
        """Run `work` in a helper thread, which may wait for the store."""
        with self._lock:
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor  # 8 ms, for which mounts wait

                self._pool = ThreadPoolExecutor(HELPERS, "stripe-helper")
            pool = self._pool
        pool.submit(work)

    def close(self) -> None:
        """End the helper threads, and report what was fetched."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self.fetcher.stats.emit()


def _tag(source: FileSource) -> int:
    """Identifies a source's bytes within a handle."""
    return xxhash.xxh3_64_intdigest(source.key.encode(errors="surrogateescape")) >> COUNTER_BITS
