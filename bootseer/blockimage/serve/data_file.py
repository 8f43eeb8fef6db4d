"""The FUSE file system below a mounted block image: one file, `d`, with the image's data.

EROFS reads it past the page cache (direct I/O), so every first touch of a page comes here: it is
answered from hot frames in memory, or else through the fetcher. EROFS opens the file once, when
the image is mounted, and the kernel releases that handle when the last mount of the image has
ended, in whatever namespace: then the server is not needed any more.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage.serve.byte_source import Bytes, Cold, Coming, Hot, Reads, Touches
from bootseer.blocks.settings import Priority
from bootseer.fuse.operations import (
    ROOT,
    Attr,
    Buffer,
    Data,
    Entry,
    FileSystemError,
    Handle,
    Inode,
    Later,
    Opened,
    Operations,
    Reply,
)
from bootseer.fuse.serve.pending_replies import PendingRead

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import HeldBytes

NAME = b"d"
DATA = Inode(2)
PAGE_BYTES = 4096
WARMING = b"bootseer-warm"
"""The name of threads of other processes that warm an image: their reads are no touches."""
MAX_OTHER_THREADS = 1 << 16
_DIRECTORY, _FILE = 0o40700, 0o100400
_NOTHING = memoryview(b"")


def _do_nothing() -> None: ...


class DataFile(Operations):
    """`Operations` of the data file; reads wait for `supply`.

    `on_release` is called, once, when the kernel has released the handle that EROFS holds (see
    `set_mounted`), and `on_error` with the offset of every read that got EIO. `on_unmount` and
    `on_end` are called before and after this process ends the FUSE mount. `is_announced` says
    whether another process has announced that it reads a range ahead.
    """

    def __init__(
        self,
        *,
        on_release: Callable[[], None],
        on_error: Callable[[int, BaseException], None],
        on_unmount: Callable[[], None] = _do_nothing,
        on_end: Callable[[], None] = _do_nothing,
        is_announced: Callable[[int, int], bool] = lambda _offset, _length: False,
    ) -> None:
        self._on_release, self._on_error = on_release, on_error
        self._on_unmount, self._on_end = on_unmount, on_end
        self._is_announced = is_announced
        self._size_bytes = 0
        self._source: Bytes | None = None
        self._on_miss: Callable[[int], None] | None = None
        self._early: list[_DataRead] = []
        self._lock = threading.Lock()
        self._next_handle = 1
        self._open: set[int] = set()
        self._erofs_handle = 0
        self._behind_loop = False
        self._released = False
        self._reads = Reads()
        self._cold_waits = 0
        self.cold_began = threading.Event()
        """Set when a program begins to wait for blocks; whoever looks at it clears it."""
        self._touches: Touches | None = None
        self._warming_threads: frozenset[int] = frozenset()
        self._other_threads: set[int] = set()
        """Threads of other processes that are known not to warm."""

    # --- for the server --------------------------------------------------------------------

    def set_size(self, data_bytes: int) -> None:
        """Set the size of the data, before EROFS mounts it. Whole pages, as a device needs."""
        self._size_bytes = -(-data_bytes // PAGE_BYTES) * PAGE_BYTES

    def supply(self, source: Bytes, on_miss: Callable[[int], None] | None = None) -> None:
        """Answer reads from `source` from now on, those that wait included.

        `on_miss` is called with the offset of each read of a program that waits for blocks.
        """
        with self._lock:
            self._source, self._on_miss = source, on_miss
            early, self._early = self._early, []
        for read in early:
            read.resume()

    def give_up(self, waited_s: float, error: Exception) -> None:
        """Fail the reads that have waited so long for `supply`; the others go on waiting."""
        before_ns = time.monotonic_ns() - int(waited_s * 1e9)
        with self._lock:
            late = [read for read in self._early if read.began_ns <= before_ns and read.reply]
            self._early = [read for read in self._early if read not in late]
        for read in late:
            if read.reply is not None:
                read.fail(read.reply, error)

    @property
    def last_handle(self) -> int:
        """The handle of the last opening of `d`; 0 before the first one."""
        return self._next_handle - 1

    def set_mounted(self, handle: int, *, behind_loop: bool) -> None:
        """EROFS holds this handle, `behind_loop` through a loop device: its release is the end.

        The thread of a read is the loop device's there, so that reads of what is hot, or
        announced, count as warming.
        """
        with self._lock:
            self._erofs_handle, self._behind_loop = handle, behind_loop
            is_over = handle < self._next_handle and handle not in self._open
        if is_over:  # unmounted again already
            self._end()

    def take_over(self, handle: int, *, behind_loop: bool) -> None:
        """As `set_mounted`, after a server that died: the handle was opened there."""
        with self._lock:
            self._open.add(handle)
        self._next_handle = handle + 1
        self.set_mounted(handle, behind_loop=behind_loop)

    def record(self, touches: Touches) -> None:
        """Report every read of a program to `touches` from now on."""
        self._touches = touches

    def set_warming_threads(self, threads: frozenset[int]) -> None:
        """Reads of these threads are no touches."""
        self._warming_threads = threads

    @property
    def reads(self) -> Reads:
        """The counters at this moment."""
        with self._lock:
            return dataclasses.replace(self._reads)

    @property
    def cold_waits(self) -> int:
        """How many programs wait for blocks that no frame brings."""
        return self._cold_waits

    def _end(self) -> None:
        with self._lock:
            released, self._released = self._released, True
        if not released:
            self._on_release()

    # --- Operations ------------------------------------------------------------------------

    def _attr(self, inode: Inode) -> Attr:
        if inode == DATA:
            return Attr(DATA, _FILE, self._size_bytes)
        if inode == ROOT:
            return Attr(ROOT, _DIRECTORY, 0, nlink=2)
        raise FileSystemError(errno.ESTALE)

    def lookup(self, parent: Inode, name: bytes) -> Attr:
        if parent == ROOT and name == NAME:
            return self._attr(DATA)
        raise FileSystemError(errno.ENOENT)

    def getattr(self, inode: Inode) -> Attr:
        return self._attr(inode)

    def readdir(self, inode: Inode) -> Sequence[Entry]:
        if inode != ROOT:
            raise FileSystemError(errno.ENOTDIR)
        return [Entry(NAME, self._attr(DATA))]

    def open(self, inode: Inode, flags: int) -> Opened:
        if inode != DATA:
            raise FileSystemError(errno.EISDIR)
        with self._lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._open.add(handle)
        return Opened(Handle(handle), direct=True)

    def release(self, inode: Inode, handle: Handle) -> None:
        with self._lock:
            self._open.discard(handle)
            is_over = handle == self._erofs_handle
        if is_over:
            self._end()

    def statfs(self) -> tuple[int, int, int, int]:
        return self._size_bytes, 0, 1, 0

    def before_unmount(self) -> None:
        self._on_unmount()

    def destroy(self) -> None:
        source = self._source
        if source is not None:
            source.frames.close()
        self._on_end()

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | memoryview | None:
        if inode != DATA:
            raise FileSystemError(errno.EISDIR)
        length = min(size, self._size_bytes - offset)
        if length <= 0:
            return _NOTHING
        warms = self._count(offset, length, later)
        source = self._source
        if source is not None and offset + length <= source.data_bytes:
            view = source.read_cached(offset, length)
            if view is not None:
                return view
            pieces = source.frames.pieces(offset, length)
            if len(pieces) == 1 and isinstance(pieces[0], Hot):  # as nearly every warm read
                return pieces[0].view
        read = _DataRead(self, offset, length, warms=warms)
        try:
            data = read.collect()
        except Exception as error:  # whatever it is, this read fails and the mount goes on
            raise FileSystemError(self._refuse(offset, error)) from error
        if data is None:
            read.reply_by(later())
        return data

    # --- inside ----------------------------------------------------------------------------

    def _count(self, offset: int, length: int, later: Later) -> bool:
        """Count a read, and record it as a touch unless it warms; returns whether it warms."""
        touches, warms = self._touches, False
        if self._warming_threads or touches is not None:  # else it makes no difference
            thread = later.thread
            warms = thread in self._warming_threads or (
                touches is not None and self._warms_by_name(thread)
            )
        if not warms and self._behind_loop:
            source = self._source
            is_hot = source is not None and source.frames.covers(offset, length)
            warms = is_hot or self._is_announced(offset, length)
        reads = self._reads
        with self._lock:
            if warms:
                reads.warm_reads += 1
                reads.warm_bytes += length
            else:
                reads.reads += 1
                reads.bytes += length
        if touches is not None and not warms:
            touches.touch(offset, length)
        return warms

    def _warms_by_name(self, thread: int) -> bool:
        """Whether a thread of another process of ours warms; its name is read once."""
        if thread in self._other_threads or len(self._other_threads) >= MAX_OTHER_THREADS:
            return False
        try:
            with open(f"/proc/{thread}/comm", "rb") as file:
                warms = file.read().rstrip(b"\n") == WARMING
        except OSError:
            warms = False
        if not warms:
            self._other_threads.add(thread)
        return warms

    def _await_supply(self, read: _DataRead) -> Bytes | None:
        """The source; None = `read` is resumed once there is one."""
        with self._lock:
            if self._source is None:
                self._early.append(read)
            return self._source

    def _begin_cold_wait(self) -> None:
        """Call it with the read's lock held, as `_end_cold_wait`: no wait ends uncounted."""
        with self._lock:
            self._cold_waits += 1
        self.cold_began.set()

    def _end_cold_wait(self) -> None:
        with self._lock:
            self._cold_waits -= 1

    def _count_wait(self, began_ns: int) -> None:
        with self._lock:
            self._reads.waits += 1
            self._reads.blocked_ns += time.monotonic_ns() - began_ns

    def _refuse(self, offset: int, error: BaseException) -> int:
        """Count and report a read that failed; returns its errno."""
        with self._lock:
            self._reads.failed += 1
        self._on_error(offset, error)
        return errno.EIO


