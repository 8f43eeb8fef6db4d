"""The FUSE file system below a mounted block image: one file, `d`, with the image's data.

EROFS reads it past the page cache (direct I/O), so every first touch of a page comes here: from
hot frames in memory, or else through the fetcher. It opens the file once, when the image is
mounted, and the kernel releases that handle when the last mount of the image is gone, in
whatever namespace: then nobody needs the server any more.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.blockimage.serve.byte_source import Bytes, Reads, Touches
from bootseer.blockimage.serve.frames import Coming, Hot
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

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Held

NAME = b"d"
DATA = Inode(2)
PAGE_BYTES = 4096
WARMING = b"bootseer-warm"
"""What threads of other processes that warm an image are called: their reads are no touches."""
MOST_STRANGERS = 1 << 16
_DIRECTORY, _FILE = 0o40700, 0o100400
_NOTHING = memoryview(b"")


class ImageFront(Operations):
    """`Operations` of the data file.

    Reads that come before `supply` was called wait for it. `released` is called, once, after
    `keep` named the handle that EROFS holds and the kernel released it; `failed` hears of every
    read that got EIO.
    """

    def __init__(
        self,
        *,
        released: Callable[[], None],
        failed: Callable[[int, BaseException], None],
        next_handle: int = 1,
    ) -> None:
        self._released, self._failed = released, failed
        self._size_bytes = 0
        self._bytes: Bytes | None = None
        self._early: list[_Waiting] = []
        self._lock = threading.Lock()
        self._next_handle = next_handle
        self._open: set[int] = set()
        self._kept = 0
        self._gone = False
        self._counts = [0] * 7
        self.missed: Callable[[int], None] | None = None  # told where a program waits
        self.cold_waits = 0  # programs that wait for blocks which no frame brings
        self._strangers: set[int] = set()
        self.warming: frozenset[int] = frozenset()  # threads whose reads are no touches
        self.replayed_hot_is_warm = False  # where the reader's thread cannot be known
        self.announced: Callable[[int, int], bool] | None = None  # there: what others read ahead
        self.touches: Touches | None = None

    # --- for the server --------------------------------------------------------------------

    def size(self, data_bytes: int) -> None:
        """Say how large the data is: needed before EROFS mounts it. Whole pages, for devices."""
        self._size_bytes = -(-data_bytes // PAGE_BYTES) * PAGE_BYTES

    def supply(self, source: Bytes) -> None:
        """Say where the bytes come from; answers who waited for that."""
        with self._lock:
            self._bytes = source
            early, self._early = self._early, []
        for waiting in early:
            waiting.resume()

    def give_up(self, waited_s: float, error: BaseException) -> None:
        """Fail who has waited so long for `supply`; the others go on waiting."""
        before_ns = time.monotonic_ns() - int(waited_s * 1e9)
        with self._lock:
            late = [one for one in self._early if one.since_ns <= before_ns and one.parked]
            self._early = [one for one in self._early if one not in late]
        for waiting in late:
            waiting.fail(error)

    @property
    def last_handle(self) -> int:
        """What `d` was opened as last; 0 before."""
        return self._next_handle - 1

    def keep(self, handle: int) -> None:
        """EROFS holds this handle: its release is the end of the mount."""
        with self._lock:
            self._kept = handle
            over = handle < self._next_handle and handle not in self._open
        if over:  # unmounted again already
            self._end()

    def adopt(self, handle: int) -> None:
        """Go on for a server that died: EROFS holds this handle, which was opened there."""
        with self._lock:
            self._open.add(handle)
        self._next_handle = handle + 1
        self.keep(handle)

    @property
    def reads(self) -> Reads:
        """The counters at this moment."""
        with self._lock:
            return Reads(*self._counts)

    def _end(self) -> None:
        with self._lock:
            gone, self._gone = self._gone, True
        if not gone:
            self._released()

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
            over = handle == self._kept
        if over:
            self._end()

    def statfs(self) -> tuple[int, int, int, int]:
        return self._size_bytes, 0, 1, 0

    def destroy(self) -> None:
        source = self._bytes
        if source is not None:
            source.frames.close()

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | memoryview | None:
        if inode != DATA:
            raise FileSystemError(errno.EISDIR)
        length = min(size, self._size_bytes - offset)
        if length <= 0:
            return _NOTHING
        warm = self._note(offset, length, later)
        source = self._bytes
        if source is not None and offset + length <= source.data_bytes:
            view = source.kept(offset, length)
            if view is not None:
                return view
            pieces = source.frames.pieces(offset, length)
            if len(pieces) == 1 and isinstance(pieces[0], Hot):  # what nearly every warm read is
                return pieces[0].view
        waiting = _Waiting(self, offset, length, warm=warm)
        try:
            data = waiting.assemble()
        except Exception as error:  # whatever it is, this read fails and the mount goes on
            raise self._refusal(offset, error) from error
        if data is None:
            waiting.park(later())
        return data

    # --- inside ----------------------------------------------------------------------------

    def _note(self, offset: int, length: int, later: Later) -> bool:
        """Count a read and record it, unless it is our own warming's: then True."""
        warm = False
        if self.warming or self.touches is not None:  # else it is all one who reads
            thread = later.thread
            warm = thread in self.warming or (self.touches is not None and self._named(thread))
        if not warm and self.replayed_hot_is_warm:
            source = self._bytes
            warm = (source is not None and source.frames.covers(offset, length)) or (
                self.announced is not None and self.announced(offset, length)
            )
        touches, counts, first = self.touches, self._counts, 4 if warm else 0
        with self._lock:
            counts[first] += 1
            counts[first + 1] += length
        if touches is not None and not warm:
            touches.touch(offset, length)
        return warm

    def _named(self, thread: int) -> bool:
        """Whether a thread of another process of ours warms, by its name; asked once a thread."""
        if thread in self._strangers or len(self._strangers) >= MOST_STRANGERS:
            return False
        try:
            with open(f"/proc/{thread}/comm", "rb") as file:
                warms = file.read().rstrip(b"\n") == WARMING
        except OSError:
            warms = False
        if not warms:
            self._strangers.add(thread)
        return warms

    def _await_supply(self, waiting: _Waiting) -> Bytes | None:
        with self._lock:
            if self._bytes is None:
                self._early.append(waiting)
            return self._bytes

    def _cold(self, more: int) -> None:
        with self._lock:
            self.cold_waits += more

    def _waited(self, since_ns: int) -> None:
        with self._lock:
            self._counts[2] += 1
            self._counts[3] += time.monotonic_ns() - since_ns

    def _refusal(self, offset: int, error: BaseException) -> FileSystemError:
        with self._lock:
            self._counts[6] += 1
        self._failed(offset, error)
        return FileSystemError(errno.EIO)


