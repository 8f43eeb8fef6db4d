"""Connections to web servers, kept while idle and lent for one request at a time.

Proxies named by the environment are not used.
"""

from __future__ import annotations

import functools
import http.client
import ssl
import threading
import time
from collections.abc import Callable, Mapping

from bootseer.errors import StoreUnavailableError, UsageError
from bootseer.storage.http.errors import connect_error, transfer_error
from bootseer.storage.http.exchange import Admit, Body, Exchange, Request, is_readable, send_request
from bootseer.storage.http.responses import Origin
from bootseer.storage.request_control import Attempt

IDLE_S = 30.0  # servers close kept connections after 60 s and more
IDLE_CONNECTIONS = 64


class Pool:
    """Idle connections by origin; any number of threads may use one pool.

    `connect_s` bounds connecting and, for TLS, the handshake; `ca_file` is the one authority
    trusted, the system's when empty. `make_context` replaces both for TLS. A context is made for
    the first connection by TLS only: reading a system's authorities takes 20 ms.
    """

    def __init__(
        self,
        *,
        connect_s: float,
        ca_file: str = "",
        make_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._connect_s = connect_s
        self._ca_file = ca_file
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[tuple[float, http.client.HTTPConnection]]] = {}
        self._make_context = make_context
        self._context: ssl.SSLContext | None = None
        self._closings = 0  # connections lent before the last one are not taken back

    def request(
        self,
        origin: Origin,
        method: str,
        target: str,
        *,
        attempt: Attempt,
        what: str,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        admit: Admit | None = None,
    ) -> Exchange:
        """Send one request and wait for the head of its response.

        `what` completes "cannot …" and names the object, without secrets. A kept connection that
        turns out to be closed is replaced once. A `body` that is a function needs a
        Content-Length in `headers`. Raises StoreUnavailableError, and what `admit` raises.
        """
        request = Request(method, target, headers or {}, body, admit)
        # A body in pieces must not be sent twice unasked: it gets a new connection.
        idle = None if callable(body) else self._take(origin)
        try:
            if idle is not None:
                try:
                    return self._send(idle, origin, request, attempt, what)
                except (ConnectionError, http.client.BadStatusLine):
                    pass  # closed by the server while it was idle
            connection = self.connect(origin, what, attempt)
            return self._send(connection, origin, request, attempt, what)
        except (OSError, http.client.HTTPException) as error:
            raise transfer_error(error, origin, what, attempt) from error

    def connect(self, origin: Origin, what: str, attempt: Attempt) -> http.client.HTTPConnection:
        """Open a new connection that is not kept. Raises StoreUnavailableError."""
        if attempt.cancelled:
            raise StoreUnavailableError(f"cannot {what}: it was given up")
        connection: http.client.HTTPConnection
        if origin.tls:
            connection = http.client.HTTPSConnection(
                origin.host, origin.port, timeout=self._connect_s, context=self._tls()
            )
        else:
            connection = http.client.HTTPConnection(
                origin.host, origin.port, timeout=self._connect_s
            )
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise connect_error(error, origin, what) from error
        except UnicodeError as error:
            connection.close()
            raise StoreUnavailableError(
                f"cannot {what}: its server has no name of a host"
            ) from error
        return connection

    def close(self) -> None:
        """Close idle connections, and those in use when they are done; the pool stays usable."""
        with self._lock:
            self._closings += 1
            dropped = [c for idle in self._idle.values() for _, c in idle]
            self._idle.clear()
        for connection in dropped:
            connection.close()

    def _send(
        self,
        connection: http.client.HTTPConnection,
        origin: Origin,
        request: Request,
        attempt: Attempt,
        what: str,
    ) -> Exchange:
        release = functools.partial(self._release, origin, connection, self._closings)
        try:
            return send_request(connection, origin, request, attempt, what, release)
        except BaseException:
            connection.close()
            raise

    def _take(self, origin: Origin) -> http.client.HTTPConnection | None:
        """The connection used last that still looks open."""
        oldest_s = time.monotonic() - IDLE_S
        dropped, usable = [], None
        with self._lock:
            idle = self._idle.get(origin, [])
            while idle and usable is None:
                since_s, connection = idle.pop()
                sock = connection.sock
                # What arrives on an idle connection is its end, or something unasked.
                if since_s < oldest_s or sock is None or is_readable(sock):
                    dropped.append(connection)
                else:
                    usable = connection
        for connection in dropped:
            connection.close()
        return usable

    def _release(
        self,
        origin: Origin,
        connection: http.client.HTTPConnection,
        closings: int,
        reusable: bool,
    ) -> None:
        """Keep a connection for the next request, or close it."""
        if reusable:
            with self._lock:
                idle = self._idle.setdefault(origin, [])
                if len(idle) < IDLE_CONNECTIONS and closings == self._closings:
                    idle.append((time.monotonic(), connection))
                    return
        connection.close()

    def _tls(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None and self._make_context is not None:
                self._context = self._make_context()
            if self._context is None:
                try:
                    self._context = ssl.create_default_context(cafile=self._ca_file or None)
                except (OSError, ssl.SSLError) as error:
                    raise UsageError(
                        f"the CA file {self._ca_file} cannot be used; give PEM certificates"
                    ) from error
            return self._context
