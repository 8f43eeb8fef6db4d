"""Writing stripes from a stream of unknown length: a checkpoint striped while it is made."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, UsageError
from bootseer.storage.store import ObjectWriter, Store
from bootseer.stripedfs.format.json_fields import DIGEST_BYTES, compute_digest
from bootseer.stripedfs.format.manifest import Manifest
from bootseer.stripedfs.format.pointer import Version
from bootseer.stripedfs.format.stripe_layout import Layout, check_chunks, stripe_name, trim_width
from bootseer.stripedfs.write.draft import Draft
from bootseer.stripedfs.write.stripe_upload import check_length
from bootseer.stripedfs.write.write_settings import (
    BUFFER_BUDGET_BYTES,
    WritePlan,
    WriteSettings,
    plan_write,
)

Buffer = bytes | bytearray | memoryview


class Budget:
    """Memory that all streams of a process share.

    A stream has two buffers in any case (one is filled while the other is sent), and while it is
    the only one, at least as many as it needs; the rest stays within the limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # Weak: a stream that is garbage collected gives its memory back, too.
        self._taken: WeakKeyDictionary[StripeStream, int] = WeakKeyDictionary()

    def take(self, stream: StripeStream, size_bytes: int, *, least_bytes: int) -> bool:
        """Whether a stream may have another buffer."""
        with self._lock:
            own = self._taken.get(stream, 0)
            least_bytes = least_bytes if len(self._taken) == 1 else 2 * size_bytes
            within = sum(self._taken.values()) + size_bytes <= self._limit_bytes
            if own >= least_bytes and not within:
                return False
            self._taken[stream] = own + size_bytes
            return True

    def give_back(self, stream: StripeStream) -> None:
        """Return all memory of a stream; twice is safe."""
        with self._lock:
            self._taken.pop(stream, None)


BUDGET = Budget(BUFFER_BUDGET_BYTES)


