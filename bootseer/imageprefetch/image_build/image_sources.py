"""Where a stock image comes from: a registry or layout, an archive, a running container program.

All give the same: what names the image, and its layers' tar bytes, checked against their digests
by whoever read them to the end.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from bootseer.errors import CorruptDataError, NotSupportedError, UsageError, from_os_error
from bootseer.imageprefetch.image_build.layer_reader import Readable, ahead, unpacked
from bootseer.imageprefetch.image_build.layer_spool import LayerSpool
from bootseer.storage.oci.config import LIMIT_BYTES, MAX_LAYERS, diff_ids_of
from bootseer.system.regular_files import open_to_read

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor, Manifest
    from bootseer.storage.oci.repository import Progress, Repository

_PIECE_BYTES = 1 << 20
_LOOKED_AT_BYTES = 1 << 30  # of a layer that makes no sense: was it damaged on its way?
_MOST_BEHIND_BYTES = 64 << 20  # tar programs pad by 10 KiB


class Layers(Protocol):
    """A stock image's layers; a context manager.

    `diff_ids` are the sha256 digests of their tar bytes, the lowest first, as the image's config
    lists them: two images with the same ones have the same tree.
    """

    @property
    def diff_ids(self) -> tuple[str, ...]: ...

    @property
    def size_bytes(self) -> int:
        """Stored bytes of all layers."""

    @property
    def damaged(self) -> bool:
        """Whether a layer arrived with wrong bytes: the next try may get the right ones."""

    def opened(self, number: int) -> AbstractContextManager[Iterator[bytes]]:
        """The tar bytes of a layer, 0 being the lowest; can be asked again.

        Leaving the block normally checks the layer's digest, and raises CorruptDataError.
        """

    def close(self) -> None:
        """Let go of everything; twice is safe."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class _Closing:
    @property
    def damaged(self) -> bool:
        return False

    def close(self) -> None:
        """Let go of everything; twice is safe."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RepositoryLayers(_Closing):
    """The layers of an image in a registry, fetched into `folder`; or in a layout, where it is.

    Raises CorruptDataError when they are said to have more than `limit_bytes`.
    """

    def __init__(
        self,
        repository: Repository,
        manifest: Manifest,
        folder: str,
        progress: Progress | None = None,
        *,
        limit_bytes: int = 1 << 62,
    ) -> None:
        self._layers = manifest.layers
        if len(self._layers) > MAX_LAYERS:
            raise CorruptDataError(f"the image has more than {MAX_LAYERS} layers")
        for layer in self._layers:
            _check_kind(layer)
        self.diff_ids = diff_ids_of(repository.blob(manifest.config, limit_bytes=LIMIT_BYTES))
        if len(self.diff_ids) != len(self._layers):
            raise CorruptDataError("the image's config lists other layers than its manifest")
        self.size_bytes = sum(layer.size_bytes for layer in self._layers)
        if self.size_bytes > limit_bytes:  # before any of it fills the cache
            raise CorruptDataError(
                f"the image unpacks to more than {limit_bytes} bytes: its layers alone have "
                f"{self.size_bytes}; raise the limit if it may be so large"
            )
        paths = [repository.store.local_path(layer.digest) for layer in self._layers]
        self._paths = [path for path in paths if path is not None]
        self._progress = progress
        self._spool: LayerSpool | None = None
        if len(self._paths) < len(paths):
            ordered = list({layer.digest: layer for layer in reversed(self._layers)}.values())
            self._spool = LayerSpool(repository, ordered, folder, progress)
            self._spool.__enter__()

    @property
    def damaged(self) -> bool:
        return self._spool is not None and self._spool.damaged

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()

    @contextmanager
    def opened(self, number: int) -> Iterator[Iterator[bytes]]:
        layer = self._layers[number]
        if self._spool is None:
            with open_file(self._paths[number], layer.size_bytes, self._progress) as source:
                checked = _Checked(source, layer.digest)
                content = Unpacked(unpacked(checked))
                with ahead(content.pieces) as pieces:
                    yield pieces
                    content.drain(pieces)
                checked.finish()
            content.check(layer.digest, self.diff_ids[number])
            return
        spooled = self._spool.open(layer.digest)
        try:
            content = Unpacked(unpacked(spooled))
            with ahead(content.pieces, spooled.cancel) as pieces:
                yield pieces
                content.drain(pieces)
            while spooled.read(_PIECE_BYTES):
                pass  # its end comes only when the digest was right
        except CorruptDataError:
            if layer.size_bytes <= _LOOKED_AT_BYTES:
                self._look_at(layer)
            raise
        finally:
            spooled.close()
        content.check(layer.digest, self.diff_ids[number])

    def _look_at(self, layer: Descriptor) -> None:
        """Raise CorruptDataError where a layer that makes no sense has arrived damaged."""
        assert self._spool is not None
        with closing(self._spool.open(layer.digest)) as again:
            while again.read(_PIECE_BYTES):
                pass


class _Checked:
    """Bytes on their way, and whether they are the right ones."""

    def __init__(self, source: Readable, digest: str) -> None:
        self._source, self._digest = source, digest
        self._check = hashlib.new(digest.partition(":")[0])

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self._check.update(data)
        return data

    def finish(self) -> None:
        """Read on to the end; CorruptDataError unless all bytes were right."""
        while self.read(_PIECE_BYTES):
            pass
        if self._check.hexdigest() != self._digest.partition(":")[2]:
            raise CorruptDataError(
                f"the layer {self._digest} has other bytes than its digest says; it is not used"
            )


class _Part:
    """A stretch of a file, read from its start."""

    def __init__(self, fd: int, offset: int, size_bytes: int, progress: Progress | None) -> None:
        self._fd, self._at, self._end = fd, offset, offset + size_bytes
        self._progress = progress

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._fd, min(size, self._end - self._at), self._at)
        self._at += len(data)
        if self._progress is not None and data:
            self._progress(len(data))
        return data


@contextmanager
def open_file(
    path: str, size_bytes: int, progress: Progress | None = None, offset: int = 0
) -> Iterator[Readable]:
    """Read a stretch of a file from its start."""
    try:
        fd = open_to_read(path)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error
    try:
        yield _Part(fd, offset, size_bytes, progress)
    finally:
        os.close(fd)


def _check_kind(layer: Descriptor) -> None:
    kind = layer.media_type
    if "tar" not in kind or kind.endswith("+encrypted"):
        raise NotSupportedError(
            f"a layer is {kind[:200] or 'of no kind'}, which is no readable tar file"
        )


class ArchiveLayers(_Closing):
    """The layers of an image in a docker-archive, the file that `docker save` writes.

    `name` chooses one of several images. The archive may be compressed; then it is unpacked into
    `folder` first, up to `limit_bytes`. Its layers are checked against the config's list.
    """

    def __init__(
        self,
        path: str,
        name: str,
        folder: str,
        progress: Progress | None = None,
        *,
        limit_bytes: int = 1 << 62,
    ) -> None:
        from bootseer.imageprefetch.image_build.docker_archive import Archive

        self._archive = Archive(path, folder, limit_bytes)
        self._progress = progress
        config, self._parts = self._archive.image(name)
        self.diff_ids = diff_ids_of(config)
        self.size_bytes = sum(length for _, length in self._parts)
        if len(self.diff_ids) != len(self._parts):
            raise CorruptDataError(f"{path} lists other layers than its image's config")

    @contextmanager
    def opened(self, number: int) -> Iterator[Iterator[bytes]]:
        offset, length = self._parts[number]
        name = f"{number} of {self._archive.path}"
        with open_file(self._archive.path, length, self._progress, offset) as source:
            content = Unpacked(unpacked(source))
            with ahead(content.pieces) as pieces:
                yield pieces
                content.drain(pieces)
        content.check(name, self.diff_ids[number])


class Unpacked:
    """A layer's tar bytes on their way, and whether they are those that its image names."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._check = hashlib.sha256()
        self.pieces = self._hashed(pieces)

    def _hashed(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._check.update(piece)
            yield piece

    def drain(self, pieces: Iterator[bytes]) -> None:
        """Take what stands behind the tar file's end, which counts in the digest."""
        behind = 0
        for piece in pieces:
            behind += len(piece)
            if behind > _MOST_BEHIND_BYTES:
                break

    def check(self, layer: str, diff_id: str) -> None:
        """Raise CorruptDataError unless these were all bytes of `diff_id`."""
        if f"sha256:{self._check.hexdigest()}" != diff_id:
            raise CorruptDataError(
                f"the layer {layer} unpacks to other bytes than the image's config says "
                f"({diff_id}): no container program would take it; make and push the image again"
            )


def same_tree(some: Sequence[str], others: Sequence[str], what: str) -> None:
    """Raise UsageError unless two images have the same layers; `what` names them both."""
    if tuple(some) != tuple(others):
        raise UsageError(f"{what} are different images: their layers differ")
