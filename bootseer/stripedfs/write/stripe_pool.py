"""Writing the stripes of local files, many at once: the engine under every `put`.

Each thread owns one buffer and takes the next piece of work when its own is done, so memory is
bounded by threads x chunk size, whatever is written. A source is read once, chunk by chunk, by
the thread that sends the chunk; the kernel is told of the next one ahead of time.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import stat as stat_module
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
    from_os_error,
)
from bootseer.storage import retry
from bootseer.storage.store import Store, WriteHints
from bootseer.stripedfs.format.json_fields import DIGEST_BYTES, digest_of
from bootseer.stripedfs.format.stripe_layout import Layout, stripe_name
from bootseer.stripedfs.write.write_settings import Progress, WritePlan
from bootseer.system.randomness import CHANCE
from bootseer.system.regular_files import read_fully

BACKOFF_S = 0.5
MAX_BACKOFF_S = 4.0
SMALL_TRIES = 16
LONG_S = 60.0
Work = Callable[[memoryview], None]


class StoppedError(BusyError):
    """This piece of work was given up because another one failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What tells whether a local file is still the same."""

    size_bytes: int
    mtime_ns: int
    inode: int
    device: int

    @staticmethod
    def of(found: os.stat_result) -> Identity:
        """From a stat."""
        return Identity(found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


class SourceFile:
    """A local file being put; reads check that it does not change meanwhile."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Not blocking: a pipe in the place of a file would wait for its writer for ever.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error
        found = os.fstat(self._fd)
        self.identity = Identity.of(found)
        self.mode = stat_module.S_IMODE(found.st_mode)
        if not stat_module.S_ISREG(found.st_mode):
            self.close()
            raise UsageError(f"{path} is no ordinary file; name a file or a directory")

    @property
    def size_bytes(self) -> int:
        """Its size when it was opened."""
        return self.identity.size_bytes

    def read_into(self, offset: int, view: memoryview, *, next_offset: int = 0) -> None:
        """Fill `view` from `offset`; `next_offset` is what this reader wants next (0: nothing)."""
        try:
            if read_fully(self._fd, view, offset) < len(view):
                raise self._changed()
            if next_offset:
                os.posix_fadvise(self._fd, next_offset, len(view), os.POSIX_FADV_WILLNEED)
        except OSError as error:
            raise from_os_error(error, f"read {self.path}") from error

    def check_unchanged(self) -> None:
        """Raise BusyError when the file is not what it was when it was opened."""
        if Identity.of(os.fstat(self._fd)) != self.identity:
            raise self._changed()

    def _changed(self) -> BootseerError:
        return BusyError(f"{self.path} changed while it was put; put it again when it is at rest")

    def close(self) -> None:
        """Close the descriptor; twice is safe."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StripeWork:
    """Writes the stripes of one file below `folder`; `done` is called once all are there.

    `claims` maps stripes that an earlier, interrupted put completed to their chunk digests; they
    are kept when they still are what the source holds. `record` is told of each stripe written.
    """

    def __init__(
        self,
        store: Store,
        plan: WritePlan,
        source: SourceFile,
        layout: Layout,
        folder: str,
        *,
        first: int,
        pool: Pool,
        progress: Progress,
        done: Callable[[bytes], None],
        claims: dict[int, bytes],
        record: Callable[[int, bytes], None],
    ) -> None:
        self._store, self._plan, self._source = store, plan, source
        self._layout, self._folder, self._first = layout, folder, first
        self._pool, self._progress, self._done, self._record = pool, progress, done, record
        self._lock = threading.Lock()
        self._digests = bytearray(layout.chunk_count * DIGEST_BYTES)
        self._missing = set(range(layout.width))
        self._claims = claims
        self.kept_bytes = 0

    def pieces(self) -> Iterable[Work]:
        """One piece of work a stripe."""
        return [self._piece(stripe) for stripe in range(self._layout.width)]

    def _piece(self, stripe: int) -> Work:
        def work(buffer: memoryview) -> None:
            digests = self._claims.get(stripe, b"")
            kept = self._still(stripe, digests, buffer)
            if not kept:
                digests = self._tried(stripe, buffer)
                self._record(stripe, digests)
            with self._lock:
                self.kept_bytes += kept
                self._place(stripe, digests)
                self._missing.discard(stripe)
                last = not self._missing
            if last:
                self._finish()

        return work

    def _finish(self) -> None:
        self._source.check_unchanged()
        self._done(bytes(self._digests))
        self._source.close()

    def _place(self, stripe: int, digests: bytes) -> None:
        for row, chunk in enumerate(self._layout.stripe_chunks(stripe)):
            own = digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            self._digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = own

    def _still(self, stripe: int, claimed: bytes, buffer: memoryview) -> int:
        """Bytes of a stripe that an earlier put completed and the source still has; else 0."""
        layout, chunks = self._layout, self._layout.stripe_chunks(stripe)
        if not claimed or len(claimed) != len(chunks) * DIGEST_BYTES:
            return 0
        length = layout.stripe_length(stripe)
        try:
            if self._store.stat(f"{self._folder}/{stripe_name(stripe)}").size_bytes != length:
                return 0
        except NotFoundError:
            return 0
        for row, chunk in enumerate(chunks):
            self._pool.check()
            view = buffer[: layout.chunk_length(chunk)]
            self._source.read_into(chunk * layout.chunk_bytes, view)
            if digest_of(view) != claimed[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]:
                return 0
        self._progress.advance(length)
        return length

    def _tried(self, stripe: int, buffer: memoryview) -> bytes:
        """Write a stripe, and anew, elsewhere, when the store failed."""
        attempt, began_s = 0, time.monotonic()
        while True:
            sent = _Counter(self._progress)
            try:
                hints = self._plan.hints(self._first + stripe + attempt)
                return self._written(stripe, hints, buffer, sent)
            except BootseerError as error:
                self._progress.advance(-sent.size_bytes)
                attempt += 1
                # Not retryable by its class, yet here our own bytes are sent anew.
                heals = error.retryable or isinstance(error, CorruptDataError)
                if not heals or isinstance(error, BusyError):
                    raise
                if is_over(attempt, self._plan.tries, began_s):
                    raise
                pause_s = backoff_s(attempt, error)
            self._pool.pause(pause_s)

    def _written(self, stripe: int, hints: WriteHints, buffer: memoryview, sent: _Counter) -> bytes:
        layout, digests = self._layout, bytearray()
        name = f"{self._folder}/{stripe_name(stripe)}"
        chunks = layout.stripe_chunks(stripe)
        with self._store.writer(name, hints) as writer:
            for chunk in chunks:
                self._pool.check()
                view = buffer[: layout.chunk_length(chunk)]
                ahead = chunk + layout.width if chunk + layout.width < layout.chunk_count else 0
                self._source.read_into(
                    chunk * layout.chunk_bytes, view, next_offset=ahead * layout.chunk_bytes
                )
                digests += digest_of(view)
                writer.write(view)
                sent.add(len(view))
        check_length(self._store, name, layout.stripe_length(stripe))
        return bytes(digests)


class _Counter:
    """Bytes that one try has reported."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._progress.advance(size_bytes)


