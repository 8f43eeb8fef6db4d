"""Requests to a repository's endpoints: logging in, redirects, pauses and mirrors.

One `RegistryClient` is one repository. An endpoint gets its login; the server that it redirects to
gets the request alone. The address of a blob that a redirect gave is used until it is refused,
then the registry is asked for a new one.
"""

from __future__ import annotations

import functools
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

from bootseer.config.paths import (
    plain_http_hosts,
    registries_conf_files,
    registry_auth_files,
    registry_hosts_directories,
)
from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
    from_os_error,
)
from bootseer.storage.http.exchange import Body, Exchange
from bootseer.storage.http.pool import Pool
from bootseer.storage.http.responses import (
    EXPIRED,
    LONGEST_RETRY_AFTER_S,
    REDIRECTS,
    Origin,
    Target,
    parse_retry_after,
    resolve_location,
)
from bootseer.storage.oci.reference import Reference
from bootseer.storage.oci.registry.auth import Authorizer
from bootseer.storage.oci.registry.challenge import parse_challenges, pull_scope
from bootseer.storage.oci.registry.logins import Login, find_login
from bootseer.storage.oci.registry.mirrors import PULL, Endpoint, MirrorFiles, plan_endpoints
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.system.lru import put_youngest

HOPS = 5
TOO_MANY = 429
PAUSE_S = 1.0  # after a 429 that does not say how long
DOWN_S = 20.0  # how long an endpoint that failed is asked after the others
KNOWN_ADDRESSES = 4096
MOST_PAGES = 1000
ERROR_LIMIT_BYTES = 64 << 10
_CODE = re.compile(r"[A-Z_]{1,40}")

T = TypeVar("T")


