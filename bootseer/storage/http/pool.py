"""Pooled HTTP/1.1 connections whose bodies land straight in the caller's buffers.

`http.client` sends the request and parses the answer's head; the body is then received from the
socket itself into the destination, without a copy in user space. Proxies of the environment are
not used. One request is one `Exchange`; whether its connection is kept is decided when it ends.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.http.errors import ShortBodyError, broken, unreachable
from bootseer.storage.http.responses import Origin
from bootseer.storage.request_control import Attempt

PIECE_BYTES = 4 << 20  # one system call at most; it ends early after WAIT_S, and by a cancel
IDLE_S = 30.0  # servers close kept connections after 60 s and more
IDLE_CONNECTIONS = 64
DRAIN_BYTES = 64 << 10  # read what is left of a small body rather than connect anew
WAITS = 4  # a wait without a byte is cut into so many at least, so that a stall is seen soon
WAIT_S = 0.25  # and each is this long at most: what a slow body brought shows as progress

Filled = Callable[[int], None]
Admit = Callable[[str], None]
"""Looks at the address of a server before it is sent anything; raises to refuse it."""
Body = bytes | Callable[[], Iterable[bytes]]
"""What a request sends: bytes, or what gives the pieces anew for each try."""


class Pool:
    """Idle connections by origin; any number of threads may use one pool.

    `connect_s` bounds connecting and, for TLS, the handshake; `ca_file` is the one authority
    believed, the system's when empty. Where `make_context` is given, what it returns is used
    instead. Either is made for the first connection by TLS: to read a system's authorities takes
    20 ms.
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
        self.closings = 0
        """How often it was closed: what was lent before the last time is not taken back."""

    def request(
        self,
        origin: Origin,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        attempt: Attempt,
        what: str,
        body: Body | None = None,
        admit: Admit | None = None,
    ) -> Exchange:
        """Send one request and wait for the head of its answer.

        `what` completes "cannot …" and names the object, without secrets. A kept connection that
        turns out to be closed is replaced once. A `body` that is no bytes needs a Content-Length
        in `headers`. Raises StoreUnavailableError, and what `admit` raises.
        """
        # What is sent in pieces must not be sent twice unasked: it gets a new connection.
        connection = None if callable(body) else self._take(origin)
        sent = (method, target, headers, body, admit)
        if connection is not None:
            try:
                return self._exchange(connection, origin, sent, attempt, what)
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()  # closed by the server while it was idle
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise broken(error, origin, what, attempt) from error
            except BootseerError:
                connection.close()
                raise
        connection = self.connect(origin, what, attempt)
        try:
            return self._exchange(connection, origin, sent, attempt, what)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise broken(error, origin, what, attempt) from error
        except BootseerError:
            connection.close()
            raise

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
            raise unreachable(error, origin, what) from error
        except UnicodeError as error:
            connection.close()
            raise StoreUnavailableError(
                f"cannot {what}: its server has no name of a host"
            ) from error
        return connection

    def close(self) -> None:
        """Close all idle connections, and those in use when they are done; it stays usable."""
        with self._lock:
            self.closings += 1
            dropped = [c for idle in self._idle.values() for _, c in idle]
            self._idle.clear()
        for connection in dropped:
            connection.close()

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        origin: Origin,
        sent: tuple[str, str, Mapping[str, str], Body | None, Admit | None],
        attempt: Attempt,
        what: str,
    ) -> Exchange:
        method, target, headers, body, admit = sent
        closings = self.closings
        sock = connection.sock
        peer = _peer_of(sock)
        if admit is not None:
            if not peer:
                raise ConnectionResetError("its server closed it")
            admit(peer)
        sock.settimeout(attempt.stall_s)
        attempt.replica = origin.authority
        attempt.on_cancel(lambda: shut_down(sock))
        try:
            pieces = body() if callable(body) else body
            connection.request(method, target, headers=dict(headers), body=pieces)
            response = connection.getresponse()
        except BaseException:  # the exchange that would take this back never begins
            attempt.on_cancel(None)
            raise
        return Exchange(self, origin, connection, sock, peer, response, attempt, what, closings)

    def _take(self, origin: Origin) -> http.client.HTTPConnection | None:
        """The connection used last that still looks open."""
        old = time.monotonic() - IDLE_S
        dropped, found = [], None
        with self._lock:
            idle = self._idle.get(origin, [])
            while idle and found is None:
                since, connection = idle.pop()
                if since < old or _is_readable(connection.sock):
                    dropped.append(connection)
                else:
                    found = connection
        for connection in dropped:
            connection.close()
        return found

    def _keep(self, origin: Origin, connection: http.client.HTTPConnection, closings: int) -> None:
        with self._lock:
            idle = self._idle.setdefault(origin, [])
            if len(idle) < IDLE_CONNECTIONS and closings == self.closings:
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


