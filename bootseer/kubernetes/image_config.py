"""The command that an image starts, read from its registry.

Source: OCI image specification (image configuration).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.storage.oci.manifest import Platform, parse_object
from bootseer.storage.oci.open import open_repository
from bootseer.storage.options import StoreOptions

LIMIT_BYTES = 4 << 20
RETRY_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image runs: ENTRYPOINT and CMD in Dockerfile's words."""

    entrypoint: tuple[str, ...]
    command: tuple[str, ...]


def resolver(
    *, plain_http: bool = False, architecture: str = "amd64"
) -> Callable[[str], ImageConfig]:
    """A function from an image's name to its configuration; each image is asked for once.

    Logins and mirrors are those of container tools. Raises a BootseerError that completes
    "and ...".
    """
    known: dict[str, ImageConfig] = {}

    def resolve(image: str) -> ImageConfig:
        if image not in known:
            known[image] = _read(image, plain_http, Platform("linux", architecture))
        return known[image]

    return resolve


def _read(image: str, plain_http: bool, platform: Platform) -> ImageConfig:
    repository, reference = open_repository(
        image, StoreOptions(retry_s=RETRY_S), plain_http=plain_http or None
    )
    with repository:
        try:
            _, manifest = repository.image(reference.version, platform)
            raw = repository.blob(manifest.config, limit_bytes=LIMIT_BYTES)
            run = parse_object(raw, f"the configuration of {image}").get("config")
        except BootseerError as error:
            raise type(error)(f"its registry does not tell: {error}") from error
    run = run if isinstance(run, dict) else {}
    return ImageConfig(_words(run.get("Entrypoint")), _words(run.get("Cmd")))


def _words(value: object) -> tuple[str, ...]:
    return tuple(str(word) for word in value) if isinstance(value, list) else ()
