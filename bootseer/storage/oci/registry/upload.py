"""Pushing blobs to a registry, in one request or in chunks.

Source: the distribution specification, "Pushing blobs". A chunked upload that was cut goes on
from the offset that the registry reports.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    from_os_error,
)
from bootseer.storage.http.exchange import Body, Exchange
from bootseer.storage.http.responses import Target, resolve_location
from bootseer.storage.oci.registry.registry_client import RegistryClient
from bootseer.storage.retry import LONGEST_WAIT_S, backoff_s, retry_call

if TYPE_CHECKING:
    from bootseer.storage.oci.repository import Progress

CHUNK_BYTES = 64 << 20  # a blob up to this size goes in one piece
PIECE_BYTES = 1 << 20
COMMIT_BYTES_S = 32 << 20  # how fast a registry, when all is there, may hash or copy a blob
OCTETS = {"Content-Type": "application/octet-stream"}
HEAD_REFUSED = frozenset((400, 401, 403, 405, 501))
CHUNKS_REFUSED = frozenset((400, 404, 405, 411, 415, 416, 501))
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,19})")


@dataclasses.dataclass(frozen=True, slots=True)
class BlobSource:
    """A blob to be pushed: bytes, or a file by its path, with the digest that it should have."""

    data: str | bytes
    digest: str
    size_bytes: int

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        """Bytes `[start, end)`, piece by piece; CorruptDataError when the file is shorter."""
        if isinstance(self.data, bytes):
            yield from (
                self.data[at : min(at + PIECE_BYTES, end)] for at in range(start, end, PIECE_BYTES)
            )
            return
        with open(self.data, "rb", buffering=0) as file:
            file.seek(start)
            while start < end:
                piece = file.read(min(PIECE_BYTES, end - start))
                if not piece:
                    raise CorruptDataError(f"{self.data} became shorter while it was pushed")
                start += len(piece)
                yield piece

    def check(self) -> None:
        """Raise CorruptDataError unless the bytes have the size and the digest."""
        algorithm, _, expected = self.digest.partition(":")
        actual = hashlib.new(algorithm)
        name = self.data if isinstance(self.data, str) else "the blob"
        try:
            size = len(self.data) if isinstance(self.data, bytes) else os.stat(self.data).st_size
            if size == self.size_bytes:
                for piece in self.pieces(0, size):
                    actual.update(piece)
        except OSError as error:
            raise from_os_error(error, f"read {name}") from error
        if size != self.size_bytes or actual.hexdigest() != expected:
            raise CorruptDataError(f"{name} is not what {self.digest} names; it is not pushed")


class Uploader:
    """Pushes blobs to one repository of a registry."""

    def __init__(self, client: RegistryClient, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._client, self._chunk_bytes = client, chunk_bytes
        self._endpoint = client.upstream
        self._place = client.reference.place

    def has(self, digest: str) -> bool:
        """Whether the registry itself holds a blob."""
        what = f"look for {digest} in {self._place}"

        def ask() -> bool:
            holds = self._holds("HEAD", digest, what)
            # An address that was signed for GET refuses HEAD.
            return self._holds("GET", digest, what) is True if holds is None else holds

        return retry_call(ask, retry_s=self._client.options.retry_s)

    def _holds(self, method: str, digest: str, what: str) -> bool | None:
        """Whether the registry has a blob; None when the address that it redirects to refuses."""
        headers = {"Range": "bytes=0-0"} if method == "GET" else {}
        attempt, tail = self._client.attempt(), f"blobs/{digest}"
        with self._client.open(self._endpoint, method, tail, headers, attempt, what) as exchange:
            if exchange.status in (200, 206, 404, 416):  # 416: of an empty blob
                return exchange.status != 404
            elsewhere = exchange.authority != self._endpoint.authority
            if method == "HEAD" and elsewhere and exchange.status in HEAD_REFUSED:
                return None
            raise self._client.error(exchange)

    def push(self, source: BlobSource, progress: Progress | None) -> bool:
        """Store a blob; False when nothing had to be sent."""
        source.check()
        if self.has(source.digest):
            if progress is not None:
                progress(source.size_bytes)
            return False
        meter = _ProgressMeter(progress)
        if source.size_bytes > self._chunk_bytes and self._push_in_chunks(source, meter):
            return True
        self._push_at_once(source, meter)
        return True

    def _push_at_once(self, source: BlobSource, meter: _ProgressMeter) -> None:
        what = f"push {source.digest} to {self._place}"

        def put() -> None:
            meter.reset()
            at = self._begin(what)
            target = f"{at}{'&' if '?' in at else '?'}digest={quote(source.digest, safe='')}"
            headers = {**OCTETS, "Content-Length": str(source.size_bytes)}

            def body() -> Iterator[bytes]:
                return meter.counting(source.pieces(0, source.size_bytes))

            more_s = source.size_bytes / COMMIT_BYTES_S
            with self._send("PUT", target, headers, what, body=body, more_s=more_s) as exchange:
                self._check_finished(exchange, source, what)

        retry_call(put, retry_s=self._client.options.retry_s)

    def _push_in_chunks(self, source: BlobSource, meter: _ProgressMeter) -> bool:
        """Push chunk after chunk; False when the registry takes no chunks."""
        what = f"push {source.digest} to {self._place}"
        meter.reset()
        at, done, failures = self._begin(what), 0, 0
        while done < source.size_bytes:
            try:
                before = done
                at, done, refused = self._push_chunk(source, at, done, meter, what)
                # A registry that has no more than before, or more than the blob, miscounts.
                miscounted = not refused and not before < done <= source.size_bytes
                if miscounted or (refused and not failures):
                    self._abandon(at)
                    return False
                if refused:
                    raise StoreUnavailableError(f"cannot {what}: the registry lost the upload")
                failures = 0
            except StoreUnavailableError as error:
                failures += 1
                if failures > self._client.options.retry_s / LONGEST_WAIT_S + 3:
                    raise
                time.sleep(backoff_s(failures, error=error))
                at, done = self._find_upload(at, done, what)
        target = f"{at}{'&' if '?' in at else '?'}digest={quote(source.digest, safe='')}"
        headers = {"Content-Length": "0"}

        def put() -> None:
            more_s = source.size_bytes / COMMIT_BYTES_S
            with self._send("PUT", target, headers, what, more_s=more_s) as exchange:
                if exchange.status == 404 and self.has(source.digest):
                    return  # the answer to the attempt before was lost
                self._check_finished(exchange, source, what)

        retry_call(put, retry_s=self._client.options.retry_s)
        return True

    def _push_chunk(
        self, source: BlobSource, at: str, done: int, meter: _ProgressMeter, what: str
    ) -> tuple[str, int, bool]:
        """Push one chunk; the upload's address, its size so far, and whether it was refused."""
        end = min(done + self._chunk_bytes, source.size_bytes)
        headers = {
            **OCTETS,
            "Content-Length": str(end - done),
            "Content-Range": f"{done}-{end - 1}",
        }
        meter.reset(done)

        def body() -> Iterator[bytes]:
            return meter.counting(source.pieces(done, end))

        with self._send("PATCH", at, headers, what, body=body) as exchange:
            if exchange.status in (201, 202, 204):
                size = _uploaded_bytes(exchange)
                location = exchange.headers.get("Location")
                return self._location(exchange, what) if location else at, size or end, False
            if exchange.status in CHUNKS_REFUSED:
                return at, done, True
            raise self._client.error(exchange)

    def _find_upload(self, at: str, done: int, what: str) -> tuple[str, int]:
        """An upload's address and its size so far; a new one of size 0 when it was lost."""

        def ask() -> tuple[str, int]:
            with self._send("GET", at, {}, what) as exchange:
                if exchange.status == 404:
                    raise NotFoundError
                if exchange.status not in (200, 202, 204):
                    raise self._client.error(exchange)
                location = exchange.headers.get("Location")
                at_now = self._location(exchange, what) if location else at
                return at_now, _uploaded_bytes(exchange)

        try:
            return retry_call(ask, retry_s=self._client.options.retry_s)
        except NotFoundError:
            return self._begin(what), 0

    def _begin(self, what: str) -> str:
        """Open an upload; returns its address."""

        def post() -> str:
            target = self._endpoint.target("blobs/uploads/")
            with self._send("POST", target, {"Content-Length": "0"}, what) as exchange:
                if exchange.status != 202:
                    raise self._client.error(exchange)
                return self._location(exchange, what)

        return retry_call(post, retry_s=self._client.options.retry_s)

    def _abandon(self, at: str) -> None:
        """Cancel an upload; the registry drops it after some time anyway."""
        try:
            self._send("DELETE", at, {}, f"end an upload to {self._place}").close()
        except BootseerError:
            pass

    def _location(self, exchange: Exchange, what: str) -> str:
        base = Target(self._endpoint.origin, self._endpoint.target("blobs/uploads/"))
        target = resolve_location(base, exchange.headers.get("Location"), what)
        if target.origin != self._endpoint.origin:
            raise NotSupportedError(
                f"cannot {what}: {self._endpoint.authority} wants the upload sent to another"
                " server; name that one, or correct the address that the registry believes it has"
            )
        return target.request

    def _check_finished(self, exchange: Exchange, source: BlobSource, what: str) -> None:
        if exchange.status in (201, 204):
            return
        if exchange.status == 400:
            raise StoreUnavailableError(
                f"cannot {what}: {exchange.authority} says that it got other bytes than"
                f" {source.digest} names"
            )
        raise self._client.error(exchange)

    def _send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        what: str,
        *,
        body: Body | None = None,
        more_s: float = 0.0,
    ) -> Exchange:
        """Send one request; `more_s` is added to the time that a silent server may take."""
        attempt = self._client.attempt()
        attempt.stall_s += more_s
        return self._client.send(
            self._endpoint,
            method,
            target,
            headers,
            attempt,
            what,
            body=body,
        )


class _ProgressMeter:
    """Reports progress, never of the same bytes twice."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._reported, self._offset = progress, 0, 0

    def reset(self, offset: int = 0) -> None:
        """Go on from an offset: bytes before it were reported, or are sent again."""
        self._offset = offset

    def counting(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The pieces, each reported once it was sent."""
        offset = self._offset
        for piece in pieces:
            yield piece
            offset += len(piece)
            if self._progress is not None and offset > self._reported:
                self._progress(offset - self._reported)
                self._reported = offset


def _uploaded_bytes(exchange: Exchange) -> int:
    """Bytes of an upload that the registry reports to have; 0 when it reports none."""
    match = _RANGE.fullmatch((exchange.headers.get("Range") or "").strip())
    last = int(match[1]) if match else 0
    return last + 1 if last else 0  # "0-0" is said of an empty upload
