"""Writing an object to HDFS: a stream to one DataNode, checked, then renamed into its place.

A DataNode closes a stream that was cut off as a valid, shorter file. So the bytes go to a
temporary name, its length is compared when the stream has ended, and only then it is renamed.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
import uuid

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, BusyError, StoreUnavailableError
from bootseer.storage.http.errors import transfer_error
from bootseer.storage.http.exchange import is_readable, shut_down
from bootseer.storage.http.responses import Target
from bootseer.storage.store import TEMPORARY, Stat, WriteHints
from bootseer.storage.webhdfs.client import Client
from bootseer.storage.webhdfs.namespace import Namespace
from bootseer.storage.webhdfs.protocol import at_datanode
from bootseer.storage.webhdfs.reader import refusal_error

PIECE_BYTES = 1 << 20  # one send; the stall time is for one
GATHER_BYTES = 256 << 10  # smaller writes are sent together
GO_AHEAD_S = 3.0  # a server that never says "100 Continue" is sent the data after this
FLUSH_S = 60.0  # closing waits for every replica
ABORT_S = 1.0
ABORT_WAIT_S = 0.05
HEAD_BYTES = 4096
ERROR_BYTES = 64 << 10
HEADERS = (
    ("Content-Type", "application/octet-stream"),
    ("Transfer-Encoding", "chunked"),
    ("Expect", "100-continue"),
    ("User-Agent", "bootseer"),
)


class CreateStream:
    """The body of one CREATE, sent to a DataNode in chunks. `begin` comes first."""

    def __init__(self, client: Client, target: Target, what: str) -> None:
        self._client, self._target, self._what = client, target, what
        self._attempt = client.attempt()

    def begin(self) -> None:
        """Connect, and send the head of the request."""
        self._connection = self._client.pool.connect(self._target.origin, self._what, self._attempt)
        self._sock: socket.socket = self._connection.sock
        self._sock.settimeout(self._attempt.stall_s)
        try:
            self._connection.putrequest("PUT", self._target.request, skip_accept_encoding=True)
            for name, value in HEADERS:
                self._connection.putheader(name, value)
            self._connection.endheaders()
            self._await_go_ahead()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise transfer_error(error, self._target.origin, self._what, self._attempt) from error
        except BaseException:  # the caller has no stream to close yet
            self.close()
            raise

    def send(self, view: memoryview) -> None:
        """Send some bytes, a chunk for each MiB."""
        try:
            while view:
                piece, view = view[:PIECE_BYTES], view[PIECE_BYTES:]
                self._send_chunk(piece)
        except OSError as error:
            raise self._refusal_or(error) from error

    def finish(self) -> None:
        """End the stream and wait until HDFS has taken it."""
        try:
            self._sock.sendall(b"0\r\n\r\n")
            self._sock.settimeout(max(FLUSH_S, self._attempt.stall_s))
            self._check(self._connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise self._refusal_or(error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Cut the stream off; harmless after `finish`."""
        shut_down(self._sock)
        self._connection.close()

    def _send_chunk(self, piece: memoryview) -> None:
        head = b"%x\r\n" % len(piece)
        whole = len(head) + len(piece) + 2
        # TLS has no sendmsg.
        sent = 0 if self._is_tls() else self._sock.sendmsg([head, piece, b"\r\n"])
        if sent == whole:
            return
        for part in (memoryview(head), piece, memoryview(b"\r\n")):
            if sent < len(part):
                self._sock.sendall(part[sent:])
            sent = max(0, sent - len(part))

    def _is_tls(self) -> bool:
        return isinstance(self._sock, ssl.SSLSocket)

    def _await_go_ahead(self) -> None:
        """Wait for "100 Continue", which HDFS sends when it has made the file, or a refusal."""
        end_s = time.monotonic() + GO_AHEAD_S
        if self._is_tls():
            return  # TLS cannot be peeked at; a refusal shows when sending fails
        while (left_s := end_s - time.monotonic()) > 0:
            if not is_readable(self._sock, left_s):
                return
            head = self._sock.recv(HEAD_BYTES, socket.MSG_PEEK)
            if not head.startswith(b"HTTP/1.1 100"[: len(head)]) or not head:
                self._check(self._connection.getresponse())
                authority = self._target.origin.authority
                raise StoreUnavailableError(
                    f"cannot {self._what}: {authority} answered before it had the data"
                )
            if (end := head.find(b"\r\n\r\n")) >= 0:
                self._sock.recv(end + 4)
                return
            time.sleep(0.001)  # the rest of the line is on its way

    def _check(self, response: http.client.HTTPResponse) -> None:
        with response:
            if response.status in (200, 201):
                response.read(HEAD_BYTES)
                return
            body = response.read(ERROR_BYTES)
            raise refusal_error(
                response.status,
                response.reason,
                response.headers,
                self._target.origin.authority,
                body,
                self._what,
            )

    def _refusal_or(self, error: Exception) -> BootseerError:
        """Why a stream broke: HDFS's answer when it sent one before it closed, else `error`."""
        try:
            if is_readable(self._sock, 0.2):
                self._check(self._connection.getresponse())
        except BootseerError as refusal:
            return refusal
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it closed without an answer
        return transfer_error(error, self._target.origin, self._what, self._attempt)