class RegistryClient:
    """Asks the endpoints of one repository; any number of threads may use it."""

    def __init__(
        self,
        reference: Reference,
        options: StoreOptions,
        endpoints: Sequence[Endpoint],
        *,
        push: bool = False,
    ) -> None:
        self.reference, self.options = reference, options
        self._endpoints, self._push = endpoints, push
        self._lock = threading.Lock()
        self._pools: dict[tuple[object, ...], Pool] = {}
        self._addresses: dict[tuple[Endpoint, str], Target] = {}
        self._paused_s: dict[Origin, float] = {}
        self._down_s: dict[Endpoint, float] = {}
        self._auth = Authorizer(self._pool_elsewhere, self._login)

    @classmethod
    def from_files(
        cls,
        reference: Reference,
        options: StoreOptions,
        *,
        plain_http: bool | None = None,
        push: bool = False,
    ) -> Self:
        """The client of a repository by this node's files about mirrors and certificates."""
        names = tuple(name.lower() for name in options.plain_http) + plain_http_hosts()
        files = MirrorFiles(tuple(registry_hosts_directories()), tuple(registries_conf_files()))
        if options.ca_file and plain_http is None and reference.host.lower() not in names:
            plain_http = False  # a named authority means TLS, on loopback too
        endpoints = plan_endpoints(reference, plain_http=names, forced=plain_http, files=files)
        return cls(reference, options, endpoints, push=push)

    @property
    def upstream(self) -> Endpoint:
        """The registry itself: only this is written to, and its "not found" is final."""
        return self._endpoints[-1]

    def attempt(self) -> Attempt:
        """An attempt of our own, which no other thread cancels."""
        return Attempt(stall_s=self.options.stall_s)

    def close(self) -> None:
        """Close idle connections; using the client again opens new ones."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    def order(self, ability: str = PULL, attempt: Attempt | None = None) -> list[Endpoint]:
        """The endpoints to ask, in order; at least one.

        An attempt's wishes come first; then those that failed a moment ago wait behind the others.
        Further attempts begin with another endpoint each, since an endpoint may have wrong bytes.
        """
        able = [e for e in self._endpoints if ability in e.abilities] or [self.upstream]
        now_s = time.monotonic()
        with self._lock:
            down = {e for e, until_s in self._down_s.items() if until_s > now_s}
        if attempt is not None and not attempt.prefer and not attempt.avoid:
            turn = attempt.number % len(able)
            able = able[turn:] + able[:turn]
        able.sort(key=lambda e: e in down)
        if attempt is not None:
            able.sort(key=lambda e: (e.authority != attempt.prefer, e.authority in attempt.avoid))
        return able

    def ask_any(
        self,
        call: Callable[[Endpoint], T],
        ability: str = PULL,
        attempt: Attempt | None = None,
        *,
        begun: Callable[[], bool] = lambda: False,
    ) -> T:
        """The answer of the first endpoint that has one; no further one is asked once `begun`.

        Raises the registry's own NotFoundError where it raised one, else the last endpoint's error.
        """
        failed: BootseerError | None = None
        missing: NotFoundError | None = None
        for endpoint in self.order(ability, attempt):
            try:
                return call(endpoint)
            except BootseerError as error:
                if attempt is not None:
                    attempt.replica = endpoint.authority
                    if attempt.cancelled:
                        raise
                failed = error
                if isinstance(error, NotFoundError) and not endpoint.is_mirror:
                    missing = error
                elif not isinstance(error, NotFoundError):
                    self.mark_down(endpoint)
                if begun():
                    raise
        assert failed is not None
        raise missing or failed

    def open(
        self,
        endpoint: Endpoint,
        method: str,
        tail: str,
        headers: Mapping[str, str],
        attempt: Attempt,
        what: str,
    ) -> Exchange:
        """The response at the end of all redirects; the caller checks its status and closes it."""
        key = endpoint, tail
        with self._lock:
            known = self._addresses.get(key)
        if known is not None:
            try:
                exchange = self._send_elsewhere(endpoint, method, known, headers, attempt, what)
            except BootseerError:
                self._forget(key, known)  # the blob may have left a server that is down
                raise
            attempt.replica = endpoint.authority
            if exchange.status not in EXPIRED:
                return exchange
            exchange.close()  # the signature expired: ask where the blob is now
            self._forget(key, known)
        exchange = self.send(endpoint, method, endpoint.target(tail), headers, attempt, what)
        target = Target(endpoint.origin, endpoint.target(tail))
        for _ in range(HOPS):
            if exchange.status not in REDIRECTS:
                break
            with exchange:
                target = resolve_location(target, exchange.headers.get("Location"), what)
            if target.origin == endpoint.origin:
                exchange = self.send(endpoint, method, target.request, headers, attempt, what)
            else:
                exchange = self._send_elsewhere(endpoint, method, target, headers, attempt, what)
        attempt.replica = endpoint.authority
        # A tag's address is never kept: where it leads may change with the tag.
        is_blob = tail.startswith("blobs/")
        if is_blob and exchange.status in (200, 206) and target.origin != endpoint.origin:
            self._remember(key, target)
        return exchange

    def send(
        self,
        endpoint: Endpoint,
        method: str,
        target: str,
        headers: Mapping[str, str],
        attempt: Attempt,
        what: str,
        *,
        body: Body | None = None,
        also: Sequence[str] = (),
    ) -> Exchange:
        """One response of an endpoint, after a login where it wants one; follows no redirects.

        `also` are scopes beyond the repository's own. Raises AccessDeniedError when no login
        satisfies the endpoint, and StoreUnavailableError while it has asked for a pause.
        """
        scopes = (pull_scope(endpoint.repository, push=self._push), *also)
        header = self._auth.header(endpoint, scopes, attempt)
        for is_last in (False, True):
            exchange = self._request(endpoint, method, target, headers, header, attempt, what, body)
            if exchange.status not in (401, 403) or is_last:
                break
            if exchange.status == 403 and not header:
                break  # a refusal that asks for no login
            with exchange:
                given = exchange.headers.get_all("WWW-Authenticate") or ()
                challenges = parse_challenges(given)
            header = self._auth.answer_refusal(endpoint, scopes, challenges, header, attempt)
        if exchange.status in (401, 403):
            with exchange:
                raise AccessDeniedError(
                    f"cannot {what}: {endpoint.authority} answers {exchange.status} to our login;"
                    " check that it may do this"
                )
        return exchange

    def list_pages(
        self,
        endpoint: Endpoint,
        target: str,
        headers: Mapping[str, str],
        what: str,
        parse_page: Callable[[Exchange], Mapping[str, T] | None],
    ) -> dict[str, T] | None:
        """The entries of all pages of a list, by key; None as soon as `parse_page` returns None.

        Entries that come again take no more memory: a Link may lead back to its own page.
        """
        entries: dict[str, T] = {}
        for _ in range(MOST_PAGES):
            with self.send(endpoint, "GET", target, headers, self.attempt(), what) as exchange:
                page = parse_page(exchange)
                following = _next_page(exchange)
            if page is None:
                return None
            entries.update(page)
            if following is None:
                return entries
            target = resolve_location(Target(endpoint.origin, target), following, what).request
        raise CorruptDataError(f"cannot {what}: the list has no end")

    def error(self, exchange: Exchange) -> BootseerError:
        """Our error for a status that the request does not allow, with the registry's code."""
        return exchange.status_error(_error_code(exchange))

    def _request(
        self,
        endpoint: Endpoint,
        method: str,
        target: str,
        headers: Mapping[str, str],
        authorization: str,
        attempt: Attempt,
        what: str,
        body: Body | None,
    ) -> Exchange:
        self._check_pause(endpoint.origin, what)
        sent = {**headers, **dict(endpoint.headers)}
        if authorization:
            sent["Authorization"] = authorization
        exchange = self._pool(endpoint).request(
            endpoint.origin, method, target, headers=sent, attempt=attempt, what=what, body=body
        )
        return self._check_status(endpoint.origin, exchange, what)

    def _send_elsewhere(
        self,
        endpoint: Endpoint,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        attempt: Attempt,
        what: str,
    ) -> Exchange:
        """Ask the server that a redirect leads to, which gets no credentials."""
        self._check_pause(target.origin, what)
        exchange = self._pool_elsewhere(endpoint).request(
            target.origin,
            method,
            target.request,
            headers=headers,
            attempt=attempt,
            what=what,
        )
        return self._check_status(target.origin, exchange, what)

    def _check_status(self, origin: Origin, exchange: Exchange, what: str) -> Exchange:
        asked_s = parse_retry_after(exchange.headers)
        if exchange.status == TOO_MANY or (exchange.status == 503 and asked_s):
            with self._lock:
                self._paused_s[origin] = time.monotonic() + (asked_s or PAUSE_S)
        coding = exchange.headers.get("Content-Encoding", "identity").strip().lower()
        if exchange.status in (200, 206) and coding not in ("", "identity"):
            exchange.close()
            raise NotSupportedError(
                f"cannot {what}: {origin.authority} sends Content-Encoding {coding[:20]} though"
                " none was asked for; switch its compression off"
            )
        return exchange

    def _check_pause(self, origin: Origin, what: str) -> None:
        """Raise while a server has asked for a pause, which holds for all its clients here."""
        with self._lock:
            left_s = self._paused_s.get(origin, 0.0) - time.monotonic()
        if left_s > 0:
            raise StoreUnavailableError(
                f"cannot {what}: {origin.authority} has too many requests and asked for"
                f" {left_s:.1f} s without any",
                retry_after_s=min(left_s, LONGEST_RETRY_AFTER_S),
            )

    def mark_down(self, endpoint: Endpoint) -> None:
        """Note that an endpoint failed: for a while it is asked after the others."""
        with self._lock:
            self._down_s[endpoint] = time.monotonic() + DOWN_S

    def _remember(self, key: tuple[Endpoint, str], target: Target) -> None:
        with self._lock:
            put_youngest(self._addresses, key, target, KNOWN_ADDRESSES)

    def _forget(self, key: tuple[Endpoint, str], target: Target) -> None:
        with self._lock:
            if self._addresses.get(key) == target:  # not one that another thread has learned since
                del self._addresses[key]

    def _login(self, endpoint: Endpoint) -> Login:
        if self.options.token_file and not endpoint.is_mirror:
            from bootseer.storage.token_files import read_token

            return Login(registry_token=read_token(self.options.token_file))
        repository = "" if endpoint.is_mirror else endpoint.repository
        return find_login(registry_auth_files(), endpoint.host, repository)

    def _pool(self, endpoint: Endpoint) -> Pool:
        return self._pool_of(endpoint, endpoint.client_pairs)

    def _pool_elsewhere(self, endpoint: Endpoint) -> Pool:
        """The pool for servers that an endpoint names, which get no client certificate."""
        return self._pool_of(endpoint, ())

    def _pool_of(self, endpoint: Endpoint, pairs: tuple[tuple[str, str], ...]) -> Pool:
        key = (endpoint.ca_files, endpoint.verify_tls, pairs)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                make_context = None
                if any(key[:1]) or not endpoint.verify_tls or pairs:
                    make_context = functools.partial(
                        _context, endpoint, pairs, self.options.ca_file
                    )
                pool = self._pools[key] = Pool(
                    connect_s=self.options.connect_s,
                    ca_file=self.options.ca_file,
                    make_context=make_context,
                )
            return pool


