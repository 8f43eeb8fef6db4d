"""Files of a mounted tree being read: answers at once from memory, or later from fetch threads."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from bootseer.blocks.fetch.plan.readahead import ReadAhead
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import is_volatile
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
from bootseer.fuse.serve.faults import Faults
from bootseer.stripedfs.read.sources import FileSource, as_damage
from bootseer.stripedfs.shared_fetcher import share_of
from bootseer.system.lru import put_youngest

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher, Held

NOTHING = Data((b"",))
COUNTER_BITS = 24
HELPERS = 4
ONE_READ_BYTES = 128 << 10
MOST_KEPT_SOURCES = 256
"""Sources of closed files kept for whoever opens them next; one costs 16 bytes a chunk."""

_ERRNOS = (
    (NotFoundError, errno.ENOENT),
    (AccessDeniedError, errno.EACCES),
    (NoSpaceError, errno.ENOSPC),
    (UsageError, errno.EINVAL),
)


class Complaints:
    """Tells `say` and the events of each fault, but the same words only once."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._faults = Faults(say, "checkpoint.fault")

    def number(self, error: BaseException, where: str, *, reading: bool = False) -> int:
        """The errno that an error is answered with; said unless it is an ordinary refusal."""
        if isinstance(error, FileSystemError):
            return error.errno or errno.EIO
        number = next((n for kind, n in _ERRNOS if isinstance(error, kind)), errno.EIO)
        if reading:
            number = errno.EIO  # whoever has the file open has been let in and found it
        text = str(error) if isinstance(error, BootseerError) else f"internal fault: {error!r}"
        if number == errno.EIO:
            self._faults.say(type(error).__name__, f"{where}: {text}", same=text)
        return number


class Answered:
    """A block whose errors become the answer to the kernel."""

    __slots__ = ("_complaints", "_what")

    def __init__(self, complaints: Complaints, what: str) -> None:
        self._complaints, self._what = complaints, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BootseerError):
            raise FileSystemError(self._complaints.number(error, self._what)) from error


class OpenFile:
    """One opening of a file: its source, and what was read of it so far."""

    __slots__ = ("_ahead", "_files", "_straight", "_sure", "_where", "after", "place", "source")

    def __init__(
        self, files: OpenFiles, source: FileSource, where: str, place: object = None
    ) -> None:
        self._files = files
        self.place = place
        self.source = source
        self.after: OpenFile | None = None
        """What took its place when its bytes moved, or got other pages."""
        self._where = where
        # What one request brings is hardly asked for twice: not worth two descriptors.
        long = source.size_bytes > ONE_READ_BYTES
        self._straight = files.fetcher.straight(source) if long else None
        self._sure = not is_volatile(source)
        share = share_of(files.fetcher)
        self._ahead = ReadAhead(source.size_bytes, share, block_bytes=source.block_bytes)

    @property
    def identity(self) -> str:
        """Names its bytes."""
        return self.source.identity

    def outdated(self) -> OpenFile:
        """What takes its place when its pages are of other bytes."""
        return _Outdated(self._files, self.source, self._where, self.place)

    def moved(self, source: FileSource, where: str) -> OpenFile:
        """What takes its place when its bytes lie elsewhere."""
        return OpenFile(self._files, source, where, self.place)

    def replaced_by(self, after: OpenFile) -> OpenFile:
        """Close this one; returns `after`, by which reads that fail from now on are repeated."""
        self.close()
        self.after = after
        return after

    def close(self) -> None:
        """It is read no more."""
        self._straight = None
        self._ahead.close()

    def read(self, offset: int, size: int, later: Callable[[], Reply]) -> Data | memoryview | None:
        """See `Operations.read`."""
        source, straight = self.source, self._straight
        if offset + size > source.size_bytes:
            size = source.size_bytes - offset
            if size <= 0:
                return NOTHING
        # What is verified in the node cache comes from there; nearly every small read does.
        if straight is None or not straight.marks.whole:
            for begin, length in self._ahead.note(offset, size):
                self._files.fetcher.prefetch(source, begin, length, Priority.HOT)
        if straight is not None and (self._sure or not source.doubtful(offset, size)):
            view = straight.read(offset, size)
            if view is not None:
                return view
        return self._fetched(offset, size, later)

    def _fetched(self, offset: int, size: int, later: Callable[[], Reply]) -> Data | None:
        """Bytes from the fetcher's memory, now or later."""
        source, files = self.source, self._files
        waiting = _Waiting(files, self, offset, size, self._where)
        try:
            held = files.fetcher.held(source, offset, size, waiting.ready)
            if held is not None and not source.doubtful(offset, size):
                return Data(held.views, held.release)
        except BootseerError as error:
            if self.after is None and not files.renames():
                raise
            waiting.fail(later(), error)
            return None
        waiting.park(later(), held)
        return None


