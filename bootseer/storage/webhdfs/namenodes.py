"""Calls to NameNodes: authentication, fail-over between them, retries, and redirects to data.

Calls without data go through `requests`, whose sessions carry cookies and SPNEGO. A delegation
token is appended to the request line below `requests` and `urllib3`, so that neither can put it
into a log or an exception; a redirect's address leaves this module only as a `Target`, whose repr
hides it. The environment (proxies, .netrc, CA variables) is not read.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pwd
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    NotSupportedError,
    StoreUnavailableError,
    UselessAnswerError,
)
from bootseer.storage.hdfs.remote_exceptions import from_remote_exception, is_standby
from bootseer.storage.http.errors import header_excess
from bootseer.storage.http.exchange import HEADERS
from bootseer.storage.http.responses import (
    REDIRECTS,
    Target,
    origin_of,
    parse_retry_after,
    resolve_location,
    response_error,
)
from bootseer.storage.options import StoreOptions
from bootseer.storage.retry import retry_call
from bootseer.storage.token_files import read_token
from bootseer.storage.urls import StoreUrl
from bootseer.storage.webhdfs.protocol import (
    Parameters,
    keep_path,
    parse_json,
    parse_remote_exception,
    request_path,
)

try:
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.connection import HTTPConnection, HTTPSConnection
except ImportError as missing:
    raise NotSupportedError(
        "webhdfs:// needs the package requests; install it with: pip install 'bootseer[webhdfs]'"
    ) from missing


class NameNodes:
    """The NameNodes of one cluster; any number of threads may call."""

    def __init__(self, at: StoreUrl, options: StoreOptions) -> None:
        self._at, self._options = at, options
        self.tls = at.scheme == "webhdfss"
        self._hosts = tuple(dict.fromkeys((*at.hosts, *options.hosts)))
        self._lock = threading.Lock()
        self._active = 0
        self._sessions: list[requests.Session] = []
        self._kerberos = options.auth == "kerberos"
        self._token = "" if self._kerberos else at.parameter("delegation")
        has_token = bool(self._token or (options.token_file and not self._kerberos))
        if options.auth == "token" and not has_token:
            raise AccessDeniedError(
                f"{at.shown}: auth is token but there is none; name a token_file"
            )
        self._uses_token = has_token and options.auth != "simple"

    def close(self) -> None:
        """Close idle connections; the next call opens new ones."""
        with self._lock:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()

    def call(
        self,
        method: str,
        path: str,
        op: str,
        parameters: Parameters,
        what: str,
        *,
        retry_s: float | None = None,
    ) -> dict[str, Any]:
        """Make one call and return its JSON; transient faults are retried for `retry_s`."""

        def once() -> dict[str, Any]:
            request = request_path(path, op, self._with_user(parameters))
            with self._ask(method, request, what) as response:
                return parse_json(response.content, what)

        return retry_call(once, retry_s=self._options.retry_s if retry_s is None else retry_s)

    def beans(self, query: str, what: str) -> dict[str, Any]:
        """The NameNode's JMX page, which any user may read on most clusters."""
        with self._ask("GET", f"/jmx?qry={quote(query, safe=':,=')}", what) as response:
            return parse_json(response.content, what)

    def redirect(
        self,
        method: str,
        path: str,
        op: str,
        parameters: Parameters,
        what: str,
        *,
        retry_s: float = 0.0,
        stall_s: float | None = None,
    ) -> Target:
        """Where the NameNode sends a request with data. Nothing is changed by asking."""
        request = request_path(path, op, self._with_user(parameters))

        def once() -> Target:
            with self._ask(method, f"{request}&noredirect=true", what, stall_s) as response:
                here = Target(origin_of(self.tls, _authority_of(response)), request)
                if response.status_code in REDIRECTS:
                    location = response.headers.get("Location")
                elif "json" in response.headers.get("Content-Type", ""):
                    location = str(parse_json(response.content, what).get("Location") or "")
                else:
                    # A gateway (HttpFS) serves data itself: ask it on a connection of ours.
                    secret = [("delegation", self._secret())] if self._uses_token else []
                    parts = self._with_user(parameters) + secret
                    return Target(here.origin, request_path(path, op, parts))
                return keep_path(here, resolve_location(here, location, what))

        return retry_call(once, retry_s=retry_s)

    def _with_user(self, parameters: Parameters) -> Parameters:
        if self._kerberos or self._uses_token:
            return parameters
        return [*parameters, ("user.name", self._user())]

    def _user(self) -> str:
        return (
            self._options.user or self._at.user or self._at.parameter("user.name") or _login_name()
        )

    def _secret(self) -> str:
        return self._token or read_token(self._options.token_file)

    @contextlib.contextmanager
    def _ask(
        self, method: str, request: str, what: str, stall_s: float | None = None
    ) -> Iterator[requests.Response]:
        """A successful response of the active NameNode, which is looked for among all."""
        with self._lock:
            first = self._active
            session = self._sessions.pop() if self._sessions else None
        session = session or self._new_session()
        failed: BootseerError | None = None
        try:
            for turn in range(len(self._hosts)):
                number = (first + turn) % len(self._hosts)
                host = self._hosts[number]
                try:
                    response = self._send(session, host, method, request, what, stall_s)
                except StoreUnavailableError as error:
                    if failed is None or not isinstance(error, _StandbyError):
                        failed = error  # the active one's fault says more than a stand-by
                    continue
                with self._lock:
                    self._active = number
                with response:
                    try:
                        yield response
                    except (requests.RequestException, http.client.HTTPException) as error:
                        raise _map_error(error, host, what) from error
                return
            raise failed or StoreUnavailableError(f"cannot {what}: no NameNode is named")
        finally:
            with self._lock:
                self._sessions.append(session)

    def _send(
        self,
        session: requests.Session,
        host: str,
        method: str,
        request: str,
        what: str,
        stall_s: float | None,
    ) -> requests.Response:
        scheme = "https" if self.tls else "http"
        try:
            response = session.request(
                method,
                f"{scheme}://{host}{request}",
                allow_redirects=False,
                stream=True,
                timeout=(self._options.connect_s, stall_s or self._options.stall_s),
                verify=self._options.ca_file or True,
                headers=HEADERS,
            )
            if response.status_code < 400:
                return response
            with response:
                body = response.content
        except (requests.RequestException, http.client.HTTPException, OSError) as error:
            raise _map_error(error, host, what) from error
        remote = parse_remote_exception(body)
        if remote is None:
            if response.status_code == 401 and self._kerberos:
                raise AccessDeniedError(
                    f"cannot {what}: {host} does not accept our Kerberos ticket; run kinit"
                )
            raise response_error(
                response.status_code, response.reason, response.headers, host, what
            )
        if is_standby(remote):
            raise _StandbyError(
                f"cannot {what}: the NameNode {host} is on stand-by; name the others too"
            )
        retry_after_s = parse_retry_after(response.headers)
        raise from_remote_exception(remote, what, retry_after_s=retry_after_s)

    def _new_session(self) -> requests.Session:
        session = requests.Session()
        session.trust_env = False
        if self._uses_token:
            adapter = _TokenAdapter(self._secret)
            session.mount("http://", adapter)
            session.mount("https://", adapter)
        if self._kerberos:
            session.auth = _spnego()
        return session


