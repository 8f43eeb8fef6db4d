"""Putting blobs into a registry: mounted from a neighbour, in one piece, or in chunks.

Source: the distribution specification, "Pushing blobs". A chunked upload that was cut goes on
where the registry says that it stands.
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
from bootseer.storage.oci.registry.challenge import pull_scope
from bootseer.storage.oci.registry.registry_client import Client
from bootseer.storage.retry import FIRST_WAIT_S, LONGEST_WAIT_S, retrying
from bootseer.system.randomness import CHANCE

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
class Source:
    """A blob to be stored: bytes, or a file by its path, with the digest that it should have."""

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
        """CorruptDataError unless this is what its digest says."""
        algorithm, _, expected = self.digest.partition(":")
        found = hashlib.new(algorithm)
        name = self.data if isinstance(self.data, str) else "the blob"
        try:
            size = len(self.data) if isinstance(self.data, bytes) else os.stat(self.data).st_size
            if size == self.size_bytes:
                for piece in self.pieces(0, size):
                    found.update(piece)
        except OSError as error:
            raise from_os_error(error, f"read {name}") from error
        if size != self.size_bytes or found.hexdigest() != expected:
            raise CorruptDataError(f"{name} is not what {self.digest} names; it is not pushed")


class Uploader:
    """Stores blobs in one repository of a registry."""

    def __init__(self, client: Client, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._client, self._chunk_bytes = client, chunk_bytes
        self._endpoint = client.own
        self._place = client.reference.place

    def has(self, digest: str) -> bool:
        """Whether the registry itself holds a blob."""
        what = f"look for {digest} in {self._place}"

        def ask() -> bool:
            found = self._holds("HEAD", digest, what)
            # Where it was sent to an address that was signed for reading, asking is refused.
            return self._holds("GET", digest, what) is True if found is None else found

        return retrying(ask, retry_s=self._client.options.retry_s)

    def _holds(self, method: str, digest: str, what: str) -> bool | None:
        """What the registry says, or whom it redirects to; None when that one would not say."""
        headers = {"Range": "bytes=0-0"} if method == "GET" else {}
        attempt, tail = self._client.attempt(), f"blobs/{digest}"
        with self._client.open(self._endpoint, method, tail, headers, attempt, what) as exchange:
            if exchange.status in (200, 206, 404, 416):  # 416: of an empty blob
                return exchange.status != 404
            elsewhere = exchange.authority != self._endpoint.authority
            if method == "HEAD" and elsewhere and exchange.status in HEAD_REFUSED:
                return None
            raise self._client.error(exchange, what)

    def push(self, source: Source, mount_from: str, progress: Progress | None) -> bool:
        """Store a blob; False when nothing had to be sent."""
        source.check()
        if self.has(source.digest) or (mount_from and self._mount(source.digest, mount_from)):
            if progress is not None:
                progress(source.size_bytes)
            return False
        told = _Told(progress)
        if source.size_bytes > self._chunk_bytes and self._in_chunks(source, told):
            return True
        self._in_one_piece(source, told)
        return True

    def _mount(self, digest: str, mount_from: str) -> bool:
        """Have a blob of another repository shown here; False when the registry would not."""
        what = f"mount {digest} into {self._place}"
        query = f"mount={quote(digest, safe='')}&from={quote(mount_from, safe='')}"
        target = self._endpoint.target("blobs/uploads/", query)
        try:
            with self._send("POST", target, {}, what, also=(pull_scope(mount_from),)) as exchange:
                if exchange.status == 202:  # an upload was opened instead: it is not wanted
                    self._abandon(self._location(exchange, what))
                return exchange.status == 201
        except BootseerError:
            return False  # the right to read the neighbour, say: it is sent then

    def _in_one_piece(self, source: Source, told: _Told) -> None:
        what = f"push {source.digest} to {self._place}"

        def put() -> None:
            told.reset()
            at = self._begin(what)
            target = f"{at}{'&' if '?' in at else '?'}digest={quote(source.digest, safe='')}"
            headers = {**OCTETS, "Content-Length": str(source.size_bytes)}

            def body() -> Iterator[bytes]:
                return told.counting(source.pieces(0, source.size_bytes))

            more_s = source.size_bytes / COMMIT_BYTES_S
            with self._send("PUT", target, headers, what, body=body, more_s=more_s) as exchange:
                self._finished(exchange, source, what)

        retrying(put, retry_s=self._client.options.retry_s)

    def _in_chunks(self, source: Source, told: _Told) -> bool:
        """Send chunk after chunk; False when the registry takes no chunks."""
        what = f"push {source.digest} to {self._place}"
        told.reset()
        at, done, failures = self._begin(what), 0, 0
        while done < source.size_bytes:
            try:
                before = done
                at, done, refused = self._chunk(source, at, done, told, what)
                # One that has no more than before, or more than there is, cannot count.
                astray = not refused and not before < done <= source.size_bytes
                if astray or (refused and not failures):
                    self._abandon(at)
                    return False
                if refused:
                    raise StoreUnavailableError(f"cannot {what}: the registry lost the upload")
                failures = 0
            except StoreUnavailableError as error:
                failures += 1
                if failures > self._client.options.retry_s / LONGEST_WAIT_S + 3:
                    raise
                self._wait(failures, error)
                at, done = self._standing(at, done, what)
        target = f"{at}{'&' if '?' in at else '?'}digest={quote(source.digest, safe='')}"
        headers = {"Content-Length": "0"}

        def put() -> None:
            more_s = source.size_bytes / COMMIT_BYTES_S
            with self._send("PUT", target, headers, what, more_s=more_s) as exchange:
                if exchange.status == 404 and self.has(source.digest):
                    return  # the answer to the try before was lost
                self._finished(exchange, source, what)

        retrying(put, retry_s=self._client.options.retry_s)
        return True

    def _chunk(
        self, source: Source, at: str, done: int, told: _Told, what: str
    ) -> tuple[str, int, bool]:
        """Send one chunk; where to go on, the bytes that are there, and whether it was refused."""
        end = min(done + self._chunk_bytes, source.size_bytes)
        headers = {
            **OCTETS,
            "Content-Length": str(end - done),
            "Content-Range": f"{done}-{end - 1}",
        }
        told.reset(done)

        def body() -> Iterator[bytes]:
            return told.counting(source.pieces(done, end))

        with self._send("PATCH", at, headers, what, body=body) as exchange:
            if exchange.status in (201, 202, 204):
                stands = _standing_at(exchange)
                location = exchange.headers.get("Location")
                return self._location(exchange, what) if location else at, stands or end, False
            if exchange.status in CHUNKS_REFUSED:
                return at, done, True
            raise self._client.error(exchange, what)

    def _standing(self, at: str, done: int, what: str) -> tuple[str, int]:
        """Where an upload is and how many bytes of it are there; from 0 when it is gone."""

        def ask() -> tuple[str, int]:
            with self._send("GET", at, {}, what) as exchange:
                if exchange.status == 404:
                    raise NotFoundError
                if exchange.status not in (200, 202, 204):
                    raise self._client.error(exchange, what)
                location = exchange.headers.get("Location")
                return self._location(exchange, what) if location else at, _standing_at(exchange)

        try:
            return retrying(ask, retry_s=self._client.options.retry_s)
        except NotFoundError:
            return self._begin(what), 0

    def _begin(self, what: str) -> str:
        """Open an upload; where it is."""

        def post() -> str:
            target = self._endpoint.target("blobs/uploads/")
            with self._send("POST", target, {"Content-Length": "0"}, what) as exchange:
                if exchange.status != 202:
                    raise self._client.error(exchange, what)
                return self._location(exchange, what)

        return retrying(post, retry_s=self._client.options.retry_s)

    def _abandon(self, at: str) -> None:
        """Tell the registry that an upload will not go on; it forgets it in time anyway."""
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

    def _finished(self, exchange: Exchange, source: Source, what: str) -> None:
        if exchange.status in (201, 204):
            return
        if exchange.status == 400:
            raise StoreUnavailableError(
                f"cannot {what}: {exchange.authority} says that it got other bytes than"
                f" {source.digest} names"
            )
        raise self._client.error(exchange, what)

    def _send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        what: str,
        *,
        body: Body | None = None,
        also: tuple[str, ...] = (),
        more_s: float = 0.0,
    ) -> Exchange:
        """One request; `more_s` is waited for its answer beyond what a silent server may take."""
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
            also=also,
        )

    def _wait(self, failures: int, error: StoreUnavailableError) -> None:
        most_s = min(FIRST_WAIT_S * 2.0**failures, LONGEST_WAIT_S)
        time.sleep(max(CHANCE.uniform(0, most_s), error.retry_after_s))


class _Told:
    """Tells of progress, never of the same bytes twice."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._told, self._at = progress, 0, 0

    def reset(self, at: int = 0) -> None:
        self._at = at

    def counting(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        begin = self._at
        for piece in pieces:
            yield piece
            begin += len(piece)
            if self._progress is not None and begin > self._told:
                self._progress(begin - self._told)
                self._told = begin


def _standing_at(exchange: Exchange) -> int:
    """Bytes that the registry says it has; 0 when it says nothing."""
    match = _RANGE.fullmatch((exchange.headers.get("Range") or "").strip())
    last = int(match[1]) if match else 0
    return last + 1 if last else 0  # "0-0" is said of an empty upload
