"""Images written by hand: OCI layouts and docker-archives, from layers of tar members or trees.

Nothing is run and nothing is unpacked: what stands in a member stands in the layer.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from tools.images.members import Member, pieces

Compression = Literal["none", "gzip", "zstd"]
Flavour = Literal["oci", "docker"]
Config = Mapping[str, Any]

_MANIFEST = {
    "oci": "application/vnd.oci.image.manifest.v1+json",
    "docker": "application/vnd.docker.distribution.manifest.v2+json",
}
_CONFIG = {
    "oci": "application/vnd.oci.image.config.v1+json",
    "docker": "application/vnd.docker.container.image.v1+json",
}
_INDEX = "application/vnd.oci.image.index.v1+json"
_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"


@dataclass(frozen=True, slots=True)
class Stored:
    """A layer that lies in a layout already."""

    path: Path
    media_type: str
    digest: str
    diff_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's members in their order, the bytes of a tar file, or a layer made before."""

    members: Sequence[Member] = ()
    raw_tar: bytes | Path | None = None
    stored: Stored | None = None
    compression: Compression = "gzip"
    level: int = 1


@dataclass(frozen=True, slots=True)
class Image:
    """An image of one platform; `config` is the inner one (`Env`, `Entrypoint`, `Cmd`, …)."""

    layers: Sequence[Layer | Sequence[Member]]
    config: Config = field(default_factory=dict)
    os: str = "linux"
    architecture: str = "amd64"
    variant: str = ""
    flavour: Flavour = "oci"
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_layout` made: the folder, the tag and the digest that the tag stands for."""

    folder: Path
    tag: str
    digest: str
    manifest_digests: tuple[str, ...]

    @property
    def source(self) -> str:
        """The image as skopeo, podman and umoci name it."""
        return f"oci:{self.folder}:{self.tag}"

    def layers(self) -> list[Stored]:
        """The layers of the first platform's image."""
        manifest = self._document(self.manifest_digests[0])
        diff_ids = self._document(manifest["config"]["digest"])["rootfs"]["diff_ids"]
        return [
            Stored(self._path(m["digest"]), m["mediaType"], m["digest"], diff_id, m["size"])
            for m, diff_id in zip(manifest["layers"], diff_ids, strict=True)
        ]

    def _path(self, digest: str) -> Path:
        return self.folder / "blobs/sha256" / digest.partition(":")[2]

    def _document(self, digest: str) -> Any:
        return json.loads(self._path(digest).read_bytes())


def open_layout(folder: Path, tag: str) -> Written:
    """A layout written before; KeyError when it has no such tag."""
    tops = json.loads((folder / "index.json").read_bytes())["manifests"]
    found = {top["annotations"]["org.opencontainers.image.ref.name"]: top for top in tops}
    top = found[tag]
    if top["mediaType"] != _INDEX:
        return Written(folder, tag, top["digest"], (top["digest"],))
    index = json.loads((folder / "blobs/sha256" / top["digest"][7:]).read_bytes())
    return Written(folder, tag, top["digest"], tuple(m["digest"] for m in index["manifests"]))


def write_layout(folder: Path, images: Image | Sequence[Image], *, tag: str = "latest") -> Written:
    """Add an image (several platforms: an index) under `tag` to the layout in `folder`."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="ascii")
    if isinstance(images, Image):
        made = [_write_image(blobs, images)]
        top = dict(made[0])
    else:
        made = [_write_image(blobs, image) for image in images]
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": made}
        top = _put(blobs, index, _INDEX)
    top.pop("platform", None)
    top["annotations"] = {"org.opencontainers.image.ref.name": tag}
    path = folder / "index.json"
    held = json.loads(path.read_text(encoding="utf-8"))["manifests"] if path.exists() else []
    held = [m for m in held if m.get("annotations") != top["annotations"]]
    path.write_text(json.dumps({"schemaVersion": 2, "manifests": [*held, top]}), encoding="utf-8")
    return Written(folder, tag, top["digest"], tuple(m["digest"] for m in made))


def write_docker_archive(path: Path, image: Image, *, name: str = "lab/image:latest") -> str:
    """Write what `docker save` does; returns the image's id (the config's digest)."""
    names: list[str] = []
    with tarfile.open(path, "w") as archive:
        diff_ids = []
        for number, layer in enumerate(image.layers):
            whole = io.BytesIO()
            write_tar(whole, _as_layer(layer))
            names.append(f"{number}/layer.tar")
            _add(archive, names[-1], whole.getvalue())
            diff_ids.append(digest_of(whole.getvalue()))
        config = _json(_config_of(image, diff_ids))
        config_name = f"{digest_of(config)[7:]}.json"
        _add(archive, config_name, config)
        about = [{"Config": config_name, "RepoTags": [name], "Layers": names}]
        _add(archive, "manifest.json", _json(about))
    return digest_of(config)


def digest_of(data: bytes) -> str:
    """`sha256:…`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def write_tar(target: IO[bytes], layer: Layer) -> None:
    """Write a layer uncompressed."""
    if isinstance(layer.raw_tar, bytes):
        target.write(layer.raw_tar)
        return
    if layer.raw_tar is not None:
        for piece in pieces(layer.raw_tar):
            target.write(piece)
        return
    with tarfile.open(
        fileobj=target, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8"
    ) as archive:
        for member in layer.members:
            archive.addfile(member.info, _Reader(pieces(member.content)))  # type: ignore[arg-type]


def _write_image(blobs: Path, image: Image) -> dict[str, Any]:
    layers, diff_ids = [], []
    for item in image.layers:
        descriptor, diff_id = _write_layer(blobs, _as_layer(item), image.flavour)
        layers.append(descriptor)
        diff_ids.append(diff_id)
    kind = _MANIFEST[image.flavour]
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": _put(blobs, _config_of(image, diff_ids), _CONFIG[image.flavour]),
        "layers": layers,
    }
    if image.annotations:
        manifest["annotations"] = dict(image.annotations)
    platform = {"os": image.os, "architecture": image.architecture}
    if image.variant:
        platform["variant"] = image.variant
    return {**_put(blobs, manifest, kind), "platform": platform}


def _config_of(image: Image, diff_ids: Sequence[str]) -> dict[str, Any]:
    environment = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
    config: dict[str, Any] = {
        "architecture": image.architecture,
        "os": image.os,
        "config": {**environment, **image.config},
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        "history": [{"created_by": f"layer {n}"} for n, _ in enumerate(diff_ids)],
    }
    return {**config, "variant": image.variant} if image.variant else config


def _write_layer(blobs: Path, layer: Layer, flavour: Flavour) -> tuple[dict[str, Any], str]:
    if layer.stored:
        held = layer.stored
        shutil.copyfile(held.path, blobs / held.digest[7:])
        about = {"mediaType": held.media_type, "digest": held.digest, "size": held.size_bytes}
        return about, held.diff_id
    part = blobs / f"{id(layer):x}.part"
    with part.open("wb") as file:
        stored = _Hashed(file.write)
        packed = _packer(layer.compression, layer.level, stored)
        raw = _Hashed(packed.write)
        write_tar(raw, layer)  # type: ignore[arg-type]
        packed.finish()
    part.replace(blobs / stored.digest[7:])
    ending = {"none": "", "gzip": "+gzip", "zstd": "+zstd"}[layer.compression]
    kind = _OCI_LAYER + ending
    if flavour == "docker":
        kind = _DOCKER_LAYER + ending.replace("+", ".")
    return {"mediaType": kind, "digest": stored.digest, "size": stored.size}, raw.digest


def _put(blobs: Path, document: object, kind: str) -> dict[str, Any]:
    data = _json(document)
    (blobs / digest_of(data)[7:]).write_bytes(data)
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _as_layer(item: Layer | Sequence[Member]) -> Layer:
    return item if isinstance(item, Layer) else Layer(item)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


class _Reader:
    """Pieces as a file that is read forward."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._held = b""
        self._at = 0

    def read(self, size: int) -> bytes:
        out = []
        while size:
            if self._at == len(self._held):
                self._held, self._at = next(self._source, b""), 0
                if not self._held:
                    break
            out.append(self._held[self._at : self._at + size])
            self._at += len(out[-1])
            size -= len(out[-1])
        return b"".join(out)


class _Hashed:
    """Passes bytes on, and knows their digest and their number."""

    def __init__(self, pass_on: Any) -> None:
        self._pass_on = pass_on
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        self._pass_on(data)
        return len(data)

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


class _Packer:
    """A compressor as an output; `finish` writes what it still holds."""

    def __init__(self, compressor: Any, target: _Hashed) -> None:
        self._compressor = compressor
        self._target = target

    def write(self, data: bytes) -> None:
        self._target.write(self._compressor.compress(data) if self._compressor else data)

    def finish(self) -> None:
        if self._compressor:
            self._target.write(self._compressor.flush())


def _packer(compression: Compression, level: int, target: _Hashed) -> _Packer:
    if compression == "gzip":  # 16 = with a gzip header, which has no time in it
        return _Packer(zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS), target)
    if compression == "zstd":
        import zstandard

        return _Packer(zstandard.ZstdCompressor(level=level).compressobj(), target)
    return _Packer(None, target)