class _DataRead(PendingRead):
    """A read whose bytes are not all in memory yet."""

    __slots__ = (
        *("_arrived", "_file", "_finished", "_held", "_is_cold", "_length", "_offset", "_pieces"),
        *("_source", "_views", "_warms", "began_ns"),
    )

    def __init__(self, file: DataFile, offset: int, length: int, *, warms: bool) -> None:
        super().__init__()
        self._file, self._warms = file, warms
        self._offset, self._length = offset, length
        self._is_cold = self._finished = False
        self._arrived: HeldBytes | Exception | None = None
        self._source: Bytes | None = None
        self._pieces: Iterator[Hot | Cold] = iter(())  # those that are not in `_views` yet
        self._views: list[Buffer] = []
        self._held: list[HeldBytes] = []
        self.began_ns = time.monotonic_ns()

    def deliver(self, arrived: HeldBytes | Exception) -> None:
        """The bytes of one piece are there or have failed; from a fetch thread."""
        self._arrived = arrived
        self.resume()

    def collect(self) -> Data | None:
        source = self._source or self._plan()
        if source is None:
            return None
        try:
            is_whole = self._gather(source)
        except BaseException:  # no reply will release these
            _release(self._held)
            raise
        if not is_whole:
            self._now_cold()
            return None
        length = min(self._length, source.data_bytes - self._offset)
        if length < self._length:
            self._views.append(bytes(self._length - max(0, length)))
        held = self._held
        return Data(self._views, (lambda: _release(held)) if held else None)

    def _plan(self) -> Bytes | None:
        """Find the pieces of the range; None = `resume` is called once they may be known."""
        while True:
            source = self._file._source or self._file._await_supply(self)
            if source is None:
                return None
            length = min(self._length, source.data_bytes - self._offset)
            pieces = source.frames.pieces(self._offset, length)
            if not isinstance(pieces, Coming):
                self._source, self._pieces = source, iter(pieces)
                return source
            if source.frames.wait(pieces.frame, self.resume):
                return None

    def _gather(self, source: Bytes) -> bool:
        """Go on through the pieces; False when another thread will, perhaps at this moment."""
        priority = Priority.HOT if self._warms else Priority.DEMAND
        part, self._arrived = self._arrived, None
        if isinstance(part, Exception):
            raise part
        while True:
            if part is not None:
                self._held.append(part)
                self._views += part.views
            piece = next(self._pieces, None)
            if piece is None:
                return True
            if isinstance(piece, Hot):
                part = None
                self._views.append(piece.view)
                continue
            part = source.hold(piece.offset, piece.length, self.deliver, priority)
            if part is None:
                return False

    def _now_cold(self) -> None:
        with self._lock:  # another thread may have replied since
            begins = not (self._is_cold or self._warms or self._finished)
            self._is_cold |= begins
            if begins:
                self._file._begin_cold_wait()
        on_miss = self._file._on_miss
        if begins and on_miss is not None:
            on_miss(self._offset)

    def _finish(self) -> None:
        with self._lock:
            self._finished = True
            if self._is_cold:
                self._file._end_cold_wait()

    def send(self, reply: Reply, data: Data) -> None:
        self._finish()
        if not self._warms:
            self._file._count_wait(self.began_ns)
        reply.data(data)

    def fail(self, reply: Reply, error: Exception) -> None:
        reply.error(self._file._refuse(self._offset, error))
        self._finish()


def _release(held: list[HeldBytes]) -> None:
    while held:
        held.pop().release()
