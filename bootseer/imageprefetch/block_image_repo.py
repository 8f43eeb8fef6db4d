"""A block image's pieces as the registry has them: which is which, checked and unpacked."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from bootseer.blockimage import hotset_manifest
from bootseer.blockimage.media_types import BLOCK_IMAGE as ARTIFACT
from bootseer.blockimage.media_types import DATA, META, TABLE
from bootseer.blockimage.pack_format import Boot, parse_boot
from bootseer.errors import CorruptDataError, DeadlineError
from bootseer.imageprefetch.image_cache import KeptPack
from bootseer.light_dataclasses import dataclass

if TYPE_CHECKING:
    from bootseer.blocks.cache.present_index import Identity
    from bootseer.storage.oci.manifest import Descriptor, Manifest
    from bootseer.storage.oci.repository import RepositoryReader

META_LIMIT_BYTES = 1 << 30
TABLE_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Parts:
    """A block image's blobs that mounting may need."""

    block_image: str
    meta: Descriptor
    table: Descriptor
    data: str

    @classmethod
    def of(cls, manifest: Manifest, digest: str) -> Parts:
        found = [manifest.layer(kind) for kind in (META, TABLE, DATA)]
        meta, table, data = found
        if meta is None or table is None or data is None:
            raise CorruptDataError(f"{digest} is no whole block image; build it again")
        return cls(digest, meta, table, data.digest)


T = TypeVar("T")


class Asked(Generic[T]):
    """Something that is asked in another thread meanwhile."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="image-ask", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._ask())
        except BaseException as error:  # handed over to the thread that waits
            self._error = error

    def result(self, wait_s: float | None = None) -> T:
        """What was found; raises what asking raised, DeadlineError where that takes longer."""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            raise DeadlineError(f"no answer within {wait_s:g} s")
        if self._error is not None:
            raise self._error
        return self._found[0]


def block_image_of(repository: RepositoryReader, listed: Sequence[Descriptor]) -> Descriptor | None:
    """The block image among all of an image's referrers.

    Of several (made by different versions of zstd, say) one that hot sets were made for, and of
    such the same one everywhere, in whatever order the registry lists them.
    """
    found = [one for one in listed if one.artifact_type == ARTIFACT]
    if len(found) > 1:
        told = hotset_manifest.with_annotations(repository, listed)
        hot = {one.annotations.get(hotset_manifest.BLOCK_IMAGE) for one in told}
        return min(found, key=lambda one: (one.digest not in hot, one.digest))
    return found[0] if found else None


def manifest_of(repository: RepositoryReader, digest: str) -> Manifest:
    from bootseer.storage.oci.manifest import Manifest

    found = repository.manifest(digest)
    if not isinstance(found, Manifest):
        raise CorruptDataError(f"{digest} is a list instead of a block image")
    return found


def boot_of(stored: bytes | bytearray, pack: KeptPack) -> Boot:
    if digest_of(stored) != pack.boot_digest:
        raise CorruptDataError("the pack's first bytes do not match their digest")
    return parse_boot(stored)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def unpacked(packed: bytes) -> bytes:
    import zstandard

    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= META_LIMIT_BYTES:
            raise CorruptDataError("the image's metadata unpacks to more than is allowed")
        return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"the image's metadata is no intact zstd frame: {error}") from error


def cached_as(digest: str, table: bytes) -> Identity:
    """Under what the node cache keeps the data of a table with this digest."""
    from bootseer.blocks.table import identity_of_table

    return identity_of_table(digest.partition(":")[2], table)


def table_size(table: bytes) -> int:
    from bootseer.blocks.table import parse

    return parse(table).size_bytes
