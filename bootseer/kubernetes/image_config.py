"""The command that an image starts, read from its registry.

Source: OCI image specification (image configuration).
"""

from __future__ import annotations

from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.storage.oci.config import LIMIT_BYTES, ImageConfig, parse_config
from bootseer.storage.oci.manifest import Platform
from bootseer.storage.oci.open import open_repository
from bootseer.storage.options import StoreOptions

RETRY_S = 2.0


def make_resolver(
    *, plain_http: bool = False, architecture: str = "amd64"
) -> Callable[[str], ImageConfig]:
    """A function from an image's name to its configuration, which reads each image only once.

    Logins and mirrors are those of container tools. The function raises a BootseerError whose
    message completes "and ...".
    """
    configs: dict[str, ImageConfig] = {}

    def resolve(image: str) -> ImageConfig:
        if image not in configs:
            configs[image] = _fetch_config(image, plain_http, Platform("linux", architecture))
        return configs[image]

    return resolve


def _fetch_config(image: str, plain_http: bool, platform: Platform) -> ImageConfig:
    repository, reference = open_repository(
        image, StoreOptions(retry_s=RETRY_S), plain_http=plain_http or None
    )
    with repository:
        try:
            _, manifest = repository.image(reference.version, platform)
            return parse_config(repository.blob(manifest.config, limit_bytes=LIMIT_BYTES))
        except BootseerError as error:
            raise type(error)(f"its registry does not tell: {error}") from error
