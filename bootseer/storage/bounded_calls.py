"""Calls into libraries that may block for minutes, bounded in time for their callers."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from bootseer.errors import DeadlineError, StoreUnavailableError
from bootseer.storage.request_control import Attempt

T = TypeVar("T")

EXIT_WAIT_S = 3.0
END_CHECK_S = 0.25  # how soon a caller notices that the end of its wait has moved


class _Workers:
    """The threads that may be inside a library, waited for before the interpreter exits.

    A thread that returns from Rust to an interpreter that is being finalized is ended by unwinding
    through frames that do not allow it, which aborts the process (SIGABRT).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[threading.Thread] = set()
        self._registered = False
        self.ending = False

    def start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._run, args=(target,), name=name, daemon=True)
        with self._lock:
            if self.ending:
                raise StoreUnavailableError("this process is ending; nothing new is begun")
            if not self._registered:
                self._registered = True
                atexit.register(self._wait)
            self._live.add(thread)
            thread.start()  # before `_wait` may join it

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        finally:
            with self._lock:
                self._live.discard(threading.current_thread())

    def _wait(self) -> None:
        end_s = time.monotonic() + EXIT_WAIT_S
        with self._lock:
            self.ending = True
            live = list(self._live)
        for thread in live:
            thread.join(max(end_s - time.monotonic(), 0))


_workers = _Workers()


def call_with_limit(call: Callable[[], T], timeout_s: float, what: str) -> T:
    """Return what `call` returns; DeadlineError when it takes longer.

    It then goes on in a thread of its own, and its result is dropped: it must neither write to the
    caller's memory nor leave behind what only its result would name.
    """
    end_s = time.monotonic() + timeout_s
    return call_until(call, lambda: end_s, f"cannot {what}: no answer for {timeout_s:g} s")


def call_until(call: Callable[[], T], end_s: Callable[[], float], message: str) -> T:
    """As `call_with_limit`, up to a moment of the monotonic clock that may move while `call` works.

    Raises DeadlineError with `message` once the moment that `end_s` returns has passed.
    """
    thread_call = _ThreadCall(call)
    _workers.start(thread_call.run, "store-call")
    return thread_call.wait(end_s, message)


class _ThreadCall(Generic[T]):
    """One call that a thread makes and another waits for."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = threading.Event()
        self._result: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:  # a thread's errors are its caller's
            self._error = _as_exception(error)
        finally:
            self._done.set()

    def wait(self, end_s: Callable[[], float], message: str) -> T:
        while not self._done.wait(min(END_CHECK_S, max(0.0, end_s() - time.monotonic()))):
            if time.monotonic() >= end_s():
                raise DeadlineError(message)
        if self._error is not None:
            raise self._error
        return self._result[0]


class Transfer:
    """One range, piece by piece, into buffers that are not written to once `run` has returned.

    `pieces` makes the request at its first step and yields bytes; it runs in a thread of its own,
    and may stay blocked there after `run`.
    """

    def __init__(
        self,
        pieces: Callable[[], Iterable[bytes]],
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None,
    ) -> None:
        self._pieces = pieces
        self._buffers = buffers
        self._count = len(buffers)
        self._attempt = attempt
        self._filled = filled
        self.received_bytes = 0
        self._number = 0
        self._at = 0
        self._lock = threading.Lock()
        self._over = False
        self._error: Exception | None = None
        self._wake = threading.Event()
        self._progress_s = time.monotonic()

    def run(self, what: str) -> None:
        """Fill the buffers; raises what `pieces` or `filled` raised, and as `Attempt` says."""
        if self._attempt.cancelled:
            raise StoreUnavailableError(f"cannot {what}: it was given up")
        self._skip_filled()
        if self.complete:
            return
        self._attempt.on_cancel(self._wake.set)
        _workers.start(self._work, "store-read")
        try:
            self._watch(what)
        finally:
            self._attempt.on_cancel(None)
            with self._lock:  # from here on the thread has no buffer to write to
                self._over = True
                self._buffers = ()
        if self._error is not None:
            raise self._error

    def _watch(self, what: str) -> None:
        stall_s = self._attempt.stall_s
        while True:
            quiet_s = time.monotonic() - self._progress_s
            self._wake.wait(max(stall_s - quiet_s, 0.001))
            if self._over:
                return
            if self._attempt.cancelled:
                raise StoreUnavailableError(f"cannot {what}: it was given up")
            if time.monotonic() - self._progress_s >= stall_s:
                raise StoreUnavailableError(f"cannot {what}: no byte came for {stall_s:g} s")

    def _work(self) -> None:
        try:
            for piece in self._pieces():
                with self._lock:
                    if self._over or _workers.ending:
                        return
                    self._place(memoryview(piece))
        except BaseException as error:  # as above
            self._error = _as_exception(error)
        finally:
            with self._lock:
                self._over = True
            self._wake.set()

    def _place(self, piece: memoryview) -> None:
        self._progress_s = time.monotonic()
        self.received_bytes += len(piece)
        self._attempt.received_bytes += len(piece)
        while piece:
            if self._number >= len(self._buffers):
                raise StoreUnavailableError("more bytes came than were asked for")
            buffer = self._buffers[self._number]
            count = min(len(piece), len(buffer) - self._at)
            buffer[self._at : self._at + count] = piece[:count]
            piece = piece[count:]
            self._at += count
            self._skip_filled()

    def _skip_filled(self) -> None:
        """Go on to the next buffer that has room, reporting each that is complete."""
        while self._number < len(self._buffers) and self._at == len(self._buffers[self._number]):
            if self._filled is not None:
                self._filled(self._number)
            self._number += 1
            self._at = 0

    @property
    def complete(self) -> bool:
        """Whether every buffer was filled; false after `run` means a short response."""
        return self._number >= self._count


def _as_exception(error: BaseException) -> Exception:
    """A library's panic as an Exception, since only the call into the library has failed."""
    if isinstance(error, Exception):
        return error
    return StoreUnavailableError(f"a library failed inside: {type(error).__name__}: {error}")