class _StandbyError(StoreUnavailableError):
    """The NameNode is up, but not the active one."""


class _TokenAdapter(HTTPAdapter):
    """Appends the token to the request line below the layers that log and raise."""

    def __init__(self, secret: Callable[[], str]) -> None:
        self._secret_text = secret
        super().__init__(pool_connections=4, pool_maxsize=1, max_retries=0)

    def init_poolmanager(self, *args: Any, **settings: Any) -> None:
        super().init_poolmanager(*args, **settings)
        secret = self._secret_text

        class Plain(HTTPConnection):
            def putrequest(self, method: str, url: str, *args: Any, **more: Any) -> None:
                super().putrequest(method, _with_token(url, secret()), *args, **more)

        class Secure(HTTPSConnection):
            def putrequest(self, method: str, url: str, *args: Any, **more: Any) -> None:
                super().putrequest(method, _with_token(url, secret()), *args, **more)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}


def _authority_of(response: requests.Response) -> str:
    return (response.url or "").partition("://")[2].partition("/")[0]


def _login_name() -> str:
    """The process's user as HDFS names it under simple authentication."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _with_token(request: str, token: str) -> str:
    return f"{request}{'&' if '?' in request else '?'}delegation={quote(token, safe='')}"


def _spnego() -> Any:
    try:
        from requests_gssapi import OPTIONAL, HTTPSPNEGOAuth
    except (ImportError, OSError) as error:
        raise NotSupportedError(
            "auth kerberos needs requests-gssapi and the system's Kerberos library; install them"
            " with: pip install 'bootseer[kerberos]', and libkrb5 by the system's packages"
        ) from error
    return HTTPSPNEGOAuth(mutual_authentication=OPTIONAL)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, which requests and urllib3 pass on as its arguments."""
    pending: list[object] = [error]
    while pending:
        cause = pending.pop()
        if isinstance(cause, BaseException):
            yield cause
            pending += cause.args


def _map_error(error: Exception, host: str, what: str) -> BootseerError:
    for cause in _causes(error):
        excess = header_excess(cause)
        if excess:
            return UselessAnswerError(f"cannot {what}: {host} {excess}")
    if isinstance(error, requests.exceptions.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return AccessDeniedError(
                f"cannot {what}: the certificate of {host} is not trusted; name its authority's"
                " file as ca_file"
            )
        return StoreUnavailableError(f"cannot {what}: {host} speaks no TLS that we do")
    if isinstance(error, requests.exceptions.ConnectTimeout):
        return StoreUnavailableError(f"cannot {what}: {host} is not reachable (no answer in time)")
    if isinstance(error, requests.exceptions.Timeout):
        return StoreUnavailableError(f"cannot {what}: {host} did not answer in time")
    if isinstance(error, OSError) and "CA" in str(error) and "path" in str(error):
        return NotSupportedError(f"cannot {what}: the CA file cannot be read; check ca_file")
    if isinstance(error, requests.exceptions.ConnectionError):
        if "NameResolutionError" in str(error):
            return StoreUnavailableError(
                f"cannot {what}: {host} is not reachable (no such host is known here)"
            )
        return StoreUnavailableError(f"cannot {what}: {host} is not reachable or cut us off")
    return StoreUnavailableError(f"cannot {what}: {host} failed ({type(error).__name__})")
