"""An image's config: how its programs are run, for which platform it is, what its layers unpack to.

Source: OCI image specification (image configuration); Docker's has the same shape.
"""

from __future__ import annotations

import json

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import CorruptDataError
from bootseer.storage.oci.manifest import Platform, parse_object
from bootseer.storage.oci.platforms import check_alone
from bootseer.storage.oci.reference import DIGEST

LIMIT_BYTES = 16 << 20
MAX_LAYERS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class ImageConfig:
    """How the programs of an image are run, in Dockerfile's words."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    stop_signal: str = ""


def parse_config(raw: bytes) -> ImageConfig:
    """Read an image's config. Raises CorruptDataError for a damaged one."""
    try:
        settings = json.loads(raw).get("config") or {}
        return ImageConfig(
            entrypoint=_words(settings.get("Entrypoint")),
            cmd=_words(settings.get("Cmd")),
            env=_words(settings.get("Env")),
            working_dir=_text(settings.get("WorkingDir")),
            user=_text(settings.get("User")),
            stop_signal=_text(settings.get("StopSignal")),
        )
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise _damage_error(error) from error


def _words(value: object) -> tuple[str, ...]:
    words = value or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise TypeError("a value that is no list of words")
    return tuple(words)


def _text(value: object) -> str:
    text = value or ""
    if not isinstance(text, str):
        raise TypeError("a value that is no text")
    return text


def platform_of(raw: bytes) -> Platform | None:
    """The platform that a config names; None where it names none.

    Raises CorruptDataError for a damaged config.
    """
    try:
        config = json.loads(raw)
        names = [config.get(name) or "" for name in ("os", "architecture", "variant")]
    except (ValueError, AttributeError, RecursionError) as error:
        raise _damage_error(error) from error
    is_named = all(isinstance(name, str) for name in names) and names[1]
    return Platform(*names) if is_named else None


def check_platform_of(raw: bytes, ref: str) -> None:
    """Raise NotSupportedError for the config of an image of another platform than this machine's.

    From an index an image is chosen by platform; an image alone is found whatever it is for.
    """
    platform = platform_of(raw)
    if platform is not None:
        check_alone(platform, ref)


def diff_ids_of(raw: bytes) -> tuple[str, ...]:
    """The digests of an image's unpacked layers, the lowest first."""
    rootfs = parse_object(raw, "the image's config").get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) > MAX_LAYERS:
        raise CorruptDataError("the image's config does not list its layers")
    for digest in diff_ids:
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise CorruptDataError("the image's config lists a layer without a digest")
    return tuple(diff_ids)


def _damage_error(error: Exception) -> CorruptDataError:
    return CorruptDataError(f"the image's config is damaged: {error}")
