"""Stores around stores, to inject faults: slow ones, and ones whose requests fail."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from bootseer.errors import StoreUnavailableError
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import (
    NO_HINTS,
    BlockLocation,
    ObjectWriter,
    PreferredReads,
    Stat,
    Store,
    WriteHints,
)
from bootseer.system.randomness import CHANCE


class WrappedStore:
    """`Store` that hands everything on; subclasses change what they are about."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def preferred(self) -> PreferredReads:
        return self.inner.preferred

    def stat(self, name: str) -> Stat:
        return self.inner.stat(name)

    def locations(self, name: str) -> list[BlockLocation]:
        return self.inner.locations(name)

    def write_nodes(self) -> list[str]:
        return self.inner.write_nodes()

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_range(name, offset, buffer)

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self.inner.read_scatter(name, offset, buffers, attempt, filled)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        return self.inner.read(name, limit_bytes=limit_bytes)

    def create(self, name: str, data: bytes, *, durable: bool = True) -> bool:
        return self.inner.create(name, data, durable=durable)

    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self.inner.replace(name, data, durable=durable)

    def create_from_file(self, name: str, path: str) -> bool:
        return self.inner.create_from_file(name, path)

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> ObjectWriter:
        return self.inner.writer(name, hints)

    def list(self, folder: str) -> Iterator[Stat]:
        return self.inner.list(folder)

    def temporaries(self, folder: str) -> Iterator[Stat]:
        return self.inner.temporaries(folder)

    def rename(self, old: str, new: str) -> None:
        self.inner.rename(old, new)

    def delete(self, name: str) -> None:
        self.inner.delete(name)

    def delete_tree(self, folder: str) -> None:
        self.inner.delete_tree(folder)

    def mkdir(self, folder: str) -> None:
        self.inner.mkdir(folder)

    def temporary_name(self, folder: str) -> str:
        return self.inner.temporary_name(folder)

    def local_path(self, name: str) -> str | None:
        return self.inner.local_path(name)

    def close(self) -> None:
        self.inner.close()


class SlowStore(WrappedStore):
    """Each request waits `latency_s`, then runs at most at `bytes_per_s` (0 = as it comes)."""

    def __init__(
        self,
        inner: Store,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = 0.0,
        preferred: PreferredReads | None = None,
    ) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._preferred = preferred

    @property
    def preferred(self) -> PreferredReads:
        return self._preferred or self.inner.preferred

    def local_path(self, name: str) -> str | None:
        return None  # else readers go round us

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        given_up = threading.Event()
        attempt.on_cancel(given_up.set)
        sent = 0

        def paced(number: int) -> None:
            nonlocal sent
            sent += len(buffers[number])
            if self._bytes_per_s:
                given_up.wait(began_s + sent / self._bytes_per_s - time.monotonic())
            if filled is not None:
                filled(number)

        try:
            given_up.wait(self._latency_s)
            began_s = time.monotonic()
            self.inner.read_scatter(name, offset, buffers, attempt, paced)
        finally:
            attempt.on_cancel(None)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One `read_scatter` as a `FaultyStore` sees it; `number` counts all of them from 0."""

    number: int
    name: str
    offset: int
    length: int
    attempt: Attempt


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What is to go wrong with a request.

    Exactly `after` buffers are filled; then `error` is raised, or the request hangs until it is
    cancelled (`hang`), or nothing more happens: a store that says all is well and is not. With
    `flip` a bit of every buffer is wrong.
    """

    after: int = 0
    error: Exception | None = None
    hang: bool = False
    flip: bool = False


class FaultyStore(WrappedStore):
    """Fault injection: `decide` says for each request what goes wrong with it (None: nothing).

    `replicas` are servers that it plays: a request to none in particular (no `prefer`) goes to
    one at random that is not to be avoided. `requests` keeps all of them, for counting.
    """

    def __init__(
        self,
        inner: Store,
        decide: Callable[[Request], Fault | None],
        *,
        replicas: Sequence[str] = (),
        preferred: PreferredReads | None = None,
    ) -> None:
        super().__init__(inner)
        self.requests: list[Request] = []
        self._decide = decide
        self._replicas = tuple(replicas)
        self._preferred = preferred
        self._lock = threading.Lock()

    @property
    def preferred(self) -> PreferredReads:
        return self._preferred or self.inner.preferred

    def local_path(self, name: str) -> str | None:
        return None

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        if self._replicas:
            usable = [r for r in self._replicas if r not in attempt.avoid] or list(self._replicas)
            attempt.replica = attempt.prefer or CHANCE.choice(usable)
        with self._lock:
            length = sum(map(len, buffers))
            request = Request(len(self.requests), name, offset, length, attempt)
            self.requests.append(request)
        fault = self._decide(request)
        if fault is None:
            self.inner.read_scatter(name, offset, buffers, attempt, filled)
            return

        def spoiled(number: int) -> None:
            if fault.flip:
                buffers[number][len(buffers[number]) // 2] ^= 1
            if filled is not None:
                filled(number)

        good = len(buffers) if fault.flip and fault.error is None else fault.after
        if good:
            self.inner.read_scatter(name, offset, buffers[:good], attempt, spoiled)
        if fault.hang:
            self._hang(request, buffers[good:])
        if fault.error is not None:
            raise fault.error

    def _hang(self, request: Request, rest: Sequence[memoryview]) -> None:
        """Wait to be cancelled, then write once more into our buffers: a store at its worst."""
        given_up = threading.Event()
        request.attempt.on_cancel(given_up.set)
        given_up.wait()
        request.attempt.on_cancel(None)
        for buffer in rest:
            buffer[:] = b"\xee" * len(buffer)
        raise StoreUnavailableError(f"reading {request.name} in {self.url} was given up")
