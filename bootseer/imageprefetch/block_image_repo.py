"""A block image in a repository: which referrer it is, its manifest, its checked blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootseer.blockimage import hotset_manifest
from bootseer.blockimage.pack_format import Boot, parse_boot
from bootseer.blocks.zstd_frames import unpack_frame
from bootseer.errors import CorruptDataError
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.manifest import Manifest, digest_of
from bootseer.storage.oci.media_types import BLOCK_IMAGE, BLOCK_IMAGE_NOTE, DATA, META, TABLE

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor
    from bootseer.storage.oci.repository import RepositoryReader

META_LIMIT_BYTES = 1 << 30
TABLE_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class BlockImageBlobs:
    """The blobs of the block image `block_image` (a digest) that a mount may need."""

    block_image: str
    meta: Descriptor
    table: Descriptor
    data: str


def find_block_image(
    repository: RepositoryReader, referrers: Sequence[Descriptor]
) -> Descriptor | None:
    """The block image among all referrers of an image.

    Of several (made by different versions of zstd, say) one that hot sets were made for; of several
    such the same one everywhere, in whatever order the registry lists them.
    """
    block_images = [one for one in referrers if one.artifact_type == BLOCK_IMAGE]
    if len(block_images) > 1:
        annotated = hotset_manifest.with_annotations(repository, referrers)
        hot = {one.annotations.get(BLOCK_IMAGE_NOTE) for one in annotated}
        return min(block_images, key=lambda one: (one.digest not in hot, one.digest))
    return block_images[0] if block_images else None


def fetch_manifest(repository: RepositoryReader, digest: str) -> Manifest:
    """The manifest of a block image. Raises CorruptDataError for an index."""
    manifest = repository.manifest(digest)
    if not isinstance(manifest, Manifest):
        raise CorruptDataError(f"{digest} is a list instead of a block image")
    return manifest


def blobs_of(manifest: Manifest, digest: str) -> BlockImageBlobs:
    """The blobs of a block image by its manifest, whose digest is `digest`."""
    meta, table, data = (manifest.layer(kind) for kind in (META, TABLE, DATA))
    if meta is None or table is None or data is None:
        raise CorruptDataError(f"{digest} is no whole block image; build it again")
    return BlockImageBlobs(digest, meta, table, data.digest)


def check_boot(stored: bytes | bytearray, digest: str) -> Boot:
    """The first bytes of a pack, parsed. Raises CorruptDataError unless they have the digest."""
    if digest_of(stored) != digest:
        raise CorruptDataError("the pack's first bytes do not match their digest")
    return parse_boot(stored)


def unpack_metadata(packed: bytes) -> bytes:
    """The EROFS metadata of its blob. Raises CorruptDataError."""
    return unpack_frame(packed, most_bytes=META_LIMIT_BYTES, name="the image's metadata")
