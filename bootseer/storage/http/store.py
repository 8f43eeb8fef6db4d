"""A read-only store of a web server's objects: `http://` and `https://`, by ranges.

Every response is checked before its bytes are used: the status, Content-Range, the length, and,
for an object whose `stat` was taken, that it is still the same one. Redirects are followed here; a
signed address that one led to is used until it is refused. Objects can be neither written nor
listed. Proxies named by the environment are not used.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import BootseerError, CorruptDataError, NotSupportedError
from bootseer.events.redaction import plain_query
from bootseer.storage.http.exchange import Exchange, report_empty
from bootseer.storage.http.pool import Pool
from bootseer.storage.http.redirects import Reach, check_host, check_reach, least_reach
from bootseer.storage.http.responses import (
    DENIED,
    EXPIRED,
    REDIRECTS,
    Headers,
    Target,
    check_content_range,
    origin_of,
    parse_content_length,
    parse_content_range,
    parse_last_modified,
    resolve_location,
)
from bootseer.storage.options import StoreOptions
from bootseer.storage.read_only_store import ReadOnlyStore
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retry_call
from bootseer.storage.store import PreferredReads, Stat, check_limit, check_name
from bootseer.storage.token_files import read_token
from bootseer.storage.urls import parse_url, quote_path
from bootseer.system.lru import put_youngest

RANGE_BYTES = 32 << 20  # where both ends share two cores, 16 MiB cost 0.300 CPU-s/GB, these 0.285
STREAMS = 24
HOPS = 5
MOST_BYTES = (1 << 63) - 1  # as Linux counts them
KNOWN_OBJECTS = 4096  # addresses and validators remembered; the oldest are dropped first


class Redirection(NamedTuple):
    """Where a redirect of `base` leads, and the reach that the address there must have."""

    base: Target
    target: Target
    least: Reach


class HttpStore(ReadOnlyStore):
    """`Store` over the folder of a web server; any number of threads may use it."""

    kind = "http(s) stores"
    unlisted = "HTTP has no folders; name objects"

    def __init__(self, url: str, options: StoreOptions) -> None:
        self._at = parse_url(url)
        if options.auth == "kerberos":
            raise NotSupportedError(
                f"{self._at.shown}: Kerberos is for webhdfs:// and hdfs://; use a token or a user"
            )
        self._options = options
        self._origin = origin_of(self._at.scheme == "https", self._at.hosts[0])
        self._pool = Pool(connect_s=options.connect_s, ca_file=options.ca_file)
        self._lock = threading.Lock()
        self._resolved: dict[str, Redirection] = {}
        self._seen: dict[str, tuple[str, int]] = {}
        query = plain_query(self._at.query)
        self._query_digest = hashlib.sha256(query.encode()).hexdigest()[:12] if query else ""

    @property
    def url(self) -> str:
        return self._at.shown

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    @property
    def preferred(self) -> PreferredReads:
        options = self._options
        return PreferredReads(options.range_bytes or RANGE_BYTES, options.streams or STREAMS)

    def close(self) -> None:
        self._pool.close()

    def stat(self, name: str) -> Stat:
        what = f"look at {check_name(name)} in {self.url}"
        stat = retry_call(lambda: self._stat(name, what), retry_s=self._options.retry_s)
        with self._lock:
            put_youngest(
                self._seen, name, (_strong_tag(stat.version), stat.size_bytes), KNOWN_OBJECTS
            )
        return stat

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        retry_call(
            lambda: self.read_scatter(name, offset, [view], self._attempt()),
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
        what = f"read {check_name(name)} in {self.url}"
        if report_empty(buffers, filled):
            return
        total = sum(map(len, buffers))
        wanted = {"Range": f"bytes={offset}-{offset + total - 1}"}
        with self._open("GET", name, wanted, attempt, what) as exchange:
            self._check_range(exchange, name, offset, total, what)
            exchange.fill(buffers, filled)
            exchange.expect_end(total)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        what = f"read {check_name(name)} in {self.url}"

        def whole() -> bytes:
            with self._open("GET", name, {}, self._attempt(), what) as exchange:
                if exchange.status != 200:
                    raise exchange.status_error()
                check_limit(f"{name} in {self.url}", exchange.length or 0, limit_bytes)
                return exchange.read_all(limit_bytes)

        return retry_call(whole, retry_s=self._options.retry_s)

    def _attempt(self) -> Attempt:
        return Attempt(stall_s=self._options.stall_s)

    def _stat(self, name: str, what: str) -> Stat:
        """By HEAD, or a one-byte GET where HEAD is refused (signed addresses) or has no length."""
        with self._open("HEAD", name, {}, self._attempt(), what) as exchange:
            length = parse_content_length(exchange.headers)
            if exchange.status == 200 and length is not None:
                return self._describe(name, length, exchange.headers)
            if exchange.status not in {200, 400, 405, 501, *DENIED}:
                raise exchange.status_error()
        with self._open("GET", name, {"Range": "bytes=0-0"}, self._attempt(), what) as exchange:
            span = parse_content_range(exchange.headers.get("Content-Range"))
            if exchange.status == 200 and exchange.length is not None:
                return self._describe(name, exchange.length, exchange.headers)
            if exchange.status not in (200, 206, 416):
                raise exchange.status_error()
            if span is None or span.size < 0:
                raise NotSupportedError(f"cannot {what}: the server does not tell its size")
            return self._describe(name, span.size, exchange.headers)

    def _describe(self, name: str, size: int, headers: Headers) -> Stat:
        if size > MOST_BYTES:
            raise NotSupportedError(
                f"cannot look at {name} in {self.url}: the server tells a size that no file can"
                " have; check the server"
            )
        validator = headers.get("ETag") or headers.get("Last-Modified") or ""
        version = f"{validator}:{size}:{self._query_digest}" if validator else ""
        return Stat(name, size, parse_last_modified(headers), False, version)

    def _check_range(
        self, exchange: Exchange, name: str, offset: int, total: int, what: str
    ) -> None:
        """Raise unless the body is exactly the range that was asked for, of the same object."""
        if exchange.status == 200:
            if offset or exchange.length != total:
                raise NotSupportedError(
                    f"cannot {what}: the server ignores ranges and sends the whole of"
                    f" {exchange.length} bytes; use a server that serves ranges"
                )
            size = total
        elif exchange.status == 206:
            shown = f"{name} in {self.url}"
            size = check_content_range(
                exchange.headers, exchange.length, offset, total, shown, what
            )
        else:
            raise exchange.status_error()
        with self._lock:
            tag, known = self._seen.get(name, ("", -1))
        now = _strong_tag(exchange.headers.get("ETag") or "")
        if (tag and now and tag != now) or (known >= 0 and size >= 0 and known != size):
            raise CorruptDataError(
                f"{name} in {self.url} was changed on the server while it was read; open it again"
            )

    def _open(
        self, method: str, name: str, headers: Mapping[str, str], attempt: Attempt, what: str
    ) -> Exchange:
        """The response at the end of all redirects; the caller closes it."""
        with self._lock:
            known = self._resolved.get(name)
        if known is not None:
            try:
                exchange = self._send(method, known.target, headers, attempt, what, known)
            except BootseerError:
                self._forget(name, known)  # the object may have left a server that is down
                raise
            if exchange.status not in EXPIRED:
                return exchange
            exchange.close()  # the signature expired: ask where the object is now
            self._forget(name, known)
        query = f"?{self._at.query}" if self._at.query else ""
        path = f"{self._at.path.rstrip('/')}/{name}"
        target = start = Target(self._origin, quote_path(path) + query)
        by: Redirection | None = None
        for _ in range(HOPS + 1):
            exchange = self._send(method, target, headers, attempt, what, by)
            if exchange.status not in REDIRECTS:
                break
            with exchange:
                by = self._redirection(target, exchange, what)
                target = by.target
        else:
            raise exchange.status_error()
        if by is not None and target != start and exchange.status in (200, 206):
            with self._lock:
                put_youngest(self._resolved, name, by, KNOWN_OBJECTS)
        return exchange

    def _redirection(self, base: Target, exchange: Exchange, what: str) -> Redirection:
        """Where a redirect leads; AccessDeniedError where this store may not follow it."""
        target = resolve_location(base, exchange.headers.get("Location"), what)
        check_host(self._options.redirects, base, target, what)
        return Redirection(base, target, least_reach(self._options.redirects, exchange.peer))

    def _forget(self, name: str, known: Redirection) -> None:
        with self._lock:
            if self._resolved.get(name) == known:  # not one that another thread has learned since
                del self._resolved[name]

    def _send(
        self,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        attempt: Attempt,
        what: str,
        by: Redirection | None,
    ) -> Exchange:
        """Send one request; after the redirect `by`, only to an address that it may lead to."""
        admit = None
        if by is not None and target.origin != self._origin:
            least, base = by.least, by.base

            def admit(peer: str) -> None:
                check_reach(least, peer, base, target, what)

        if target.origin == self._origin:  # no other server learns our credentials
            headers = {**headers, **self._authorization()}
        exchange = self._pool.request(
            target.origin,
            method,
            target.request,
            attempt=attempt,
            what=what,
            headers=headers,
            admit=admit,
        )
        coding = exchange.headers.get("Content-Encoding", "identity").strip().lower()
        if exchange.status in (200, 206) and coding not in ("", "identity"):
            exchange.close()
            raise NotSupportedError(
                f"cannot {what}: the server sends Content-Encoding {coding[:20]} though none was"
                " asked for; switch its compression off for this path"
            )
        return exchange

    def _authorization(self) -> dict[str, str]:
        if self._options.token_file and self._options.auth != "simple":
            return {"Authorization": f"Bearer {read_token(self._options.token_file)}"}
        if self._at.password or self._at.user:
            pair = f"{self._at.user}:{self._at.password}".encode()
            return {"Authorization": "Basic " + base64.b64encode(pair).decode("ascii")}
        return {}


def _strong_tag(text: str) -> str:
    """The ETag at the start of a version, when it is a strong one; else ""."""
    return text[: text.find('"', 1) + 1] if text.startswith('"') else ""
