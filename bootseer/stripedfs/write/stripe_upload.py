"""Writing the stripes of local files, many at once.

Each thread has one buffer and takes the next stripe when its own is done, so memory is bounded by
threads x chunk size, whatever is written. A source is read once, chunk by chunk, by the thread
that sends the chunk; the kernel is asked to read the next one ahead.
"""

from __future__ import annotations

import dataclasses
import os
import stat as stat_module
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    NotFoundError,
    OsAction,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage import retry
from bootseer.storage.store import Store, WriteHints
from bootseer.stripedfs.format.json_fields import DIGEST_BYTES, compute_digest
from bootseer.stripedfs.format.stripe_layout import Layout, stripe_name
from bootseer.stripedfs.progress import Progress
from bootseer.stripedfs.workers import Task, WorkerPool
from bootseer.stripedfs.write.write_settings import WritePlan
from bootseer.system.randomness import CHANCE
from bootseer.system.regular_files import read_fully

BACKOFF_S = 0.5
MAX_BACKOFF_S = 4.0
SMALL_TRIES = 16
LONG_S = 60.0
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class FileIdentity:
    """What changes with a local file's bytes."""

    size_bytes: int
    mtime_ns: int
    inode: int
    device: int

    @staticmethod
    def of(stat: os.stat_result) -> FileIdentity:
        """From a stat."""
        return FileIdentity(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev)


