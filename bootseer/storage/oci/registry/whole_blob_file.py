"""A whole blob in a temporary file, for servers that serve no ranges: fetched once, by one stream.

The file has no name, so nothing of it is left however the process ends.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    StoreUnavailableError,
    from_os_error,
)
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import truncated_error

if TYPE_CHECKING:
    from bootseer.storage.oci.repository import BlobStream

PIECE_BYTES = 1 << 20


class WholeBlobFile:
    """One blob as it arrives; any number of threads may read it, and wait for bytes to come.

    The first read begins to fetch it.
    """

    _file: IO[bytes]

    def __init__(self, open_stream: Callable[[], BlobStream], digest: str) -> None:
        self._open, self._digest = open_stream, digest
        self._changed = threading.Condition()
        self._arrived_bytes = 0
        self._done = False
        self._error: BootseerError | None = None
        self._stream: BlobStream | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def failed(self) -> bool:
        """Whether it will never hold the blob, so that another file is needed."""
        return self._error is not None or self._closed

    def read(
        self,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None],
    ) -> None:
        """Fill the buffers from the blob's bytes at `offset`, as soon as these have arrived."""
        self._start()
        attempt.on_cancel(self._wake)
        try:
            for number, buffer in enumerate(buffers):
                self._wait_for(offset + len(buffer), attempt)
                self._copy(offset, buffer)
                offset += len(buffer)
                attempt.received_bytes += len(buffer)
                filled(number)
        finally:
            attempt.on_cancel(None)

    def close(self) -> None:
        """End the stream and free the file; twice is safe."""
        with self._changed:
            self._closed = True
            stream, thread = self._stream, self._thread
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        if thread is not None:
            thread.join()
            self._file.close()

    def _start(self) -> None:
        with self._changed:
            if self._thread is not None or self._closed:
                return
            try:
                self._file = tempfile.TemporaryFile(prefix="bootseer-blob-", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise from_os_error(error, "make a temporary file") from error
            self._thread = threading.Thread(target=self._run, name="blob-spool", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        error: BootseerError | None = None
        try:
            with self._open() as stream:
                with self._changed:
                    self._stream = stream
                    if self._closed:
                        return
                self._pump(stream)
        except BootseerError as caught:
            error = caught
        except OSError as caught:
            error = from_os_error(caught, f"keep {self._digest} in a temporary file")
        with self._changed:
            self._error, self._done = error, error is None
            self._changed.notify_all()

    def _pump(self, stream: BlobStream) -> None:
        piece = memoryview(bytearray(PIECE_BYTES))
        while count := stream.readinto(piece):
            view = piece[:count]
            while view:
                view = view[os.write(self._file.fileno(), view) :]
            with self._changed:
                self._arrived_bytes += count
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_for(self, end: int, attempt: Attempt) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._arrived_bytes >= end
                    or self._done
                    or self._error is not None
                    or self._closed
                    or attempt.cancelled
                )
            )
            if self._closed or attempt.cancelled:
                raise StoreUnavailableError(f"cannot read {self._digest}: it was given up")
            if self._error is not None:
                raise self._error
            if self._arrived_bytes < end:
                raise truncated_error(self._digest, self._arrived_bytes, end)

    def _copy(self, offset: int, buffer: memoryview) -> None:
        view = buffer
        while view:
            count = os.preadv(self._file.fileno(), [view], offset)
            if count <= 0:
                raise CorruptDataError(f"{self._digest} was cut off in its temporary file")
            view, offset = view[count:], offset + count
