"""Threads that share the work of one call: transfers in batches, or many small requests."""

from __future__ import annotations

import contextvars
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bootseer.errors import BusyError

METADATA_STREAMS = 16
Work = Callable[[memoryview], None]
A = TypeVar("A")
B = TypeVar("B")


class StoppedError(BusyError):
    """This piece of work was given up because another one failed."""


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


def in_parallel(call: Callable[[A], B], items: Sequence[A] | Iterable[A]) -> list[B]:
    """Results in the items' order; the first error met is raised after all calls have ended."""
    listed = list(items)
    if len(listed) < 2:
        return [call(item) for item in listed]
    with ThreadPoolExecutor(min(METADATA_STREAMS, len(listed)), "bootseer-metadata") as pool:
        # Each in a copy of our context, so that a limit of time holds for it, too.
        waiting = [pool.submit(contextvars.copy_context().run, call, item) for item in listed]
        return [future.result() for future in waiting]
