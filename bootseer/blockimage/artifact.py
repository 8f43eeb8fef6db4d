"""A built image as an OCI artifact: its blobs in a folder, its manifest, and pushing it.

docs/block-image-format.md names the media types. The folder's `artifact.json` is written last, so
a folder that has one is whole and can be pushed, or pushed again, by any process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage.build import DATA_NAME, Built
from bootseer.errors import from_os_error
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.manifest import Descriptor, manifest_bytes
from bootseer.storage.oci.media_types import (
    BLOCK_IMAGE,
    CONFIG,
    DATA,
    FILES,
    META,
    OCI_MANIFEST,
    TABLE,
)
from bootseer.system.atomic import replace_file

if TYPE_CHECKING:
    from bootseer.storage.oci.repository import Repository

VERSION = 1
META_LEVEL, LARGE_META_LEVEL = 19, 9
LARGE_META_BYTES = 16 << 20  # seconds of packing; a start waits for every byte
_LIST_NAME = "artifact.json"
_NAMES = {CONFIG: "config", META: "meta.zst", TABLE: "table", DATA: DATA_NAME, FILES: "files"}
_ORDER = (META, TABLE, DATA, FILES)
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Blob:
    """One blob of an artifact and the file that holds it."""

    media_type: str
    digest: str
    size_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """An image's blobs by media type. `about` is what its config says."""

    blobs: Mapping[str, Blob]
    about: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of all blobs."""
        return sum(blob.size_bytes for blob in self.blobs.values())


def pack(built: Built, about: Mapping[str, Any]) -> Artifact:
    """Make the artifact of an image, next to its files; `about` goes into its config.

    Equal images and equal `about` give equal blobs, as long as zstd's version is the same; the
    config names that version. The unpacked metadata is left to the caller.
    """
    import zstandard

    folder = os.path.dirname(built.data_path)
    meta = _read(built.meta_path)
    table = built.table
    config = {
        "version": VERSION,
        **about,
        "data_bytes": table.size_bytes,
        "block_bytes": table.block_bytes,
        "meta_bytes": len(meta),
        "meta_digest": _digest(meta),
        "files": len(built.files.files),
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
    }
    level = META_LEVEL if len(meta) <= LARGE_META_BYTES else LARGE_META_LEVEL
    packer = zstandard.ZstdCompressor(level=level, write_checksum=True)
    blobs = {
        META: _write(folder, META, packer.compress(meta)),
        TABLE: _write(folder, TABLE, table.serialise()),
        FILES: _write(folder, FILES, built.files.serialise()),
        CONFIG: _write(folder, CONFIG, json.dumps(config, indent=1, sort_keys=True).encode()),
        DATA: _blob(DATA, built.data_path),
    }
    return Artifact(blobs, config)


def save(artifact: Artifact, folder: str) -> None:
    """Write down that the artifact in `folder` is whole."""
    rows = [dataclasses.asdict(blob) for blob in artifact.blobs.values()]
    for row in rows:
        row["path"] = os.path.basename(row["path"])
    text = json.dumps({"version": VERSION, "blobs": rows, "about": dict(artifact.about)})
    path = os.path.join(folder, _LIST_NAME)
    try:
        replace_file(path, text.encode("ascii"))
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error


def load(folder: str) -> Artifact | None:
    """The whole artifact in `folder`, its files of the right sizes; None when there is none.

    Their bytes are checked when they are pushed.
    """
    try:
        document = json.loads(_read(os.path.join(folder, _LIST_NAME)))
        blobs = [
            Blob(
                str(row["media_type"]),
                str(row["digest"]),
                int(row["size_bytes"]),
                os.path.join(folder, os.path.basename(row["path"])),
            )
            for row in document["blobs"]
        ]
        fits = all(os.stat(blob.path).st_size == blob.size_bytes for blob in blobs)
        by_type = {blob.media_type: blob for blob in blobs}
        if not fits or by_type.keys() != _NAMES.keys() or document["version"] != VERSION:
            return None
        return Artifact(by_type, dict(document["about"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not whole: it is built again


def forget(folder: str) -> None:
    """Have the artifact in `folder` built again; does nothing where there is none."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, _LIST_NAME))


def manifest(artifact: Artifact, subject: Descriptor | None) -> bytes:
    """The artifact's manifest; equal arguments give equal bytes."""
    return manifest_bytes(
        config=_descriptor(artifact.blobs[CONFIG]),
        layers=[_descriptor(artifact.blobs[kind]) for kind in _ORDER],
        subject=subject,
        artifact_type=BLOCK_IMAGE,
    )


def push(
    artifact: Artifact,
    repository: Repository,
    subject: Descriptor | None,
    *,
    tag: str = "",
    progress: Callable[[int], None] | None = None,
) -> Descriptor:
    """Push blobs that are not there yet, then the manifest. Raises what the repository raises."""
    for kind in (*_ORDER, CONFIG):
        blob = artifact.blobs[kind]
        repository.push_blob(blob.path, blob.digest, blob.size_bytes, progress=progress)
    return repository.push_manifest(manifest(artifact, subject), OCI_MANIFEST, tag)


def _descriptor(blob: Blob) -> Descriptor:
    return Descriptor(blob.media_type, blob.digest, blob.size_bytes)


def _write(folder: str, kind: str, data: bytes) -> Blob:
    path = os.path.join(folder, _NAMES[kind])
    try:
        with open(path, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error
    return Blob(kind, _digest(data), len(data), path)


def _blob(kind: str, path: str) -> Blob:
    check = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb", buffering=0) as source:
            while piece := source.read(_PIECE_BYTES):
                check.update(piece)
                size += len(piece)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error
    return Blob(kind, f"sha256:{check.hexdigest()}", size, path)


def _read(path: str) -> bytes:
    with open(path, "rb") as source:
        return source.read()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