class StripeStream:
    """Takes bytes in order and writes them as stripes below `folder`, one thread a stripe.

    Memory is bounded by two chunks a stripe, and together with all other streams of the process by
    `budget` (a stream that is the only one may have a chunk a stripe): `write` waits for the
    slowest stripe. Not for several threads at once.
    """

    def __init__(
        self,
        store: Store,
        plan: WritePlan,
        folder: str,
        *,
        first: int = 0,
        budget: Budget = BUDGET,
    ) -> None:
        self._store, self._plan, self._folder, self._first = store, plan, folder, first
        self._budget = budget
        self._unmade = 2 * plan.width
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._current: memoryview | None = None
        self._filled = 0
        self._threads: list[_StripeThread] = []
        self._chunks = 0
        self.size_bytes = 0

    def write(self, data: Buffer) -> int:
        """Append all of `data`. Raises what a stripe's store raised, now or earlier."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            buffer = self._buffer()
            count = min(len(buffer) - self._filled, len(view) - done)
            buffer[self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count
            self.size_bytes += count
            if self._filled == len(buffer):
                self._send()
        return done

    def tail(self) -> memoryview | None:
        """All bytes, while they are fewer than one chunk; None once a stripe was begun."""
        if self._threads:
            return None
        return memoryview(b"") if self._current is None else self._current[: self._filled]

    def finish(self) -> Manifest:
        """Write what is left and end all stripes; their lengths are checked."""
        if self._filled or not self._threads:
            self._buffer()
            self._send()
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.wait()
        self._budget.give_back(self)
        self._raise_error()
        width = trim_width(self.size_bytes, self._plan.chunk_bytes, self._plan.width)
        layout = Layout(self.size_bytes, self._plan.chunk_bytes, width)
        digests = bytearray(layout.chunk_count * DIGEST_BYTES)
        for stripe, thread in enumerate(self._threads):
            check_length(self._store, thread.name, layout.stripe_length(stripe))
            for row, chunk in enumerate(layout.stripe_chunks(stripe)):
                own = thread.digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
                digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = own
        return Manifest(layout, bytes(digests))

    def abort(self) -> None:
        """Discard all stripes; twice is safe."""
        for thread in self._threads:
            thread.abort()
        for thread in self._threads:
            thread.wait()
        self._budget.give_back(self)

    def _buffer(self) -> memoryview:
        if self._current is None:
            self._raise_error()
            self._current = self._make_buffer() or self._free.get()
            self._filled = 0
        return self._current

    def _make_buffer(self) -> memoryview | None:
        """Another buffer, where none is free and the budget has room."""
        size, least = self._plan.chunk_bytes, (self._plan.width + 1) * self._plan.chunk_bytes
        if not self._unmade or not self._free.empty():
            return None
        if not self._budget.take(self, size, least_bytes=least):
            return None
        self._unmade -= 1
        return memoryview(mmap.mmap(-1, size))

    def _send(self) -> None:
        assert self._current is not None
        check_chunks(self.size_bytes, self._plan.chunk_bytes)
        stripe = self._chunks % self._plan.width
        if stripe == len(self._threads):
            hints = self._plan.hints(self._first + stripe)
            name = f"{self._folder}/{stripe_name(stripe)}"
            store = self._store
            thread = _StripeThread(name, lambda: store.writer(name, hints), self._free)
            thread.start()
            self._threads.append(thread)
        self._threads[stripe].put(self._current, self._filled)
        self._current, self._filled = None, 0
        self._chunks += 1

    def _raise_error(self) -> None:
        for thread in self._threads:
            if thread.error is not None:
                raise thread.error


class _StripeThread:
    """The thread of one stripe. After an error it takes buffers and discards their bytes."""

    def __init__(
        self,
        name: str,
        begin: Callable[[], ObjectWriter],
        free: queue.SimpleQueue[memoryview],
    ) -> None:
        self.name = name
        self.digests = bytearray()
        self.error: BaseException | None = None
        self._begin = begin
        self._free = free
        self._given_up = False
        self._ended = False
        self._todo: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name[-12:], daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, buffer: memoryview, length: int) -> None:
        self._todo.put((buffer, length))

    def end(self) -> None:
        self._todo.put(None)

    def abort(self) -> None:
        self._given_up = True
        self._todo.put(None)

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        writer: ObjectWriter | None = None
        try:
            writer = self._begin()
            self._write(writer)
        except BaseException as error:  # raised in the thread that writes or closes
            self.error = error
        finally:
            if writer is not None and (self.error is not None or self._given_up):
                _abort(writer)
        while not self._ended:
            item = self._todo.get()
            self._ended = item is None
            if item is not None:
                self._free.put(item[0])

    def _write(self, writer: ObjectWriter) -> None:
        while (item := self._todo.get()) is not None:
            buffer, length = item
            try:
                if not self._given_up:
                    view = buffer[:length]
                    self.digests += compute_digest(view)
                    writer.write(view)
            finally:
                self._free.put(buffer)
        self._ended = True
        if not self._given_up:
            writer.close()


def _abort(writer: ObjectWriter) -> None:
    try:
        writer.abort()
    except BootseerError:
        return  # the first error is the one to report


class StripedWriter(Committing):
    """A checkpoint file written from start to end; `close` publishes it, `abort` discards it.

    Readers see what was there before until `close` has returned. A context manager: leaving by an
    exception aborts. A writer that is not closed publishes nothing.
    """

    def __init__(self, draft: Draft, stream: StripeStream) -> None:
        self._draft = draft
        self._stream = stream
        self._failed: BaseException | None = None
        self.version: Version | None = None
        self.closed = False

    @classmethod
    def begin(cls, store: Store, name: str, settings: WriteSettings | None = None) -> StripedWriter:
        """Begin a new version of the checkpoint `name`."""
        plan = plan_write(settings or WriteSettings(), store)
        draft = Draft.begin(store, name, {"stream": True})
        return cls(draft, StripeStream(store, plan, draft.folder))

    def write(self, data: Buffer) -> int:
        """Append all of `data`; waits while the stripes are busy."""
        if self.closed:
            raise UsageError("this checkpoint is closed; open it anew to write it again")
        self._raise_error()
        try:
            return self._stream.write(data)
        except BaseException as error:  # a gap cannot be filled later
            self._fail(error)
            raise

    def tell(self) -> int:
        """Bytes written so far."""
        return self._stream.size_bytes

    def move(self, name: str) -> None:
        """Publish under another name than the one it was begun with."""
        self._draft.name = name

    def close(self) -> None:
        """Write the rest and publish; twice is safe. Raises what any write met."""
        if self.closed:
            return
        self._raise_error()
        self.closed = True
        try:
            manifest = self._stream.finish()
            size_bytes = manifest.layout.size_bytes
            self.version = self._draft.publish("file", size_bytes, manifest.encode())
        except BaseException as error:  # nothing unpublished may stay
            self._fail(error)
            raise

    def abort(self) -> None:
        """Discard what was written; safe twice, and after `close`."""
        if not self.closed:
            self._fail(UsageError("this checkpoint was aborted; open it anew to write it again"))
            self.closed = True

    def leave_nothing(self) -> None:
        """As `abort`; also removes the checkpoint's own folder if nothing else is in it."""
        self.abort()
        self._draft.remove_base()

    def _fail(self, error: BaseException) -> None:
        if self._failed is None:
            self._failed = error
            self._stream.abort()
            self._draft.discard()

    def _raise_error(self) -> None:
        if self._failed is not None:
            self.closed = True
            raise self._failed
