"""Writing an object to HDFS: a stream to one DataNode, checked, then renamed into its place.

A DataNode closes a stream that was cut off as a valid, shorter file. So the bytes go to a
temporary name, its length is compared when the stream has ended, and only then it is renamed.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import time
import uuid

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, BusyError, StoreUnavailableError
from bootseer.storage.http.errors import broken
from bootseer.storage.http.pool import shut_down
from bootseer.storage.http.responses import Target
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import NO_HINTS, Stat, WriteHints
from bootseer.storage.webhdfs.namespace import TEMPORARY, Folder
from bootseer.storage.webhdfs.protocol import at_datanode
from bootseer.storage.webhdfs.reader import refusal

PIECE_BYTES = 1 << 20  # one send; the stall time is for one
GATHER_BYTES = 256 << 10  # smaller writes are sent together
GO_AHEAD_S = 3.0  # a server that never says "100 Continue" is sent the data after this
FLUSH_S = 60.0  # closing waits for every replica
ABORT_S = 1.0
ABORT_WAIT_S = 0.05
HEAD_BYTES = 4096


class Upload:
    """One CREATE being sent to a DataNode in chunks."""

    def __init__(self, folder: Folder, target: Target, what: str) -> None:
        self._what, self._origin = what, target.origin
        self._attempt: Attempt = folder.attempt()
        self._connection = folder.pool.connect(target.origin, what, self._attempt)
        self._sock: socket.socket = self._connection.sock
        self._sock.settimeout(self._attempt.stall_s)
        try:
            self._connection.putrequest("PUT", target.request, skip_accept_encoding=True)
            for name, value in (
                ("Content-Type", "application/octet-stream"),
                ("Transfer-Encoding", "chunked"),
                ("Expect", "100-continue"),
                ("User-Agent", "bootseer"),
            ):
                self._connection.putheader(name, value)
            self._connection.endheaders()
            self._await_go_ahead()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise broken(error, target.origin, what, self._attempt) from error
        except BaseException:  # who asked never had it to close
            self.close()
            raise

    def send(self, view: memoryview) -> None:
        """Send some bytes, which are one chunk each MiB."""
        try:
            while view:
                piece, view = view[:PIECE_BYTES], view[PIECE_BYTES:]
                self._send_chunk(piece)
        except OSError as error:
            raise self._refused_or(error) from error

    def finish(self) -> None:
        """End the stream and wait until HDFS has taken it."""
        try:
            self._sock.sendall(b"0\r\n\r\n")
            self._sock.settimeout(max(FLUSH_S, self._attempt.stall_s))
            self._check(self._connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise self._refused_or(error) from error
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
            return  # cannot be looked ahead in; a refusal shows when sending fails
        while (left_s := end_s - time.monotonic()) > 0:
            if not _readable(self._sock, left_s):
                return
            head = self._sock.recv(HEAD_BYTES, socket.MSG_PEEK)
            if not head.startswith(b"HTTP/1.1 100"[: len(head)]) or not head:
                self._check(self._connection.getresponse())
                raise StoreUnavailableError(
                    f"cannot {self._what}: {self._origin.authority} answered before it had the data"
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
            body = response.read(64 << 10)
            raise refusal(
                response.status,
                response.reason,
                response.headers,
                self._origin.authority,
                body,
                self._what,
            )

    def _refused_or(self, error: Exception) -> BootseerError:
        """Why a stream broke: HDFS's answer when it sent one before it closed, else the fault."""
        try:
            if _readable(self._sock, 0.2):
                self._check(self._connection.getresponse())
        except BootseerError as refused:
            return refused
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it closed without a word
        return broken(error, self._origin, self._what, self._attempt)


class WebHdfsWriter(Committing):
    """`ObjectWriter` to a temporary name in the object's folder.

    With `keep_existing`, `won` says after `close` whether the name was free and is ours.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        hints: WriteHints = NO_HINTS,
        *,
        keep_existing: bool = False,
    ) -> None:
        folder.data_path(name)
        self._folder, self._name, self._hints = folder, name, hints
        self._keep_existing = keep_existing
        self._what = f"write {name} in {folder.url}"
        parent = name.rpartition("/")[0]
        self._temporary = f"{parent}/" * bool(parent) + TEMPORARY + uuid.uuid4().hex
        self._gathered = bytearray()
        self._upload: Upload | None = None
        self._written_bytes = 0
        self._ended = False
        self.won = False

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
            self._started().finish()
            found = self._folder.stat(self._temporary)
            if found.size_bytes != self._written_bytes:
                short = StoreUnavailableError(
                    f"cannot {self._what}: HDFS holds {found.size_bytes} of"
                    f" {self._written_bytes} bytes; write it again"
                )
                raise self._folder.lack_of_room(self._temporary, self._what) or short
            self._publish(found)
        except BaseException:  # an interrupt too: nothing unpublished stays
            self.abort()
            raise
        self._ended = True

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._gathered.clear()
        if self._upload is None:
            return
        self._upload.close()
        end_s = time.monotonic() + ABORT_S
        try:
            # HDFS may still be about to make the file: it is cut off, so that will be soon.
            while not self._remove() and time.monotonic() < end_s:
                time.sleep(ABORT_WAIT_S)
        except BootseerError:
            pass  # out of reach: the temporary stays, hidden, for whoever collects them

    def _publish(self, found: Stat) -> None:
        try:
            self._folder.move(
                self._temporary,
                self._name,
                replace=not self._keep_existing,
                version=found.version,
            )
            self.won = True
        except BusyError:
            if not self._keep_existing:
                raise
            self._remove()

    def _remove(self) -> bool:
        return self._folder.delete(self._temporary, recursive="false", retry_s=0)

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._send(memoryview(gathered))

    def _send(self, view: memoryview) -> None:
        try:
            self._started().send(view)
        except StoreUnavailableError as error:
            full = self._folder.lack_of_room(self._temporary, self._what)
            if full is not None:
                raise full from error
            raise
        self._written_bytes += len(view)

    def _started(self) -> Upload:
        if self._upload is None:
            self._upload = Upload(self._folder, self._target(), self._what)
        return self._upload

    def _target(self) -> Target:
        hints = self._hints
        wishes = [("overwrite", "false")]
        if hints.replication:
            wishes.append(("replication", str(hints.replication)))
        if hints.block_bytes:
            wishes.append(("blocksize", str(hints.block_bytes)))
        target = self._folder.names.redirect(
            "PUT",
            self._folder.path(self._temporary),
            "CREATE",
            wishes,
            self._what,
            retry_s=self._folder.options.retry_s,
        )
        return at_datanode(target, hints.place) if hints.place else target


def _readable(sock: socket.socket, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(wait_s * 1000))