class Exchange:
    """One answer: its status and headers, and the body still on its way; a context manager."""

    def __init__(
        self,
        pool: Pool,
        origin: Origin,
        connection: http.client.HTTPConnection,
        sock: socket.socket,
        peer: str,
        response: http.client.HTTPResponse,
        attempt: Attempt,
        what: str,
        closings: int,
    ) -> None:
        self._pool, self._origin, self._connection = pool, origin, connection
        self._sock, self._response, self._attempt, self._what = sock, response, attempt, what
        self.peer = peer
        """The address that answers, in numbers; "" where the connection was cut at once."""
        self.length = response.length
        """Bytes of the body as announced; None when chunked or up to the connection's end."""
        self._closings = closings
        self._left = response.length
        self._raw = False
        self._waits = WAITS
        self.status = response.status
        self.reason = response.reason
        self.headers = response.headers
        self.authority = origin.authority

    def fill(self, buffers: Sequence[memoryview], filled: Filled | None) -> None:
        """Receive the body into all `buffers`; ShortBodyError when it ends before."""
        done, total = 0, sum(map(len, buffers))
        receive = self._receive_decoded if self._left is None else self._receive
        try:
            for number, buffer in enumerate(buffers):
                view = buffer
                while view:
                    count = receive(view)
                    if count == 0:
                        raise self._short(done, total)
                    done += count
                    self._attempt.received_bytes += count
                    view = view[count:]
                if filled is not None:
                    filled(number)
        except (OSError, http.client.HTTPException) as error:
            self._left = None  # not worth another wait
            raise broken(error, self._origin, self._what, self._attempt, done, total) from error

    def receive(self, view: memoryview) -> int:
        """Receive the body's next bytes, of one piece; how many, 0 only at the body's end."""
        receive = self._receive_decoded if self._left is None else self._receive
        try:
            count = receive(view)
        except (OSError, http.client.HTTPException) as error:
            self._left = None
            done = self._attempt.received_bytes
            raise broken(error, self._origin, self._what, self._attempt, done) from error
        if view and not count and self._left:
            raise self._short((self.length or 0) - self._left, self.length or 0)
        self._attempt.received_bytes += count
        return count

    def read_all(self, limit_bytes: int) -> bytes:
        """The whole body; CorruptDataError when it is longer than the limit."""
        parts, size = [], 0
        announced, self._left = self._left, None
        try:
            while size <= limit_bytes:
                # One byte more than allowed tells a body that is too long.
                part = self._response.read(min(PIECE_BYTES, limit_bytes + 1 - size))
                if not part:
                    break
                parts.append(part)
                size += len(part)
        except (OSError, http.client.HTTPException) as error:
            raise broken(error, self._origin, self._what, self._attempt, size) from error
        if announced is not None and size < min(announced, limit_bytes + 1):
            raise self._short(size, announced)
        if size > limit_bytes:
            raise CorruptDataError(
                f"cannot {self._what}: the answer has more than the {limit_bytes} bytes it may have"
            )
        self._left = 0
        return b"".join(parts)

    def expect_end(self, total: int) -> None:
        """CorruptDataError when a body of unannounced length goes on after `total` bytes."""
        try:
            if self._left is None and self._response.read(1):
                raise CorruptDataError(
                    f"cannot {self._what}: the answer goes on after {total} bytes"
                )
        except (OSError, http.client.HTTPException) as error:
            raise broken(error, self._origin, self._what, self._attempt, total) from error
        if self._left is None:
            self._left = 0

    def close(self) -> None:
        """Keep the connection when the answer was read to its end, else close it."""
        self._attempt.on_cancel(None)
        whole = self._left == 0 or self._response.isclosed() or self._drained()
        keep = whole and not self._response.will_close and not self._attempt.cancelled
        self._response.close()
        if keep:
            self._pool._keep(self._origin, self._connection, self._closings)
        else:
            self._connection.close()

    def _drained(self) -> bool:
        """Read what is left of a small body, so that its connection can be kept."""
        if self._left is None or self._left > DRAIN_BYTES or self._response.will_close:
            return False
        view = memoryview(bytearray(self._left))
        try:
            while view and (count := self._receive(view)):
                view = view[count:]
        except (OSError, http.client.HTTPException):
            return False
        return not view

    def _receive(self, view: memoryview) -> int:
        """Receive some of a body of known length; 0 at its end."""
        left = self._left or 0
        view = view[: min(left, PIECE_BYTES)]
        if not view:
            return 0
        if not self._raw:  # whoever read the head may hold the body's first bytes
            ahead = len(self._response.fp.peek(1))
            count: int = self._response.fp.readinto(view[:ahead])
            if ahead <= len(view):
                self._receive_from_socket()
        elif isinstance(self._sock, ssl.SSLSocket):
            count = self._sock.recv_into(view)
        else:
            count = self._receive_plain(view)
        self._left = left - count
        return count

    def _receive_from_socket(self) -> None:
        self._raw = True
        if not isinstance(self._sock, ssl.SSLSocket):
            # Blocking, with the kernel to end a wait, so that one call may fill a whole piece.
            self._sock.settimeout(None)
            wait_s = min(WAIT_S, self._attempt.stall_s / WAITS)
            self._waits = round(self._attempt.stall_s / wait_s)
            micro_s = max(1, int(wait_s * 1e6))
            limit = struct.pack("@ll", *divmod(micro_s, 1_000_000))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def _receive_plain(self, view: memoryview) -> int:
        # Not SO_RCVLOWAT: it saves wakings, but delays acknowledgements, which cost 4x the speed.
        for _ in range(self._waits):
            try:
                return self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
        raise TimeoutError

    def _receive_decoded(self, view: memoryview) -> int:
        return self._response.readinto(view[:PIECE_BYTES])

    def _short(self, done: int, total: int) -> BootseerError:
        if self._attempt.cancelled:
            return StoreUnavailableError(f"cannot {self._what}: it was given up")
        return ShortBodyError(
            f"cannot {self._what}: {self._origin.authority} ended the answer after {done} of"
            f" {total} bytes"
        )

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self._left = None  # interrupted: close, wait for nothing
        self.close()


def shut_down(sock: socket.socket) -> None:
    """Wake whoever waits on a socket; the descriptor stays. Safe from any thread."""
    try:
        # Not SSLSocket's own method: it drops the TLS state under the reader's feet.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more


def _peer_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""  # not connected any more: what is sent next says why


def _is_readable(sock: socket.socket | None) -> bool:
    """Whether an idle connection was closed by the server (or says what nobody asked)."""
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
