"""An OCI image of one layer, written as an image layout in a tar file.

Deterministic: entries are sorted, times are zero, owners are root, gzip carries no time. Format:
OCI image specification 1.1 (layout, index, manifest, config); the annotation that names the image
is the one that containerd's import reads.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GZIP_LEVEL = 9
_PREFIX = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class RunAs:
    """What the image runs: words, environment (`NAME=value`), and a numeric user."""

    entrypoint: Sequence[str]
    environment: Sequence[str] = ()
    user: str = "65534:65534"
    command: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """The image's digest, and its size in a registry in bytes."""

    digest: str
    size_bytes: int


def layer(root: Path) -> bytes:
    """An uncompressed tar of everything below `root`, the same bytes for the same content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(root.rglob("*"), key=lambda p: p.relative_to(root).parts):
            archive.addfile(*_member(path, path.relative_to(root).as_posix()))
    return buffer.getvalue()


def _member(path: Path, name: str) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    info = tarfile.TarInfo(name)
    status = path.lstat()
    info.mode = stat.S_IMODE(status.st_mode)
    if path.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        return info, None
    if path.is_dir():
        info.type = tarfile.DIRTYPE
        return info, None
    data = path.read_bytes()
    info.size = len(data)
    return info, io.BytesIO(data)


def write(
    target: Path, root: Path, name: str, run_as: RunAs, *, level: int = GZIP_LEVEL
) -> Written:
    """Write the image of `root` as `name` (`host/repository:tag`) to the tar file `target`."""
    raw = layer(root)
    packed = gzip.compress(raw, level, mtime=0)
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "User": run_as.user,
                "Entrypoint": list(run_as.entrypoint) or None,
                "Cmd": list(run_as.command) or None,
                "Env": list(run_as.environment),
                "Labels": dict(run_as.labels),
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [_digest(raw)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_PREFIX}.manifest.v1+json",
            "config": _descriptor(config, f"{_PREFIX}.config.v1+json"),
            "layers": [_descriptor(packed, f"{_PREFIX}.layer.v1.tar+gzip")],
        }
    )
    entry = _descriptor(manifest, f"{_PREFIX}.manifest.v1+json")
    entry["annotations"] = _names(name)
    blobs = {f"blobs/sha256/{_digest(b)[7:]}": b for b in (config, packed, manifest)}
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": [entry]}),
        **blobs,
    }
    _write_tar(target, files)
    return Written(_digest(manifest), sum(len(blob) for blob in blobs.values()))


def renamed(source: Path, target: Path, name: str) -> None:
    """Copy an image to `target` under another name; its digest stays."""
    with tarfile.open(source) as archive:
        files = {m.name: archive.extractfile(m) for m in archive.getmembers()}
        data = {key: file.read() for key, file in files.items() if file is not None}
    index = json.loads(data["index.json"])
    index["manifests"][0]["annotations"] = _names(name)
    _write_tar(target, {**data, "index.json": _json(index)})


def _names(name: str) -> dict[str, str]:
    return {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }


def _write_tar(target: Path, files: Mapping[str, bytes]) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    temporary.replace(target)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _descriptor(data: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}
