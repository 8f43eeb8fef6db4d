"""How an image wants its programs to be run: its config, as the registry has it, kept here."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, CorruptDataError

if TYPE_CHECKING:
    from bootseer.imageprefetch.image_cache import ImageCache
    from bootseer.storage.oci.manifest import Descriptor, Manifest, Platform
    from bootseer.storage.oci.repository import RepositoryReader

KIND = "config"
"""The kind of file, as `ImageCache` has kinds, of an image's manifest and config."""
LIMIT_BYTES = 8 << 20


def kept(digest: str, local: ImageCache) -> bytes | None:
    """The config of the image with this digest, if this node keeps it."""
    from bootseer.storage.oci.manifest import Manifest, parse_manifest

    raw = local.has(digest, KIND, digest)
    manifest = parse_manifest(raw) if raw is not None else None
    if not isinstance(manifest, Manifest):
        return None
    return local.has(digest, KIND, manifest.config.digest)


def platform_of(raw: bytes) -> Platform | None:
    """What an image's config says that the image is for; None where that is nothing.

    Raises CorruptDataError for what is no config.
    """
    from bootseer.storage.oci.manifest import Platform

    try:
        about = json.loads(raw)
        names = [about.get(name) or "" for name in ("os", "architecture", "variant")]
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"the image's config is damaged: {error}") from error
    told = all(isinstance(name, str) for name in names) and names[1]
    return Platform(*names) if told else None


def check_machine(raw: bytes, ref: str) -> None:
    """Raise NotSupportedError for the config of an image of another platform than this machine's.

    An index is chosen from by platform; an image alone is found whatever it is for.
    """
    offered = platform_of(raw)
    if offered is not None:
        from bootseer.storage.oci.platforms import check_alone

        check_alone(offered, ref)


def fetch_and_keep(
    repository: RepositoryReader, image: Descriptor, manifest: Manifest, local: ImageCache
) -> bytes:
    """The config of an image by its manifest, checked. Raises what the repository raises."""
    raw = repository.blob(manifest.config, limit_bytes=LIMIT_BYTES)
    with contextlib.suppress(BootseerError):  # a full disk: it is fetched again next time
        local.keep(image.digest, KIND, manifest.config.digest, raw)
        local.keep(image.digest, KIND, image.digest, manifest.raw)
    return raw