class WebHdfsWriter(Committing):
    """`ObjectWriter` to a temporary name in the object's folder."""

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        name: str,
        hints: WriteHints,
        *,
        keep_existing: bool,
    ) -> None:
        client.data_path(name)  # raises for a name that cannot be written
        self._client, self._namespace = client, namespace
        self._name, self._hints, self._keep_existing = name, hints, keep_existing
        self._what = f"write {name} in {client.url}"
        parent = name.rpartition("/")[0]
        self._temporary = f"{parent}/" * bool(parent) + TEMPORARY + uuid.uuid4().hex
        self._gathered = bytearray()
        self._stream: CreateStream | None = None
        self._written_bytes = 0
        self._ended = False
        self.created = False
        """Whether `close` gave the object its name; false when that was taken meanwhile."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        if len(self._gathered) + len(view) < GATHER_BYTES:
            self._gathered += view
            return
        self._flush()
        self._send(view)

    def close(self) -> None:
        if self._ended:
            return
        try:
            self._flush()
            self._start_stream().finish()
            stat = self._namespace.stat(self._temporary)
            if stat.size_bytes != self._written_bytes:
                short = StoreUnavailableError(
                    f"cannot {self._what}: HDFS holds {stat.size_bytes} of"
                    f" {self._written_bytes} bytes; write it again"
                )
                raise self._lack_of_space() or short
            self._publish(stat)
        except BaseException:  # an interrupt too: nothing unpublished stays
            self.abort()
            raise
        self._ended = True

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._gathered.clear()
        if self._stream is None:
            return
        self._stream.close()
        end_s = time.monotonic() + ABORT_S
        try:
            # HDFS may still be about to make the file, soon, now that the stream is cut.
            while not self._remove() and time.monotonic() < end_s:
                time.sleep(ABORT_WAIT_S)
        except BootseerError:
            pass  # out of reach: the temporary stays, hidden, for `gc`

    def _publish(self, stat: Stat) -> None:
        try:
            self._namespace.move(
                self._temporary,
                self._name,
                replace=not self._keep_existing,
                version=stat.version,
            )
            self.created = True
        except BusyError:
            if not self._keep_existing:
                raise
            self._remove()

    def _remove(self) -> bool:
        return self._namespace.delete(self._temporary, recursive="false", retry_s=0)

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._send(memoryview(gathered))

    def _send(self, view: memoryview) -> None:
        try:
            self._start_stream().send(view)
        except StoreUnavailableError as error:
            full = self._lack_of_space()
            if full is not None:
                raise full from error
            raise
        self._written_bytes += len(view)

    def _lack_of_space(self) -> BootseerError | None:
        return self._namespace.find_lack_of_space(self._temporary, self._what)

    def _start_stream(self) -> CreateStream:
        if self._stream is None:
            stream = CreateStream(self._client, self._target(), self._what)
            stream.begin()
            self._stream = stream
        return self._stream

    def _target(self) -> Target:
        hints = self._hints
        parameters = [("overwrite", "false")]
        if hints.replication:
            parameters.append(("replication", str(hints.replication)))
        if hints.block_bytes:
            parameters.append(("blocksize", str(hints.block_bytes)))
        target = self._client.namenodes.redirect(
            "PUT",
            self._client.path(self._temporary),
            "CREATE",
            parameters,
            self._what,
            retry_s=self._client.options.retry_s,
        )
        return at_datanode(target, hints.node) if hints.node else target
