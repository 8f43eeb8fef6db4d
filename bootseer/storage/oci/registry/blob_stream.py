"""One blob from an offset to its end by one request, which is repeated from where it was cut."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.storage.http.errors import ShortBodyError
from bootseer.storage.http.exchange import Exchange
from bootseer.storage.http.responses import parse_content_range
from bootseer.storage.oci.registry.mirrors import PULL, Endpoint
from bootseer.storage.oci.registry.registry_client import RegistryClient
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import FIRST_WAIT_S, LONGEST_WAIT_S
from bootseer.system.randomness import CHANCE

PIECE_BYTES = 1 << 20


class RegistryBlobStream(Closing):
    """`BlobStream` from a repository's endpoints. One thread reads; any may cancel."""

    def __init__(self, client: RegistryClient, digest: str, offset: int, *, verify: bool) -> None:
        self._client, self._digest = client, digest
        self._what = f"read {digest} in {client.reference.place}"
        self._at = offset
        self._size = -1
        self._exchange: Exchange | None = None
        self._endpoint: Endpoint | None = None
        self._attempt = client.attempt()
        self._cancelled = threading.Event()
        self._failures = 0
        self._progress_s = time.monotonic()
        self._over = False
        algorithm, _, self._expected = digest.partition(":")
        self._hash = hashlib.new(algorithm) if verify and not offset else None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole blob; asks for it when nothing was read yet."""
        while self._exchange is None and self._size < 0 and not self._over:
            try:
                self._connect()
            except BootseerError as error:
                self._after(error)
        return self._size

    def readinto(self, view: memoryview, /) -> int:
        """Put the next bytes into `view`; how many, 0 at the verified end."""
        if self._over or not view:
            return 0
        while True:
            try:
                if self._exchange is None:
                    self._connect()
                count = self._exchange.receive(view) if self._exchange is not None else 0
                if not count and self._at < self._size:
                    raise ShortBodyError(
                        f"cannot {self._what}: the answer ended after {self._at} of"
                        f" {self._size} bytes"
                    )
            except BootseerError as error:
                self._after(error)
                continue
            if not count:
                self._finish()
                return 0
            self._at += count
            self._failures, self._progress_s = 0, time.monotonic()
            if self._hash is not None:
                self._hash.update(view[:count])
            return count

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes, fewer at the end only; all that are left when negative."""
        return read_bytes(self.readinto, size)

    def cancel(self) -> None:
        """Make the thread that reads fail soon; for another thread."""
        self._cancelled.set()
        self._attempt.cancel()

    def close(self) -> None:
        """Close the connection; twice is safe."""
        self._over = True
        self._drop()

    def _connect(self) -> None:
        number = self._failures
        self._attempt = Attempt(number=number, stall_s=self._client.options.stall_s)
        if self._cancelled.is_set():
            self._attempt.cancel()
        self._exchange = self._client.ask_any(self._ask, PULL, self._attempt)

    def _ask(self, endpoint: Endpoint) -> Exchange | None:
        """The response that goes on at our offset; None when that is the blob's end."""
        span = {"Range": f"bytes={self._at}-"} if self._at else {}
        tail = f"blobs/{self._digest}"
        exchange = self._client.open(endpoint, "GET", tail, span, self._attempt, self._what)
        try:
            ends = self._check(exchange)
            if not ends and exchange.status == 200:
                self._skip(exchange, self._at)
        except BaseException:  # the caller has no exchange to close
            exchange.close()
            raise
        self._endpoint = endpoint
        if ends:
            exchange.close()
            return None
        return exchange

    def _check(self, exchange: Exchange) -> bool:
        """Raise unless the response goes on at our offset; whether that is the blob's end."""
        span = parse_content_range(exchange.headers.get("Content-Range"))
        if exchange.status == 416 and span is not None and span.size == self._at:
            size = span.size
        elif exchange.status == 200:
            size = -1 if exchange.length is None else exchange.length
        elif exchange.status == 206 and self._at:
            if span is None or span.start != self._at:
                raise StoreUnavailableError(
                    f"cannot {self._what}: the server sends another range than the one from byte"
                    f" {self._at} on"
                )
            size = span.size
        else:
            raise self._client.error(exchange)
        if self._size >= 0 and size >= 0 and size != self._size:
            raise CorruptDataError(
                f"{self._digest} has {size} bytes where it had {self._size} before; it is"
                " truncated or mixed up on the server"
            )
        self._size = size if self._size < 0 else self._size
        return exchange.status == 416

    def _skip(self, exchange: Exchange, count: int) -> None:
        """Read past the bytes that were read before: this server serves no ranges."""
        scratch = memoryview(bytearray(min(count, PIECE_BYTES)))
        while count:
            received = exchange.receive(scratch[:count])
            if not received:
                raise ShortBodyError(f"cannot {self._what}: the answer ended before our place")
            count -= received

    def _after(self, error: BootseerError) -> None:
        """Wait for the next attempt, or raise."""
        self._drop()
        if self._endpoint is not None:
            self._client.mark_down(self._endpoint)
        stalled_s = time.monotonic() - self._progress_s
        self._failures += 1
        wait_s = CHANCE.uniform(0, min(FIRST_WAIT_S * 2.0**self._failures, LONGEST_WAIT_S))
        wait_s = max(wait_s, getattr(error, "retry_after_s", 0.0))
        is_last = stalled_s + wait_s > self._client.options.retry_s
        if not error.retryable or self._cancelled.is_set() or is_last:
            raise error
        if self._failures == 1 and isinstance(error, ShortBodyError):
            return  # cut in the middle: go on at once
        if self._cancelled.wait(wait_s):
            raise error

    def _finish(self) -> None:
        self._over = True
        self._drop()
        if self._hash is not None and self._hash.hexdigest() != self._expected:
            if self._endpoint is not None:
                self._client.mark_down(self._endpoint)
            raise CorruptDataError(
                f"{self._digest} from {self._client.reference.place} has other bytes than its"
                " digest says; they are not used"
            )

    def _drop(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()


def read_bytes(readinto: Callable[[memoryview], int], size: int) -> bytes:
    """The next `size` bytes of a stream, fewer at its end only; all when negative."""
    data = bytearray()
    while size < 0 or len(data) < size:
        length = PIECE_BYTES if size < 0 else min(PIECE_BYTES, size - len(data))
        piece = memoryview(bytearray(length))
        count = readinto(piece)
        if not count:
            break
        data += piece[:count]
    return bytes(data)
