"""Downloading an object of any store into a local file, by parallel ranges."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Iterator

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import DeadlineError, from_os_error
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retry_call
from bootseer.storage.store import Store

RETRY_S = 30.0
_CHECK_S = 0.1
_STOP_S = 1.0
"""How long cancelled threads are waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Patience:
    """When a caller that can do without a download gives it up.

    It is given up once the rate over the last `limit_s` seconds is so low that the whole download
    would take longer than `worth_s` seconds.
    """

    limit_s: float
    worth_s: float

    def judge(self, size_bytes: int, samples: collections.deque[tuple[float, int]]) -> str:
        """Why to give up, or "".

        `samples` are (seconds since the start, bytes so far), the last one from now and the first
        one from `limit_s` ago, or from the start.
        """
        (before_s, before), (now_s, received) = samples[0], samples[-1]
        if now_s < self.limit_s:
            return ""
        new = max(0, received - before)  # less than before after an attempt that failed
        left_s = (size_bytes - received) * (now_s - before_s) / new if new else float("inf")
        if now_s + left_s <= self.worth_s:
            return ""
        rate = (
            f"{new / 1e6:.1f} MB in the last {now_s - before_s:.0f} s"
            if new
            else (f"nothing for the last {now_s - before_s:.0f} s")
        )
        return (
            f"the store gave {received / 1e6:.0f} of {size_bytes / 1e6:.0f} MB, and {rate}; "
            f"waiting for it would take longer than the plain way ({self.worth_s:.0f} s)"
        )


def download(store: Store, name: str, path: str, patience: Patience | None = None) -> None:
    """Write an object to the new file `path`; its bytes are not verified here.

    Raises the store's errors, DeadlineError by `patience`, NoSpaceError when the file system
    cannot hold it; the file is then removed.
    """
    size = store.stat(name).size_bytes
    try:
        _fetch(store, name, path, size, patience)
    except BaseException as error:  # no partial object is left
        try:
            os.unlink(path)
        except OSError:
            pass  # it was never made
        if isinstance(error, OSError):
            raise from_os_error(error, f"write {path}") from error
        raise


def _fetch(store: Store, name: str, path: str, size: int, patience: Patience | None) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if not size:
            return
        os.posix_fallocate(fd, 0, size)  # a full disk is an error here, not a SIGBUS later
        import mmap

        mapped = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    transfer = _Transfer(store, name, memoryview(mapped))
    try:
        transfer.run(patience)
    finally:
        if transfer.ended:  # else a thread may still write there: the mapping stays
            transfer.memory.release()
            mapped.close()


class _Transfer:
    """Threads that fill `memory`, range by range."""

    def __init__(self, store: Store, name: str, memory: memoryview) -> None:
        self.memory = memory
        self.ended = True
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._offsets: Iterator[int] = iter(range(0, len(memory), store.preferred.range_bytes))
        self._attempts: dict[int, Attempt] = {}
        self._received = 0
        self._errors: list[BaseException] = []
        self._stopped = False

    def run(self, patience: Patience | None) -> None:
        """Fill the memory. Raises the first thread's error, or DeadlineError."""
        preferred = self._store.preferred
        count = min(preferred.streams, -(-len(self.memory) // preferred.range_bytes))
        threads = [
            threading.Thread(target=self._work, name="download", daemon=True) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch(threads, patience)
        finally:
            self._stop()
            end_s = time.monotonic() + (_STOP_S if patience else RETRY_S)
            for thread in threads:
                thread.join(max(0.0, end_s - time.monotonic()))
            self.ended = not any(thread.is_alive() for thread in threads)
        if self._errors:
            raise self._errors[0]

    def _watch(self, threads: list[threading.Thread], patience: Patience | None) -> None:
        began_s = time.monotonic()
        samples = collections.deque([(0.0, 0)])
        for thread in threads:
            while thread.is_alive() and not self._errors:
                thread.join(_CHECK_S)
                if patience is None:
                    continue
                samples.append((time.monotonic() - began_s, self._received_bytes()))
                while len(samples) > 2 and samples[1][0] <= samples[-1][0] - patience.limit_s:
                    samples.popleft()
                why = patience.judge(len(self.memory), samples)
                if why:
                    raise DeadlineError(why)

    def _received_bytes(self) -> int:
        with self._lock:
            return self._received + sum(a.received_bytes for a in self._attempts.values())

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.cancel()

    def _work(self) -> None:
        try:
            while True:
                with self._lock:
                    offset = None if self._stopped else next(self._offsets, None)
                if offset is None:
                    return
                retry_call(lambda at=offset: self._fetch_range(at), retry_s=RETRY_S)  # type: ignore[misc]
        except BaseException as error:  # a thread's would be lost; `run` raises it
            self._errors.append(error)

    def _fetch_range(self, offset: int) -> None:
        attempt = Attempt()
        with self._lock:
            if self._stopped:
                raise _StoppedError("the download was given up")
            self._attempts[offset] = attempt
        length = 0
        try:
            with self.memory[offset : offset + self._store.preferred.range_bytes] as view:
                self._store.read_scatter(self._name, offset, [view], attempt)
                length = len(view)
        finally:
            with self._lock:
                del self._attempts[offset]
                self._received += length


class _StoppedError(DeadlineError):
    """The download was given up before this range was requested."""

    retryable = False
