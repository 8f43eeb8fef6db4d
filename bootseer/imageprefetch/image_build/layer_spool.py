"""Layers on their way to this machine: fetched in the background, read as they grow.

What arrived stays in a folder, so that a build that was broken off goes on where it was. Each
layer is checked against its digest; reading one to its end raises when it does not match.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from bootseer.errors import BootseerError, CorruptDataError, from_os_error
from bootseer.system.regular_files import write_fully

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor
    from bootseer.storage.oci.repository import BlobStream, Progress, Repository

_PIECE_BYTES = 1 << 20
FETCHES = 2  # layers that are fetched at a time


class _Arriving:
    """One layer: how much of its file is there."""

    def __init__(self, descriptor: Descriptor, folder: str) -> None:
        self.descriptor = descriptor
        self.path = os.path.join(folder, descriptor.digest.replace(":", "-"))
        self.have_bytes = 0
        self.done = False
        self.error: BaseException | None = None


class LayerSpool:
    """Fetches layers in the order given, a few at a time; a context manager that stops it."""

    def __init__(
        self,
        repository: Repository,
        layers: Sequence[Descriptor],
        folder: str,
        progress: Progress | None = None,
    ) -> None:
        self._repository, self._progress = repository, progress
        self._layers = {layer.digest: _Arriving(layer, folder) for layer in layers}
        self._waiting = list(self._layers.values())
        self._changed = threading.Condition()
        self._streams: set[BlobStream] = set()
        self._stopped = False
        self.damaged = False
        """Whether a layer came with wrong bytes: fetched anew, from elsewhere, it may be right."""
        count = min(FETCHES, len(self._waiting))
        self._threads = [
            threading.Thread(target=self._run, name="fetch-layer", daemon=True)
            for _ in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop fetching; what is there stays. Twice is safe."""
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
        """Read a layer from its start, from any thread."""
        return SpooledLayer(self, self._layers[digest])

    def wait(self, layer: _Arriving, beyond_bytes: int, reader: SpooledLayer) -> int:
        """How much is there, as soon as that is more than `beyond_bytes` or all of it."""
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
        """Let those who wait look again."""
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
                self._failed(layer, error)

    def _fetch(self, layer: _Arriving) -> None:
        size = layer.descriptor.size_bytes
        name, _, wanted = layer.descriptor.digest.partition(":")
        check = hashlib.new(name)
        try:
            with open(layer.path, "a+b", buffering=0) as file:
                self._take_up(layer, file.fileno(), check)
                if layer.have_bytes < size:
                    self._stream(layer, file.fileno(), check)
                if self._stopped and layer.have_bytes < size:
                    return  # the next build goes on here
                if layer.have_bytes != size or check.hexdigest() != wanted:
                    self.damaged = True
                    self._failed(layer, _damaged(layer))
                    os.ftruncate(file.fileno(), 0)  # whoever reads it has been told
                    return
        except OSError as error:
            raise from_os_error(error, f"write {layer.path}") from error
        with self._changed:
            layer.done = True
            self._changed.notify_all()

    def _failed(self, layer: _Arriving, error: BaseException) -> None:
        with self._changed:
            layer.error = error
            self._changed.notify_all()

    def _take_up(self, layer: _Arriving, fd: int, check: hashlib._Hash) -> None:
        """Count in what an earlier build has fetched."""
        if os.fstat(fd).st_size > layer.descriptor.size_bytes:
            os.ftruncate(fd, 0)
        while not self._stopped and (piece := os.pread(fd, _PIECE_BYTES, layer.have_bytes)):
            check.update(piece)
            self._arrived(layer, len(piece))

    def _stream(self, layer: _Arriving, fd: int, check: hashlib._Hash) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        digest, offset = layer.descriptor.digest, layer.have_bytes
        # Verified where it can be, so that the repository knows whose bytes were wrong.
        with self._repository.stream(digest, offset, verify=not offset) as stream:
            with self._changed:
                self._streams.add(stream)
            try:
                while not self._stopped and (count := _next(stream, buffer)):
                    if layer.have_bytes + count > layer.descriptor.size_bytes:
                        raise CorruptDataError(f"the layer {digest} is longer than its size")
                    write_fully(fd, buffer[:count])
                    check.update(buffer[:count])
                    self._arrived(layer, count)
            finally:
                with self._changed:
                    self._streams.discard(stream)

    def _arrived(self, layer: _Arriving, count: int) -> None:
        with self._changed:
            layer.have_bytes += count
            self._changed.notify_all()
        if self._progress is not None:
            self._progress(count)


class SpooledLayer:
    """A layer's stored bytes, as far as they arrived; waits for the others."""

    def __init__(self, spool: LayerSpool, layer: _Arriving) -> None:
        self._spool, self._layer = spool, layer
        self._at = 0
        self.cancelled = False
        try:
            self._fd = os.open(layer.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise from_os_error(error, f"read {layer.path}") from error

    def read(self, size: int, /) -> bytes:
        """The next bytes; empty only at the end of a layer that has its digest."""
        have = self._spool.wait(self._layer, self._at, self)
        data = os.pread(self._fd, min(size, have - self._at), self._at)
        if not data and have > self._at:
            raise _damaged(self._layer)  # cut between the two lines above
        self._at += len(data)
        return data

    def cancel(self) -> None:
        """Make whoever waits in `read` fail; for another thread."""
        self.cancelled = True
        self._spool.wake()

    def close(self) -> None:
        """Let go of the file; twice is safe."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _next(stream: BlobStream, buffer: memoryview) -> int:
    """The next bytes; none where the stream says that all those before were wrong."""
    try:
        return stream.readinto(buffer)
    except CorruptDataError:
        return 0  # our own digest says so as well


def _damaged(layer: _Arriving) -> CorruptDataError:
    return CorruptDataError(
        f"the layer {layer.descriptor.digest} arrived with other bytes than its digest says; it "
        "is not used"
    )
