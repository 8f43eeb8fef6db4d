"""Repositories of images and artifacts: the interface.

A repository is a place of manifests, found by tag or digest, and of blobs, found by digest. Every
manifest is checked against its digest before anybody sees it, and so is a blob read whole; a
range of a blob cannot be checked here, which is for whoever knows the digests of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from bootseer.storage.oci.manifest import Descriptor, Index, Manifest, Platform
from bootseer.storage.oci.reference import Reference
from bootseer.storage.store import Store

Progress = Callable[[int], None]
"""Called with the bytes that were moved since the last call."""


class BlobStream(Protocol):
    """One blob read from an offset to its end; a context manager.

    After a cut it goes on where it was. With `verify` and from offset 0, `readinto` answers 0
    only when all bytes had the digest; CorruptDataError else: until then none may be believed.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole blob; -1 where the registry does not say."""

    def readinto(self, view: memoryview, /) -> int:
        """Put the next bytes into `view`; how many, 0 at the end. Fills less than all at will."""

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes, fewer at the end only; all that are left when negative."""

    def cancel(self) -> None:
        """Make whoever reads fail soon; for another thread."""

    def close(self) -> None:
        """Let go of the connection; twice is safe."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class RepositoryReader(Protocol):
    """What is read of a repository; any number of threads may use it. A context manager.

    Raises NotFoundError, AccessDeniedError, StoreUnavailableError, CorruptDataError and
    NotSupportedError as stores do.
    """

    @property
    def store(self) -> Store:
        """Its blobs, named by digest; read-only."""

    def manifest(self, descriptor: Descriptor | str) -> Manifest | Index:
        """A manifest or index by its descriptor or digest."""

    def image(self, version: str, platform: Platform | None = None) -> tuple[Descriptor, Manifest]:
        """The manifest of an image for a platform (None: this machine's).

        NotSupportedError names the platforms there are when this one is not among them.
        """

    def blob(self, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
        """A small blob whole, checked."""

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> BlobStream:
        """Read a blob from `offset` to its end by one request."""

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        """Manifests whose subject is `digest`, of one artifact type or of all."""

    def close(self) -> None:
        """Close idle connections; twice is safe."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Repository(RepositoryReader, Protocol):
    """One repository, also to be written."""

    @property
    def reference(self) -> Reference:
        """Where this is: a reference without tag and digest."""

    def resolve(self, version: str) -> Descriptor:
        """The manifest or index that a tag or digest names; its bytes are then at hand."""

    def has_blob(self, digest: str) -> bool:
        """Whether the repository holds a blob."""

    def push_blob(
        self,
        source: str | bytes,
        digest: str,
        size_bytes: int,
        *,
        mount_from: str = "",
        progress: Progress | None = None,
    ) -> bool:
        """Store a blob, given as bytes or as a file's path; False when it was there already.

        `mount_from` is a repository of the same registry that may hold it. CorruptDataError when
        the source has not the digest.
        """

    def push_manifest(self, raw: bytes, media_type: str, tag: str = "") -> Descriptor:
        """Store a manifest under its digest, and a tag; a subject will find it as a referrer."""

    def delete_referrer(self, subject: str, digest: str) -> None:
        """Delete a manifest that refers to `subject`; one that is not there is no error.

        NotSupportedError where the registry deletes nothing; then nothing is changed. Its blobs go
        when the registry collects garbage.
        """

    def tags(self) -> list[str]:
        """All tags, sorted."""
