"""The layers of a stock image from a registry or layout, or from an archive.

Each source gives the layers' tar bytes, which are checked against their digests when they have been
read to the end.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from bootseer.context_managers import Closing
from bootseer.errors import CorruptDataError, NotSupportedError, UsageError, from_os_error
from bootseer.imageprefetch.image_build.docker_archive import DockerArchive
from bootseer.imageprefetch.image_build.layer_reader import Readable, decompress, prefetch
from bootseer.imageprefetch.image_build.layer_spool import LayerSpool
from bootseer.storage.oci.config import LIMIT_BYTES, MAX_LAYERS, diff_ids_of
from bootseer.system.regular_files import open_to_read

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor, Manifest
    from bootseer.storage.oci.repository import Progress, Repository

_PIECE_BYTES = 1 << 20
_CHECKED_BYTES = 1 << 30  # of a layer that makes no sense: was it damaged in transfer?
_MOST_PADDING_BYTES = 64 << 20  # tar programs pad by 10 KiB


class ImageLayers(Protocol):
    """A stock image's layers; a context manager.

    `diff_ids` are the sha256 digests of their tar bytes, the lowest first, as in the image's
    config: images with the same ones have the same tree.
    """

    @property
    def diff_ids(self) -> tuple[str, ...]: ...

    @property
    def size_bytes(self) -> int:
        """Stored bytes of all layers."""

    @property
    def damaged(self) -> bool:
        """Whether a layer arrived with wrong bytes: a second try may get the right ones."""

    def open_layer(self, number: int) -> AbstractContextManager[Iterator[bytes]]:
        """The tar bytes of a layer, 0 being the lowest; a layer can be opened again.

        Leaving the block normally checks the layer's digest, and raises CorruptDataError.
        """

    def close(self) -> None:
        """Free all resources; twice is safe."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class RepositoryLayers(Closing):
    """The layers of an image in a repository: those of a layout in place, others by a spool."""

    def __init__(
        self,
        layers: Sequence[Descriptor],
        diff_ids: tuple[str, ...],
        paths: Sequence[str],
        spool: LayerSpool | None,
        progress: Progress | None,
    ) -> None:
        self._layers, self.diff_ids, self._paths = layers, diff_ids, paths
        self._spool, self._progress = spool, progress
        self.size_bytes = sum(layer.size_bytes for layer in layers)

    @classmethod
    def open(
        cls,
        repository: Repository,
        manifest: Manifest,
        folder: str,
        progress: Progress | None = None,
        *,
        limit_bytes: int = 1 << 62,
    ) -> RepositoryLayers:
        """Open an image's layers, fetched into `folder` where they are not on this machine.

        Raises CorruptDataError when they have more than `limit_bytes` by the manifest.
        """
        layers = manifest.layers
        if len(layers) > MAX_LAYERS:
            raise CorruptDataError(f"the image has more than {MAX_LAYERS} layers")
        for layer in layers:
            _check_media_type(layer)
        diff_ids = diff_ids_of(repository.blob(manifest.config, limit_bytes=LIMIT_BYTES))
        if len(diff_ids) != len(layers):
            raise CorruptDataError("the image's config lists other layers than its manifest")
        size_bytes = sum(layer.size_bytes for layer in layers)
        if size_bytes > limit_bytes:  # before they fill the cache
            raise CorruptDataError(
                f"the image unpacks to more than {limit_bytes} bytes: its layers alone have "
                f"{size_bytes}; raise the limit if it may be so large"
            )
        local_paths = [repository.store.local_path(layer.digest) for layer in layers]
        paths = [path for path in local_paths if path is not None]
        spool = None
        if len(paths) < len(layers):
            ordered = list({layer.digest: layer for layer in reversed(layers)}.values())
            spool = LayerSpool(repository, ordered, folder, progress).start()
        return cls(layers, diff_ids, paths, spool, progress)

    @property
    def damaged(self) -> bool:
        return self._spool is not None and self._spool.damaged

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()

    @contextmanager
    def open_layer(self, number: int) -> Iterator[Iterator[bytes]]:
        layer = self._layers[number]
        if self._spool is None:
            with open_section(self._paths[number], layer.size_bytes, self._progress) as source:
                checked = _DigestReader(source, layer.digest)
                content = LayerContent(decompress(checked))
                with prefetch(content.pieces) as pieces:
                    yield pieces
                    content.drain(pieces)
                checked.finish()
            content.check(layer.digest, self.diff_ids[number])
            return
        spooled = self._spool.open(layer.digest)
        try:
            content = LayerContent(decompress(spooled))
            with prefetch(content.pieces, spooled.cancel) as pieces:
                yield pieces
                content.drain(pieces)
            while spooled.read(_PIECE_BYTES):
                pass  # it ends only if the digest is right
        except CorruptDataError:
            if layer.size_bytes <= _CHECKED_BYTES:
                self._check_transfer(layer)
            raise
        finally:
            spooled.close()
        content.check(layer.digest, self.diff_ids[number])

    def _check_transfer(self, layer: Descriptor) -> None:
        """Raise CorruptDataError if a layer that makes no sense was damaged in transfer."""
        assert self._spool is not None
        with closing(self._spool.open(layer.digest)) as again:
            while again.read(_PIECE_BYTES):
                pass


