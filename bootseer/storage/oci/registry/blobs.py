"""A repository's blobs as a store: read-only, named by digest, read by ranges.

A range is one request to one endpoint. An endpoint that ignores ranges is not asked for one again;
where no other endpoint is left, the blob is fetched whole, once, into a temporary file, and ranges
are read from that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import NotFoundError, NotSupportedError
from bootseer.storage.http.exchange import report_empty
from bootseer.storage.http.responses import (
    check_content_range,
    parse_content_length,
    parse_content_range,
)
from bootseer.storage.oci.manifest import check_bytes
from bootseer.storage.oci.reference import check_digest
from bootseer.storage.oci.registry.blob_stream import RegistryBlobStream
from bootseer.storage.oci.registry.mirrors import PULL, Endpoint
from bootseer.storage.oci.registry.registry_client import RegistryClient
from bootseer.storage.read_only_store import ReadOnlyStore
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retry_call
from bootseer.storage.store import BlockLocation, PreferredReads, Stat, check_limit

if TYPE_CHECKING:
    from bootseer.storage.oci.registry.whole_blob_file import WholeBlobFile

RANGE_BYTES = 16 << 20
STREAMS = 8  # at a time to one registry; they count requests, and many of them limit these


class RangesIgnoredError(NotSupportedError):
    """The server sends whole blobs whatever range it is asked for."""


class BlobStore(ReadOnlyStore):
    """`Store` over the blobs of one repository; any number of threads may use it."""

    kind = "registries"
    unlisted = "a registry does not list its blobs; name them by digest"

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._url = f"oci://{client.reference.place}"
        self._options = client.options
        self._lock = threading.Lock()
        self._rangeless: set[Endpoint] = set()
        self._whole_blobs: dict[str, WholeBlobFile] = {}

    @property
    def url(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"BlobStore({self.url!r})"

    @property
    def preferred(self) -> PreferredReads:
        options = self._options
        return PreferredReads(options.range_bytes or RANGE_BYTES, options.streams or STREAMS)

    def locations(self, name: str) -> list[BlockLocation]:
        """Mirrors and the registry are replicas of each other, where there is more than one."""
        names = tuple(dict.fromkeys(e.authority for e in self._client.order(PULL)))
        replicas = names if len(names) > 1 else ()
        return [BlockLocation(0, self.stat(name).size_bytes, replicas)]

    def close(self) -> None:
        with self._lock:
            files, self._whole_blobs = list(self._whole_blobs.values()), {}
        for file in files:
            file.close()
        self._client.close()

    def stat(self, name: str) -> Stat:
        what = f"look at {check_digest(name)} in {self.url}"

        def ask(endpoint: Endpoint) -> int:
            return self._size(endpoint, name, what)

        size = retry_call(lambda: self._client.ask_any(ask), retry_s=self._options.retry_s)
        return Stat(name, size, 0.0, False, name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        what = f"read {check_digest(name)} in {self.url}"

        def ask(endpoint: Endpoint) -> bytes:
            attempt = self._client.attempt()
            with self._client.open(endpoint, "GET", f"blobs/{name}", {}, attempt, what) as exchange:
                if exchange.status != 200:
                    raise self._client.error(exchange)
                check_limit(f"{name} in {self.url}", exchange.length or 0, limit_bytes)
                data = exchange.read_all(limit_bytes)
            check_bytes(data, name, f"{name} from {endpoint.authority}")
            return data

        return retry_call(lambda: self._client.ask_any(ask), retry_s=self._options.retry_s)

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        retry_call(
            lambda: self.read_scatter(name, offset, [view], self._client.attempt()),
            retry_s=self._options.retry_s,
        )

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        what = f"read {check_digest(name)} in {self.url}"
        if report_empty(buffers, filled):
            return
        begun = False

        def report(number: int) -> None:
            nonlocal begun
            begun = True
            if filled is not None:
                filled(number)

        def ask(endpoint: Endpoint) -> None:
            self._read_from(endpoint, name, offset, buffers, attempt, report, what)

        if self._ranges_are_served():
            try:
                # A buffer that was reported must not be reported again by another endpoint.
                self._client.ask_any(ask, PULL, attempt, begun=lambda: begun)
                return
            except RangesIgnoredError:
                pass
        self._whole_blob(name).read(offset, buffers, attempt, report)

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> RegistryBlobStream:
        """Read a blob from an offset to its end; see `BlobStream`."""
        return RegistryBlobStream(self._client, check_digest(digest), offset, verify=verify)

    def _ranges_are_served(self) -> bool:
        with self._lock:
            return not self._rangeless.issuperset(self._client.order(PULL))

    def _read_from(
        self,
        endpoint: Endpoint,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        report: Callable[[int], None],
        what: str,
    ) -> None:
        total = sum(map(len, buffers))
        with self._lock:
            ignored = endpoint in self._rangeless
        if ignored:
            raise RangesIgnoredError(f"cannot {what}: {endpoint.authority} serves no ranges")
        span = {"Range": f"bytes={offset}-{offset + total - 1}"}
        with self._client.open(endpoint, "GET", f"blobs/{name}", span, attempt, what) as exchange:
            if exchange.status == 200 and (offset or exchange.length != total):
                with self._lock:
                    self._rangeless.add(endpoint)
                raise RangesIgnoredError(f"cannot {what}: {endpoint.authority} serves no ranges")
            if exchange.status == 206:
                shown = f"{name} in {self.url}"
                check_content_range(exchange.headers, exchange.length, offset, total, shown, what)
            elif exchange.status != 200:
                raise self._client.error(exchange)
            exchange.fill(buffers, report)
            exchange.expect_end(total)

    def _whole_blob(self, name: str) -> WholeBlobFile:
        from bootseer.storage.oci.registry.whole_blob_file import WholeBlobFile

        with self._lock:
            file = self._whole_blobs.get(name)
            if file is None or file.failed:
                file = self._whole_blobs[name] = WholeBlobFile(lambda: self.stream(name), name)
            return file

    def _size(self, endpoint: Endpoint, name: str, what: str) -> int:
        """A blob's size, by HEAD, or by a one-byte GET where HEAD is refused or has no length."""
        attempt = self._client.attempt()
        tail = f"blobs/{name}"
        with self._client.open(endpoint, "HEAD", tail, {}, attempt, what) as exchange:
            length = parse_content_length(exchange.headers)
            if exchange.status == 200 and length is not None:
                return length
            if exchange.status == 404:
                raise NotFoundError(f"cannot {what}: {endpoint.authority} does not have it")
        one_byte = {"Range": "bytes=0-0"}
        with self._client.open(endpoint, "GET", tail, one_byte, attempt, what) as exchange:
            span = parse_content_range(exchange.headers.get("Content-Range"))
            if exchange.status == 200 and exchange.length is not None:
                return exchange.length
            if exchange.status not in (206, 416):
                raise self._client.error(exchange)
            if span is None or span.size < 0:
                raise NotSupportedError(f"cannot {what}: the server does not tell its size")
            return span.size