class _Outdated(OpenFile):
    """One whose pages in the page cache are by now of other bytes."""

    __slots__ = ()

    def moved(self, source: FileSource, where: str) -> OpenFile:
        return _Outdated(self._files, self.source, where, self.place)

    def read(self, offset: int, size: int, later: Callable[[], Reply]) -> Data | memoryview | None:
        raise FileSystemError(errno.ESTALE)


class _Waiting:
    """A read whose bytes are not there yet, or are in doubt."""

    __slots__ = (
        *("_files", "_lock", "_met", "_offset", "_opened", "_reply", "_size", "_source"),
        *("_there", "_where"),
    )

    def __init__(
        self, files: OpenFiles, opened: OpenFile, offset: int, size: int, where: str
    ) -> None:
        self._files, self._opened, self._where = files, opened, where
        self._source = opened.source
        self._offset, self._size = offset, size
        self._lock = threading.Lock()
        self._reply: Reply | None = None
        self._there = False
        self._met: frozenset[object] | None = None
        """The renames that were under way when it failed."""

    def ready(self) -> None:
        """The bytes are there or have failed; called from a fetch thread."""
        with self._lock:
            self._there = True
            reply = self._reply
        if reply is not None:
            self._collect(reply)

    def park(self, reply: Reply, held: Held | None) -> None:
        """Answer later; with `held`, as soon as the doubts about it are settled."""
        if held is not None:
            self._confirm(reply, held)
            return
        with self._lock:
            self._reply = reply
            there = self._there
        if there:
            self._collect(reply)

    def _collect(self, reply: Reply) -> None:
        source = self._source
        try:
            with self._lock:
                self._there = False
            held = self._files.fetcher.held(source, self._offset, self._size, self.ready)
        except Exception as error:  # whatever it is, the reader must not wait for ever
            self.fail(reply, error)
            return
        if held is None:
            return  # evicted before we came: `ready` will be called again
        if reply.interrupted:
            held.release()
        elif source.doubtful(self._offset, self._size):
            self._confirm(reply, held)
        else:
            reply.data(Data(held.views, held.release))

    def _confirm(self, reply: Reply, held: Held) -> None:
        """In a thread that may wait for the store."""

        def settle() -> None:
            try:
                self._source.confirm()
            except Exception as error:  # whatever it is, the reader must not wait for ever
                held.release()
                self.fail(reply, error)
                return
            reply.data(Data(held.views, held.release))

        self._files.help(settle)

    def fail(self, reply: Reply, error: Exception) -> None:
        """Read again by what took the file's place if it is moved meanwhile; else tell the error.

        A rename that is under way may be why the read failed, so its end is waited for.
        """
        if self._met is None:
            # An outage is no rename's doing, and was waited for long enough.
            is_outage = isinstance(error, (DeadlineError, StoreUnavailableError))
            self._met = frozenset() if is_outage else self._files.renames()
        after = self._opened.after
        if after is None and self._files.await_end(self._met, lambda: self.fail(reply, error)):
            return
        after = self._opened.after  # it may have come as the last of them ended
        if after is None:
            self._refuse(reply, error, self._opened)
            return
        while after.after is not None:
            after = after.after
        self._files.help(functools.partial(self._repeat, reply, after))

    def _repeat(self, reply: Reply, after: OpenFile) -> None:
        """In a thread that may wait for the store."""
        if reply.interrupted:
            return
        try:
            data = after.read(self._offset, self._size, lambda: reply)
            if isinstance(data, memoryview):  # this thread's own, until its next read
                data = Data((data,))
        except Exception as error:  # whatever it is, the reader must not wait for ever
            self._refuse(reply, error, after)
            return
        if data is not None:
            reply.data(data)

    def _refuse(self, reply: Reply, error: Exception, opened: OpenFile) -> None:
        if isinstance(error, BootseerError):
            error = as_damage(error, opened.source)
        reply.error(self._files.complaints.number(error, self._where, reading=True))