def _context(
    endpoint: Endpoint, pairs: tuple[tuple[str, str], ...], ca_file: str
) -> ssl.SSLContext:
    """A TLS context by an endpoint's settings: their authorities besides the system's."""
    path = ca_file
    try:
        if endpoint.verify_tls:
            context = ssl.create_default_context(cafile=ca_file or None)
        else:  # the system's authorities would not be used
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for path in endpoint.ca_files:
            context.load_verify_locations(path)
        for path, key in pairs:
            context.load_cert_chain(path, key or None)
    except ssl.SSLError as error:
        raise UsageError(f"the certificate file {path} cannot be used; give PEM") from error
    except OSError as error:
        raise from_os_error(error, f"read the certificate file {path}") from error
    if not endpoint.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _next_page(exchange: Exchange) -> str | None:
    """The address of the next page, by a Link header with rel=next; None on the last one."""
    for text in exchange.headers.get_all("Link") or ():
        for part in text.split(","):
            address, _, rest = part.strip().partition(">")
            if address.startswith("<") and 'rel="next"' in rest.replace("rel=next", 'rel="next"'):
                return address[1:]
    return None


def _error_code(exchange: Exchange) -> str:
    """The first code of a registry's error document (BLOB_UNKNOWN, say); "" without one."""
    if not 0 < (exchange.length or 0) <= ERROR_LIMIT_BYTES:
        return ""
    try:
        document = json.loads(exchange.read_all(ERROR_LIMIT_BYTES))
        code = document["errors"][0]["code"]
    except (BootseerError, ValueError, RecursionError, LookupError, TypeError):
        return ""
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""
