"""Threads that share the work of one call: transfers in batches, or many small requests."""

from __future__ import annotations

import contextvars
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

from bootseer.errors import BusyError

METADATA_STREAMS = 16
Task = Callable[[memoryview], None]
"""A piece of work, which is given the buffer of its thread."""
A = TypeVar("A")
B = TypeVar("B")


class StoppedError(BusyError):
    """This piece of work was given up because another one failed."""


class WorkerPool:
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

    def run(self, tasks: Iterable[Task]) -> None:
        """Do all tasks; a thread takes the next one when it is free."""
        queue = iter(tasks)
        threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"stripe-{n}", daemon=True)
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

    def _work(self, queue: Iterator[Task]) -> None:
        buffer = memoryview(mmap.mmap(-1, self._buffer_bytes))
        try:
            while not self._stop.is_set():
                with self._lock:
                    task = next(queue, None)
                if task is None:
                    return
                task(buffer)
        except StoppedError:
            return
        except BaseException as error:  # raised by `run`, whatever it is
            with self._lock:
                self._error = self._error or error
            self._stop.set()


def call_in_parallel(call: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Results in the items' order; the first error met is raised after all calls have ended.

    Threads of our own: `concurrent.futures` takes 8 ms to import, for which a job would wait.
    """
    listed = list(items)
    if len(listed) < 2:
        return [call(item) for item in listed]
    results: dict[int, B] = {}
    errors: dict[int, BaseException] = {}
    queue, lock = iter(enumerate(listed)), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                place, item = next(queue, (-1, None))
            if place < 0:
                return
            try:
                results[place] = call(cast("A", item))
            except BaseException as error:  # raised by the caller's thread
                errors[place] = error

    # Each in a copy of the caller's context, so that its time limit holds for it, too.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name="bootseer-metadata"
        )
        for _ in range(min(METADATA_STREAMS, len(listed)))
    ]
    try:
        for thread in threads:
            thread.start()
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[place] for place in range(len(listed))]