class OpenFiles:
    """The files that are open, by handle.

    A handle names the bytes it was opened for, so that another process can take it over: it goes
    on only with the same bytes, and gives ESTALE when the file was replaced meanwhile.
    """

    def __init__(self, fetcher: Fetcher, complaints: Complaints) -> None:
        self.fetcher = fetcher
        self.complaints = complaints
        self._lock = threading.Lock()
        self.by_handle: dict[Handle, OpenFile] = {}
        self._sources: dict[Inode, tuple[object, FileSource]] = {}
        self._counter = itertools.count(int.from_bytes(os.urandom(3)))
        self._pool: ThreadPoolExecutor | None = None
        self._renames: frozenset[object] = frozenset()
        self._waiting: list[tuple[frozenset[object], Callable[[], None]]] = []
        """What is called when the renames beside it have ended."""

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
        """A fresh handle for a file; who reads by it alone must `revive` it."""
        number = next(self._counter) & (1 << COUNTER_BITS) - 1
        return Handle(_tag(source) << COUNTER_BITS | number)

    def add(self, source: FileSource, where: str, place: object) -> Handle:
        """A fresh handle for a file; `place` tells which others share its pages."""
        handle = self.number(source)
        opened = OpenFile(self, source, where, place)
        with self._lock:
            self.by_handle[handle] = opened
        return handle

    def get(self, handle: Handle) -> OpenFile | None:
        """The open file, unless another process opened it."""
        return self.by_handle.get(handle)

    def outdate(self, place: object, *, but: str = "") -> None:
        """Other bytes get the pages of `place`: who reads earlier ones has ESTALE from now on."""
        with self._lock:
            for handle, found in list(self.by_handle.items()):
                if found.place == place and not (but and found.identity == but):
                    self.by_handle[handle] = found.replaced_by(found.outdated())

    def places(self) -> set[object]:
        """The places of all that is open."""
        with self._lock:
            return {found.place for found in self.by_handle.values()}

    def move(self, place: object, source: FileSource, where: str) -> None:
        """Whoever has the file at `place` open reads the same bytes from `source` from now on.

        Who has a plain file open that another one replaced, unnoticed so far, stays with that.
        """
        with self._lock:
            for handle, found in list(self.by_handle.items()):
                is_other = is_volatile(source) and found.identity != source.identity
                if found.place == place and not is_other:
                    self.by_handle[handle] = found.replaced_by(found.moved(source, where))

    @contextlib.contextmanager
    def moves(self) -> Iterator[None]:
        """A rename, from before the store does it until `move` was called for what is open."""
        this = object()
        with self._lock:
            self._renames |= {this}
        try:
            yield
        finally:
            with self._lock:
                left = self._renames = self._renames - {this}
                over = [then for met, then in self._waiting if not met & left]
                self._waiting = [each for each in self._waiting if each[0] & left]
            for then in over:
                self.help(then)

    def renames(self) -> frozenset[object]:
        """Those that are under way."""
        return self._renames

    def await_end(self, renames: frozenset[object], then: Callable[[], None]) -> bool:
        """Call `then` in a helping thread when these have ended; False where all have."""
        with self._lock:
            if not renames & self._renames:
                return False
            self._waiting.append((renames, then))
            return True

    def revive(self, handle: Handle, source: FileSource, where: str, place: object) -> OpenFile:
        """Take over a handle of the process before us. Raises FileSystemError(ESTALE)."""
        if handle >> COUNTER_BITS != _tag(source):
            raise FileSystemError(errno.ESTALE)
        return self.adopt(handle, source, where, place)

    def adopt(
        self, handle: Handle, source: FileSource, where: str, place: object = None
    ) -> OpenFile:
        """Read a source by a handle that was made elsewhere."""
        opened = OpenFile(self, source, where, place)
        with self._lock:
            return self.by_handle.setdefault(handle, opened)

    def drop(self, handle: Handle) -> FileSource | None:
        """The kernel closed it; returns what was read by it."""
        with self._lock:
            found = self.by_handle.pop(handle, None)
        if found is None:
            return None
        found.close()
        return found.source

    def help(self, work: Callable[[], None]) -> None:
        """Do something that may wait, in a thread that no reader needs."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(HELPERS, "stripe-helper")
            pool = self._pool
        pool.submit(work)

    def close(self) -> None:
        """End the helping threads, and tell what was fetched."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self.fetcher.stats.emit()


def _tag(source: FileSource) -> int:
    """Names a source's bytes within a handle."""
    return xxhash.xxh3_64_intdigest(source.key.encode(errors="surrogateescape")) >> COUNTER_BITS
