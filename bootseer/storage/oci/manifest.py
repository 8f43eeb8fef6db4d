"""Manifests, indexes and descriptors: from bytes to records and back. Pure.

Sources: OCI image specification 1.1 (descriptor, manifest, index); Docker's image manifest
version 2 schema 2, whose types have the same shape.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import CorruptDataError, NotSupportedError
from bootseer.storage.oci.reference import DIGEST

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_EMPTY = "application/vnd.oci.empty.v1+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPES = frozenset((OCI_INDEX, DOCKER_INDEX))
MANIFEST_TYPES = frozenset((OCI_MANIFEST, DOCKER_MANIFEST))
ACCEPT = ", ".join((OCI_INDEX, OCI_MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST))

EMPTY_BYTES = b"{}"
"""The empty descriptor's blob, for a manifest that needs one and has no content for it."""
LIMIT_BYTES = 4 << 20
"""No registry accepts or serves a larger manifest."""
LARGEST_SIZE = 1 << 62
MOST_DESCRIPTORS = 10_000

NO_ANNOTATIONS: Mapping[str, str] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Platform:
    """What an image of an index runs on, in Go's names (linux, amd64, v8)."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob or manifest, by digest and size."""

    media_type: str
    digest: str
    size_bytes: int
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    artifact_type: str = ""
    platform: Platform | None = None

    @classmethod
    def parse(cls, value: object, what: str = "a descriptor") -> Descriptor:
        """A descriptor from parsed JSON; CorruptDataError, naming `what`, when it is none."""
        if not isinstance(value, dict):
            raise CorruptDataError(f"{what} holds a descriptor that is no object")
        digest, size = value.get("digest"), value.get("size", 0)
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise CorruptDataError(f"{what} holds a descriptor without a digest that we know")
        if type(size) is not int or not 0 <= size < LARGEST_SIZE:
            raise CorruptDataError(f"{what} holds a descriptor with an impossible size")
        return cls(
            _text(value.get("mediaType")),
            digest,
            size,
            parse_annotations(value.get("annotations")),
            _text(value.get("artifactType")),
            _platform(value.get("platform")),
        )

    def as_dict(self) -> dict[str, Any]:
        """The descriptor for JSON, without empty values."""
        value: dict[str, Any] = {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size_bytes,
        }
        if self.platform is not None:
            fields = dataclasses.asdict(self.platform)
            value["platform"] = {key: text for key, text in fields.items() if text}
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """An image's or artifact's manifest; `raw` are the bytes that its digest is of."""

    raw: bytes = dataclasses.field(repr=False)
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    subject: Descriptor | None = None
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    artifact_type: str = ""

    def layer(self, media_type: str) -> Descriptor | None:
        """The first layer of a media type."""
        return next((one for one in self.layers if one.media_type == media_type), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """A list of manifests: an image's platforms, or the referrers of a manifest."""

    raw: bytes = dataclasses.field(repr=False)
    media_type: str
    manifests: tuple[Descriptor, ...]
    subject: Descriptor | None = None
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    artifact_type: str = ""


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The sha256 digest of bytes, as registries spell it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_bytes(data: bytes | memoryview, digest: str, what: str) -> None:
    """Raise CorruptDataError, naming `what`, unless the bytes have the digest."""
    algorithm, _, expected = digest.partition(":")
    if hashlib.new(algorithm, data).hexdigest() != expected:
        raise CorruptDataError(f"{what} has other bytes than its digest says; they are not used")


def parse_manifest(raw: bytes, media_type: str = "", what: str = "a manifest") -> Manifest | Index:
    """Parse a manifest or an index.

    `media_type` is that of its descriptor or of the server; its own takes precedence. Raises
    CorruptDataError for what is neither, and NotSupportedError for a kind that is not read here.
    """
    if len(raw) > LIMIT_BYTES:
        raise CorruptDataError(f"{what} has more than {LIMIT_BYTES} bytes, which no manifest has")
    value = parse_object(raw, what)
    kind = _text(value.get("mediaType")) or media_type.partition(";")[0].strip().lower()
    if value.get("schemaVersion") != 2:
        raise NotSupportedError(
            f"{what} is of a schema other than 2; push the image again with a current tool"
        )
    # Some registries serve every manifest as `application/json`: its fields decide then.
    has_list = isinstance(value.get("manifests"), list)
    if has_list != (kind in INDEX_TYPES) and kind in INDEX_TYPES | MANIFEST_TYPES:
        raise CorruptDataError(f"{what} says that it is {kind} and is not")
    common: dict[str, Any] = {
        "subject": Descriptor.parse(value["subject"], what) if value.get("subject") else None,
        "annotations": parse_annotations(value.get("annotations")),
        "artifact_type": _text(value.get("artifactType")),
    }
    if has_list:
        return Index(raw, kind or OCI_INDEX, _descriptors(value["manifests"], what), **common)
    if not isinstance(value.get("layers"), list):
        raise NotSupportedError(f"{what} is {kind or 'of an unknown kind'}, which is not read here")
    config = Descriptor.parse(value.get("config"), what)
    layers = _descriptors(value["layers"], what)
    if not common["artifact_type"] and config.media_type not in (OCI_CONFIG, OCI_EMPTY):
        common["artifact_type"] = config.media_type  # which was an artifact's type before 1.1
    return Manifest(raw, kind or OCI_MANIFEST, config, layers, **common)


def manifest_bytes(
    *,
    config: Descriptor,
    layers: Sequence[Descriptor],
    subject: Descriptor | None = None,
    artifact_type: str = "",
    annotations: Mapping[str, str] = NO_ANNOTATIONS,
) -> bytes:
    """An OCI image manifest; equal arguments give equal bytes."""
    value: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_MANIFEST}
    if artifact_type:
        value["artifactType"] = artifact_type
    value["config"] = config.as_dict()
    value["layers"] = [layer.as_dict() for layer in layers]
    if subject is not None:
        # Without annotations and platform, which differ from one descriptor to another.
        identity = Descriptor(subject.media_type, subject.digest, subject.size_bytes)
        value["subject"] = identity.as_dict()
    if annotations:
        value["annotations"] = dict(annotations)
    return _json(value)


def index_bytes(
    manifests: Sequence[Descriptor], annotations: Mapping[str, str] = NO_ANNOTATIONS
) -> bytes:
    """An OCI index; equal arguments give equal bytes."""
    value: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX}
    value["manifests"] = [one.as_dict() for one in manifests]
    if annotations:
        value["annotations"] = dict(annotations)
    return _json(value)


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object, or CorruptDataError naming `what`."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{what} is no JSON") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{what} is no JSON object")
    return value


def parse_annotations(value: object) -> Mapping[str, str]:
    """Annotations from parsed JSON, without values that are no text."""
    if not isinstance(value, dict) or not value:
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str)}


def _descriptors(values: Sequence[object], what: str) -> tuple[Descriptor, ...]:
    if len(values) > MOST_DESCRIPTORS:
        raise CorruptDataError(f"{what} lists more than {MOST_DESCRIPTORS} descriptors")
    return tuple(Descriptor.parse(value, what) for value in values)


def _platform(value: object) -> Platform | None:
    if not isinstance(value, dict):
        return None
    words = (value.get("os"), value.get("architecture"), value.get("variant"))
    return Platform(*(_text(word) for word in words))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