def check_length(store: Store, name: str, size_bytes: int) -> None:
    """Raise StoreUnavailableError unless the object has this length: writing anew may heal it."""
    found = store.stat(name).size_bytes
    if found != size_bytes:
        raise StoreUnavailableError(
            f"{name} in {store.url} holds {found} of {size_bytes} bytes; put it again"
        )


def replace_surely(store: Store, name: str, data: bytes) -> None:
    """Write a small object, and again when the store failed: all else may depend on it."""
    surely(lambda: store.replace(name, data))


def surely(step: Callable[[], None]) -> None:
    """Take a step that may be repeated, and again when the store failed."""
    began_s = time.monotonic()
    for attempt in itertools.count(1):
        try:
            step()
            return
        except BootseerError as error:
            if not error.retryable or is_over(attempt, SMALL_TRIES, began_s):
                raise
            pause_s = backoff_s(attempt, error)
        time.sleep(pause_s)


def is_over(attempt: int, tries: int, began_s: float) -> bool:
    """Whether no further try is made: after `tries`, or half of them where these took long.

    A NameNode goes on naming a DataNode that was killed, for minutes, and of three it is nearly
    each second one: what fails at once is tried often.
    """
    return attempt >= tries or (2 * attempt >= tries and time.monotonic() - began_s > LONG_S)


def backoff_s(attempt: int, error: BootseerError) -> float:
    """Seconds to wait after `attempt` tries: a tenth of the longest such wait at least."""
    chance = CHANCE.uniform(0.1, 1.0)
    return retry.backoff_s(
        attempt, first_s=2 * BACKOFF_S, most_s=MAX_BACKOFF_S, error=error, chance=chance
    )


class Pool:
    """Threads that do pieces of work, each with a buffer of its own.

    The first error stops all others and is raised by `run`.
    """

    def __init__(self, jobs: int, buffer_bytes: int) -> None:
        self._jobs = jobs
        self._buffer_bytes = buffer_bytes
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise StoppedError when the work is no longer wanted."""
        if self._stop.is_set():
            raise StoppedError("given up, since another part of the work failed")

    def pause(self, pause_s: float) -> None:
        """Wait before another try; StoppedError as `check`, as soon as that is known."""
        self._stop.wait(pause_s)
        self.check()

    def run(self, pieces: Iterable[Work]) -> None:
        """Do all pieces, taken one by one as threads get free."""
        queue = iter(pieces)
        threads = [
            threading.Thread(target=self._loop, args=(queue,), name=f"stripe-{n}", daemon=True)
            for n in range(self._jobs)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop.set()  # interrupted: threads end at their next chunk
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error

    def _loop(self, queue: Iterator[Work]) -> None:
        buffer = memoryview(mmap.mmap(-1, self._buffer_bytes))
        try:
            while not self._stop.is_set():
                with self._lock:
                    work = next(queue, None)
                if work is None:
                    return
                work(buffer)
        except StoppedError:
            return
        except BaseException as error:  # handed to the caller of `run`, whatever it is
            with self._lock:
                self._error = self._error or error
            self._stop.set()
