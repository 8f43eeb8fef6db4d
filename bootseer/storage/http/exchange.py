"""One HTTP/1.1 request on one connection, and its response.

`http.client` sends the request and parses the response's head; the body is then received from the
socket itself into the caller's buffers, without a copy in user space.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.storage.http.errors import ShortBodyError, transfer_error
from bootseer.storage.http.responses import Origin, response_error
from bootseer.storage.request_control import Attempt

HEADERS = {"Accept-Encoding": "identity", "User-Agent": "bootseer"}
PIECE_BYTES = 4 << 20  # one system call at most; it ends early after WAIT_S, and by a cancel
DRAIN_BYTES = 64 << 10  # read what is left of a small body rather than connect again
WAITS = 4  # a wait without a byte is cut into so many at least, so that a stall is seen soon
WAIT_S = 0.25  # and each is this long at most: what a slow body brought shows as progress

Filled = Callable[[int], None]
Admit = Callable[[str], None]
"""Checks the address of a server before anything is sent to it; raises to refuse it."""
Body = bytes | Callable[[], Iterable[bytes]]
"""What a request sends: bytes, or a function that gives the pieces, called again for each try."""


class Request(NamedTuple):
    """One request as it is sent; `target` (path and query) may hold a token: never print it."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: Body | None = None
    admit: Admit | None = None


def send_request(
    connection: http.client.HTTPConnection,
    origin: Origin,
    request: Request,
    attempt: Attempt,
    what: str,
    release: Callable[[bool], None],
) -> Exchange:
    """Send one request on a connection and wait for the head of its response.

    `release` takes the connection back when the exchange ends, with whether it can be used again.
    Raises OSError and `http.client.HTTPException`, and what `request.admit` raises; the connection
    is the caller's then.
    """
    sock = connection.sock
    peer = _peer_of(sock)
    if request.admit is not None:
        if not peer:
            raise ConnectionResetError("its server closed it")
        request.admit(peer)
    sock.settimeout(attempt.stall_s)
    attempt.replica = origin.authority
    attempt.on_cancel(lambda: shut_down(sock))
    try:
        body = request.body() if callable(request.body) else request.body
        headers = {**HEADERS, **request.headers}
        connection.request(request.method, request.target, headers=headers, body=body)
        response = connection.getresponse()
    except BaseException:  # no exchange begins that would withdraw this at its end
        attempt.on_cancel(None)
        raise
    return Exchange(origin, sock, peer, response, attempt, what, release)


class Exchange:
    """One response: status and headers, and the body still on its way; a context manager."""

    def __init__(
        self,
        origin: Origin,
        sock: socket.socket,
        peer: str,
        response: http.client.HTTPResponse,
        attempt: Attempt,
        what: str,
        release: Callable[[bool], None],
    ) -> None:
        self._origin, self._sock, self._response = origin, sock, response
        self._attempt, self._what, self._release = attempt, what, release
        self.peer = peer
        """The server's numeric address; "" where the connection was cut at once."""
        self.length = response.length
        """Bytes of the body as announced; None when chunked or up to the connection's end."""
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
            raise transfer_error(
                error, self._origin, self._what, self._attempt, done, total
            ) from error

    def receive(self, view: memoryview) -> int:
        """Receive some of the body; how many bytes, 0 only at the body's end."""
        receive = self._receive_decoded if self._left is None else self._receive
        try:
            count = receive(view)
        except (OSError, http.client.HTTPException) as error:
            self._left = None
            done = self._attempt.received_bytes
            raise transfer_error(error, self._origin, self._what, self._attempt, done) from error
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
                # One byte more than allowed shows a body that is too long.
                part = self._response.read(min(PIECE_BYTES, limit_bytes + 1 - size))
                if not part:
                    break
                parts.append(part)
                size += len(part)
        except (OSError, http.client.HTTPException) as error:
            raise transfer_error(error, self._origin, self._what, self._attempt, size) from error
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
            raise transfer_error(error, self._origin, self._what, self._attempt, total) from error
        if self._left is None:
            self._left = 0

    def status_error(self, code: str = "") -> BootseerError:
        """Our error for a status that the request does not allow; `code` is the server's own."""
        reason = f"{self.reason} {code}" if code else self.reason
        return response_error(self.status, reason, self.headers, self.authority, self._what)

    def close(self) -> None:
        """Give the connection back: to be used again when the response was read to its end."""
        self._attempt.on_cancel(None)
        whole = self._left == 0 or self._response.isclosed() or self._drain()
        reusable = whole and not self._response.will_close and not self._attempt.cancelled
        self._response.close()
        self._release(reusable)

    def _drain(self) -> bool:
        """Read what is left of a small body, so that its connection can be used again."""
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
        if not self._raw:  # the reader of the head may hold the body's first bytes
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


def report_empty(buffers: Sequence[memoryview], filled: Filled | None) -> bool:
    """Report all buffers as filled when there is nothing to fill; whether that was so."""
    if any(map(len, buffers)):
        return False
    if filled is not None:
        for number in range(len(buffers)):
            filled(number)
    return True


def shut_down(sock: socket.socket) -> None:
    """Wake the thread that waits on a socket; the descriptor stays. Safe from any thread."""
    try:
        # Not SSLSocket's own method: it drops the TLS state under the reader's feet.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more


def is_readable(sock: socket.socket, wait_s: float = 0.0) -> bool:
    """Whether bytes or the connection's end have arrived; waits for them for `wait_s`."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(wait_s * 1000))


def _peer_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""  # not connected any more: what is sent next says why
