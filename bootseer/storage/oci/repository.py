"""The contract of repositories of images and artifacts.

A repository has manifests, by tag or digest, and blobs, by digest. Every manifest is checked
against its digest before it is returned, and so is a blob that is read whole; a range of a blob
cannot be checked here: its reader does that, by digests of the blob's parts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from bootseer.storage.oci.manifest import Descriptor, Index, Manifest, Platform
from bootseer.storage.oci.reference import Reference
from bootseer.storage.store import Store

Progress = Callable[[int], None]
"""Called with the number of bytes that were transferred since the last call."""


class BlobStream(Protocol):
    """One blob read from an offset to its end; a context manager.

    After a cut it goes on where it was. With `verify` and from offset 0, `readinto` returns 0 only
    when all bytes had the digest, else it raises CorruptDataError: use no byte before that.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole blob; -1 where the registry does not report them."""

    def readinto(self, view: memoryview, /) -> int:
        """Put some of the next bytes into `view`; how many, 0 at the end."""

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes, fewer at the end only; all that are left when negative."""

    def cancel(self) -> None:
        """Make the thread that reads fail soon; for another thread."""

    def close(self) -> None:
        """Close the connection; twice is safe."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class RepositoryReader(Protocol):
    """A repository to be read, by any number of threads; a context manager.

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

        NotSupportedError lists the image's platforms when this one is not among them.
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
    """A repository to be read and written."""

    @property
    def reference(self) -> Reference:
        """The repository's own reference, without tag and digest."""

    @property
    def plain_http(self) -> bool:
        """Whether the registry itself is asked without TLS."""

    def resolve(self, version: str) -> Descriptor:
        """The manifest or index that a tag or digest names, which is then in memory."""

    def has_blob(self, digest: str) -> bool:
        """Whether the repository holds a blob."""

    def push_blob(
        self,
        source: str | bytes,
        digest: str,
        size_bytes: int,
        *,
        progress: Progress | None = None,
    ) -> bool:
        """Store a blob, given as bytes or as a file's path; False when it was there already.

        CorruptDataError when the source has another digest.
        """

    def push_manifest(self, raw: bytes, media_type: str, tag: str = "") -> Descriptor:
        """Store a manifest under its digest, and a tag; it becomes a referrer of its subject."""

    def delete_referrer(self, subject: str, digest: str) -> None:
        """Delete a manifest that refers to `subject`; a missing one is no error.

        NotSupportedError where the registry deletes nothing; then nothing is changed. Its blobs are
        removed when the registry collects garbage.
        """

    def tags(self) -> list[str]:
        """All tags, sorted."""