class _DigestReader:
    """Reads from a source and checks the digest of all of its bytes."""

    def __init__(self, source: Readable, digest: str) -> None:
        self._source, self._digest = source, digest
        self._check = hashlib.new(digest.partition(":")[0])

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self._check.update(data)
        return data

    def finish(self) -> None:
        """Read to the end; CorruptDataError unless the bytes have the digest."""
        while self.read(_PIECE_BYTES):
            pass
        if self._check.hexdigest() != self._digest.partition(":")[2]:
            raise CorruptDataError(
                f"the layer {self._digest} has other bytes than its digest says; it is not used"
            )


class _Section:
    """A section of a file, read from its start."""

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
def open_section(
    path: str, size_bytes: int, progress: Progress | None = None, offset: int = 0
) -> Iterator[Readable]:
    """Read a section of a file from its start."""
    try:
        fd = open_to_read(path)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error
    try:
        yield _Section(fd, offset, size_bytes, progress)
    finally:
        os.close(fd)


def _check_media_type(layer: Descriptor) -> None:
    kind = layer.media_type
    if "tar" not in kind or kind.endswith("+encrypted"):
        raise NotSupportedError(
            f"a layer is {kind[:200] or 'of no kind'}, which is no readable tar file"
        )


class ArchiveLayers(Closing):
    """The layers of an image in a docker-archive, the file that `docker save` writes.

    `sections` are the offset and length of each layer in the uncompressed archive at `path`.
    """

    damaged = False

    def __init__(
        self,
        path: str,
        sections: Sequence[tuple[int, int]],
        diff_ids: tuple[str, ...],
        progress: Progress | None,
    ) -> None:
        self._path, self._sections, self.diff_ids = path, sections, diff_ids
        self._progress = progress
        self.size_bytes = sum(length for _, length in sections)

    @classmethod
    def open(
        cls,
        path: str,
        name: str,
        folder: str,
        progress: Progress | None = None,
        *,
        limit_bytes: int = 1 << 62,
    ) -> ArchiveLayers:
        """Open the layers of the image `name` in an archive; "" where it has only one.

        A compressed archive is unpacked into `folder` first, up to `limit_bytes`.
        """
        archive = DockerArchive.open(path, folder, limit_bytes)
        config, sections = archive.image(name)
        diff_ids = diff_ids_of(config)
        if len(diff_ids) != len(sections):
            raise CorruptDataError(f"{path} lists other layers than its image's config")
        return cls(archive.path, sections, diff_ids, progress)

    def close(self) -> None:
        """Nothing is held."""

    @contextmanager
    def open_layer(self, number: int) -> Iterator[Iterator[bytes]]:
        offset, length = self._sections[number]
        name = f"{number} of {self._path}"
        with open_section(self._path, length, self._progress, offset) as source:
            content = LayerContent(decompress(source))
            with prefetch(content.pieces) as pieces:
                yield pieces
                content.drain(pieces)
        content.check(name, self.diff_ids[number])


class LayerContent:
    """A layer's tar bytes, whose digest is checked when they have been read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._check = hashlib.sha256()
        self.pieces = self._hash(pieces)

    def _hash(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._check.update(piece)
            yield piece

    def drain(self, pieces: Iterator[bytes]) -> None:
        """Read what follows the end of the tar file, which the digest covers."""
        padding_bytes = 0
        for piece in pieces:
            padding_bytes += len(piece)
            if padding_bytes > _MOST_PADDING_BYTES:
                break

    def check(self, layer: str, diff_id: str) -> None:
        """Raise CorruptDataError unless the bytes have the digest `diff_id`."""
        if f"sha256:{self._check.hexdigest()}" != diff_id:
            raise CorruptDataError(
                f"the layer {layer} unpacks to other bytes than the image's config says "
                f"({diff_id}): no container program would take it; make and push the image again"
            )


def check_same_layers(some: Sequence[str], others: Sequence[str], what: str) -> None:
    """Raise UsageError unless two images have the same `diff_ids`; `what` names them both."""
    if tuple(some) != tuple(others):
        raise UsageError(f"{what} are different images: their layers differ")