class _Waiting:
    """A read whose bytes are not all there yet."""

    __slots__ = (
        "_cold",
        "_done",
        "_front",
        "_length",
        "_lock",
        "_offset",
        "_reply",
        "_there",
        "_warm",
        "since_ns",
    )

    def __init__(self, front: ImageFront, offset: int, length: int, *, warm: bool) -> None:
        self._front, self._warm = front, warm
        self._offset, self._length = offset, length
        self._lock = threading.Lock()
        self._reply: Reply | None = None
        self._there = self._cold = self._done = False
        self.since_ns = time.monotonic_ns()

    def assemble(self) -> Data | None:
        """The bytes, or None when `resume` will be called once there may be more of them."""
        while True:
            source = self._front._await_supply(self)
            if source is None:
                return None
            length = min(self._length, source.data_bytes - self._offset)
            pieces = source.frames.pieces(self._offset, length)
            if not isinstance(pieces, Coming):
                break
            if source.frames.wait(pieces.frame, self.resume):
                return None
        views: list[Buffer] = []
        held: list[Held] = []
        priority = Priority.HOT if self._warm else Priority.DEMAND
        try:
            for piece in pieces:
                if isinstance(piece, Hot):
                    views.append(piece.view)
                    continue
                part = source.held(piece.offset, piece.length, self.resume, priority)
                if part is None:
                    _release(held)
                    self._now_cold()
                    return None
                held.append(part)
                views += part.views
        except BaseException:  # no reply will let go of these
            _release(held)
            raise
        if length < self._length:
            views.append(bytes(self._length - max(0, length)))
        return Data(views, (lambda: _release(held)) if held else None)

    def _now_cold(self) -> None:
        with self._lock:  # another thread may have answered since
            news = not (self._cold or self._warm or self._done)
            self._cold |= news
            if news:
                self._front._cold(1)
        missed = self._front.missed
        if news and missed is not None:
            missed(self._offset)

    @property
    def parked(self) -> bool:
        """Whether it can be answered by `fail`."""
        return self._reply is not None

    def fail(self, error: BaseException) -> None:
        """Answer with an input/output error: nobody will call `resume`."""
        with self._lock:
            reply, self._done = self._reply, True
        if reply is not None:
            reply.error(self._front._refusal(self._offset, error).errno or errno.EIO)

    def resume(self) -> None:
        """Try again; from any thread."""
        with self._lock:
            self._there = True
            reply = self._reply
        if reply is not None:
            self._collect(reply)

    def park(self, reply: Reply) -> None:
        """Answer later."""
        with self._lock:
            self._reply = reply
            there = self._there
        if there:
            self._collect(reply)

    def _collect(self, reply: Reply) -> None:
        front = self._front
        with self._lock:
            self._there = False
        try:
            data = self.assemble()
        except Exception as error:  # whatever it is, the reader must not wait for ever
            data = None
            reply.error(front._refusal(self._offset, error).errno or errno.EIO)
        else:
            if data is None:
                return
        with self._lock:
            self._done = True
            if self._cold:
                front._cold(-1)
        if data is not None:
            if not self._warm:
                front._waited(self.since_ns)
            reply.data(data)


def _release(held: list[Held]) -> None:
    while held:
        held.pop().release()
