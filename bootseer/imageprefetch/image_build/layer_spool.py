"""Layers that are fetched in the background and read as they arrive.

They are kept in a folder, so that an interrupted build continues where it was. Each layer is
checked against its digest; reading one to its end raises when it does not match.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, CorruptDataError, from_os_error
from bootseer.system.regular_files import write_fully

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor
    from bootseer.storage.oci.repository import BlobStream, Progress, Repository

_PIECE_BYTES = 1 << 20
FETCHES = 2  # layers that are fetched at a time


class _LayerDownload:
    """One layer, and how much of its file has arrived."""

    def __init__(self, descriptor: Descriptor, folder: str) -> None:
        self.descriptor = descriptor
        self.path = os.path.join(folder, descriptor.digest.replace(":", "-"))
        self.have_bytes = 0
        self.done = False
        self.error: BaseException | None = None


class LayerSpool:
    """Fetches layers in the given order, a few at a time, from `start` to `close`."""

    def __init__(
        self,
        repository: Repository,
        layers: Sequence[Descriptor],
        folder: str,
        progress: Progress | None = None,
    ) -> None:
        self._repository, self._progress = repository, progress
        self._layers = {layer.digest: _LayerDownload(layer, folder) for layer in layers}
        self._waiting = list(self._layers.values())
        self._changed = threading.Condition()
        self._streams: set[BlobStream] = set()
        self._stopped = False
        self.damaged = False
        """Whether a layer had wrong bytes: fetched again, from another mirror, it may be right."""
        count = min(FETCHES, len(self._waiting))
        self._threads = [
            threading.Thread(target=self._run, name="fetch-layer", daemon=True)
            for _ in range(count)
        ]

    def start(self) -> LayerSpool:
        """Begin to fetch."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Stop fetching; what has arrived stays. Twice is safe."""
        with self._changed:
            self._stopped = True
            streams = list(self._streams)
            self._changed.notify_all()
        for stream in streams:
            stream.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def open(self, digest: str) -> SpooledLayer:
        """Read a layer from its start, in any thread."""
        layer = self._layers[digest]
        try:
            fd = os.open(layer.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise from_os_error(error, f"read {layer.path}") from error
        return SpooledLayer(self, layer, fd)

    def wait(self, layer: _LayerDownload, beyond_bytes: int, reader: SpooledLayer) -> int:
        """How much has arrived, as soon as it is more than `beyond_bytes` or all of it."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    layer.have_bytes > beyond_bytes
                    or layer.done
                    or layer.error is not None
                    or self._stopped
                    or reader.cancelled
                )
            )
            if layer.error is not None:
                raise layer.error
            if layer.have_bytes <= beyond_bytes and not layer.done:
                raise BootseerError("fetching was stopped")
            return layer.have_bytes

    def wake(self) -> None:
        """Have waiting readers check again."""
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped or not self._waiting:
                    return
                layer = self._waiting.pop(0)
            try:
                self._fetch(layer)
            except BaseException as error:  # it is raised again where the layer is read
                self._fail(layer, error)

    def _fetch(self, layer: _LayerDownload) -> None:
        size = layer.descriptor.size_bytes
        name, _, wanted = layer.descriptor.digest.partition(":")
        check = hashlib.new(name)
        try:
            with open(layer.path, "a+b", buffering=0) as file:
                self._take_up(layer, file.fileno(), check)
                if layer.have_bytes < size:
                    self._stream(layer, file.fileno(), check)
                if self._stopped and layer.have_bytes < size:
                    return  # the next build continues here
                if layer.have_bytes != size or check.hexdigest() != wanted:
                    self.damaged = True
                    self._fail(layer, _damage_error(layer))
                    os.ftruncate(file.fileno(), 0)  # its readers have got the error
                    return
        except OSError as error:
            raise from_os_error(error, f"write {layer.path}") from error
        with self._changed:
            layer.done = True
            self._changed.notify_all()

    def _fail(self, layer: _LayerDownload, error: BaseException) -> None:
        with self._changed:
            layer.error = error
            self._changed.notify_all()

    def _take_up(self, layer: _LayerDownload, fd: int, check: hashlib._Hash) -> None:
        """Add what an earlier build has fetched."""
        if os.fstat(fd).st_size > layer.descriptor.size_bytes:
            os.ftruncate(fd, 0)
        while not self._stopped and (piece := os.pread(fd, _PIECE_BYTES, layer.have_bytes)):
            check.update(piece)
            self._note_arrival(layer, len(piece))

    def _stream(self, layer: _LayerDownload, fd: int, check: hashlib._Hash) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        digest, offset = layer.descriptor.digest, layer.have_bytes
        # Verified if possible, so that the repository knows which mirror had wrong bytes.
        with self._repository.stream(digest, offset, verify=not offset) as stream:
            with self._changed:
                self._streams.add(stream)
            try:
                while not self._stopped and (count := _read_next(stream, buffer)):
                    if layer.have_bytes + count > layer.descriptor.size_bytes:
                        raise CorruptDataError(f"the layer {digest} is longer than its size")
                    write_fully(fd, buffer[:count])
                    check.update(buffer[:count])
                    self._note_arrival(layer, count)
            finally:
                with self._changed:
                    self._streams.discard(stream)

    def _note_arrival(self, layer: _LayerDownload, count: int) -> None:
        with self._changed:
            layer.have_bytes += count
            self._changed.notify_all()
        if self._progress is not None:
            self._progress(count)


class SpooledLayer:
    """A layer's stored bytes; reading waits for those that have not arrived."""

    def __init__(self, spool: LayerSpool, layer: _LayerDownload, fd: int) -> None:
        self._spool, self._layer, self._fd = spool, layer, fd
        self._at = 0
        self.cancelled = False

    def read(self, size: int, /) -> bytes:
        """The next bytes; empty only at the end of a layer that has its digest."""
        have = self._spool.wait(self._layer, self._at, self)
        data = os.pread(self._fd, min(size, have - self._at), self._at)
        if not data and have > self._at:
            raise _damage_error(self._layer)  # truncated between the two lines above
        self._at += len(data)
        return data

    def cancel(self) -> None:
        """Make a waiting `read` fail; for another thread."""
        self.cancelled = True
        self._spool.wake()

    def close(self) -> None:
        """Close the file; twice is safe."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _read_next(stream: BlobStream, buffer: memoryview) -> int:
    """The next bytes; none if the stream reports that all bytes before were wrong."""
    try:
        return stream.readinto(buffer)
    except CorruptDataError:
        return 0  # our own digest shows it as well


def _damage_error(layer: _LayerDownload) -> CorruptDataError:
    return CorruptDataError(
        f"the layer {layer.descriptor.digest} arrived with other bytes than its digest says; it "
        "is not used"
    )