class SourceFile:
    """A local file being put; reads check that it does not change meanwhile."""

    def __init__(self, path: str, fd: int, identity: FileIdentity, mode: int) -> None:
        self.path = path
        self.identity = identity
        self.mode = mode
        self._fd = fd

    @classmethod
    def open(cls, path: str) -> SourceFile:
        """Open a source. Raises UsageError for what is no file, else as `from_os_error`."""
        with OsAction(f"read {path}"):
            # Not blocking: opening a pipe in the place of a file would wait for its writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        stat = os.fstat(fd)
        if not stat_module.S_ISREG(stat.st_mode):
            os.close(fd)
            raise UsageError(f"{path} is no ordinary file; name a file or a directory")
        return cls(path, fd, FileIdentity.of(stat), stat_module.S_IMODE(stat.st_mode))

    @property
    def size_bytes(self) -> int:
        """Its size when it was opened."""
        return self.identity.size_bytes

    def read_into(self, offset: int, view: memoryview, *, next_offset: int = 0) -> None:
        """Fill `view` from `offset`; `next_offset` is what will be read next (0: nothing)."""
        with OsAction(f"read {self.path}"):
            if read_fully(self._fd, view, offset) < len(view):
                raise self._changed_error()
            if next_offset:
                os.posix_fadvise(self._fd, next_offset, len(view), os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Raise BusyError when the file is not what it was when it was opened."""
        if FileIdentity.of(os.fstat(self._fd)) != self.identity:
            raise self._changed_error()

    def _changed_error(self) -> BootseerError:
        return BusyError(f"{self.path} changed while it was put; put it again when it is at rest")

    def close(self) -> None:
        """Close the descriptor; twice is safe."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StripeUpload:
    """Writes the stripes of one file below `folder`, and calls `done` with all chunk digests.

    `claims` maps stripes that an interrupted put completed to their chunk digests; they are kept
    where they still are what the source holds. `record` is called with each stripe that is written,
    and its digests.
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
        pool: WorkerPool,
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

    def tasks(self) -> Iterable[Task]:
        """One task a stripe."""
        return [self._task(stripe) for stripe in range(self._layout.width)]

    def _task(self, stripe: int) -> Task:
        def task(buffer: memoryview) -> None:
            digests = self._claims.get(stripe, b"")
            kept = self._check_claim(stripe, digests, buffer)
            if not kept:
                digests = self._write_with_retries(stripe, buffer)
                self._record(stripe, digests)
            with self._lock:
                self.kept_bytes += kept
                self._place(stripe, digests)
                self._missing.discard(stripe)
                last = not self._missing
            if last:
                self._finish()

        return task

    def _finish(self) -> None:
        self._source.check_unchanged()
        self._done(bytes(self._digests))
        self._source.close()

    def _place(self, stripe: int, digests: bytes) -> None:
        for row, chunk in enumerate(self._layout.stripe_chunks(stripe)):
            own = digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            self._digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = own

    def _check_claim(self, stripe: int, claimed: bytes, buffer: memoryview) -> int:
        """The length of a stripe whose claim is right, for the store and the source; else 0."""
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
            if compute_digest(view) != claimed[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]:
                return 0
        self._progress.advance(length)
        return length

    def _write_with_retries(self, stripe: int, buffer: memoryview) -> bytes:
        """Write a stripe, and again, elsewhere, when the store failed."""

        def write(attempt: int) -> bytes:
            return self._write_stripe(
                stripe, self._plan.hints(self._first + stripe + attempt), buffer
            )

        # CorruptDataError is not retryable elsewhere; here the bytes are sent again.
        return run_with_retries(
            write,
            self._plan.tries,
            self._pool.pause,
            may_pass=lambda error: (
                (error.retryable or isinstance(error, CorruptDataError))
                and not isinstance(error, BusyError)
            ),
        )

    def _write_stripe(self, stripe: int, hints: WriteHints, buffer: memoryview) -> bytes:
        layout, digests, sent_bytes = self._layout, bytearray(), 0
        name = f"{self._folder}/{stripe_name(stripe)}"
        try:
            with self._store.writer(name, hints) as writer:
                for chunk in layout.stripe_chunks(stripe):
                    self._pool.check()
                    view = buffer[: layout.chunk_length(chunk)]
                    ahead = chunk + layout.width if chunk + layout.width < layout.chunk_count else 0
                    self._source.read_into(
                        chunk * layout.chunk_bytes, view, next_offset=ahead * layout.chunk_bytes
                    )
                    digests += compute_digest(view)
                    writer.write(view)
                    sent_bytes += len(view)
                    self._progress.advance(len(view))
            check_length(self._store, name, layout.stripe_length(stripe))
        except BootseerError:
            self._progress.advance(-sent_bytes)
            raise
        return bytes(digests)


def check_length(store: Store, name: str, size_bytes: int) -> None:
    """Raise StoreUnavailableError unless the object has this length; writing it again may help."""
    length = store.stat(name).size_bytes
    if length != size_bytes:
        raise StoreUnavailableError(
            f"{name} in {store.url} holds {length} of {size_bytes} bytes; put it again"
        )


def replace_with_retries(store: Store, name: str, data: bytes) -> None:
    """Write a small object, and again when the store failed: a whole put may depend on it."""
    run_with_retries(lambda _: store.replace(name, data), SMALL_TRIES, time.sleep)


def run_with_retries(
    step: Callable[[int], T],
    tries: int,
    pause: Callable[[float], None],
    *,
    may_pass: Callable[[BootseerError], bool] = lambda error: error.retryable,
) -> T:
    """Run a step with the number of its attempt, from 0, and again when the store failed."""
    attempt, began_s = 0, time.monotonic()
    while True:
        try:
            return step(attempt)
        except BootseerError as error:
            attempt += 1
            if not may_pass(error) or are_tries_over(attempt, tries, began_s):
                raise
            pause_s = backoff_s(attempt, error)
        pause(pause_s)


def are_tries_over(attempt: int, tries: int, began_s: float) -> bool:
    """Whether no further try is made: after `tries`, or half of them where these took long.

    A NameNode goes on naming a DataNode that was killed, for minutes, and of three DataNodes nearly
    every second time: what fails at once is tried often.
    """
    return attempt >= tries or (2 * attempt >= tries and time.monotonic() - began_s > LONG_S)


def backoff_s(attempt: int, error: BootseerError) -> float:
    """Seconds to wait after `attempt` tries: a tenth of the longest such wait at least."""
    chance = CHANCE.uniform(0.1, 1.0)
    return retry.backoff_s(
        attempt, first_s=2 * BACKOFF_S, most_s=MAX_BACKOFF_S, error=error, chance=chance
    )
