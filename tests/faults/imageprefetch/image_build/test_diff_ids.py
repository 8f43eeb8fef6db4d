"""Layers whose unpacked bytes are not those that their image names: refused by every way in."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
from bootseer.imageprefetch.snapshotter import layer_unpacker
from bootseer.storage.oci.manifest import Descriptor, digest_of, manifest_bytes
from bootseer.storage.oci.media_types import OCI_CONFIG, OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.repository import Repository

LAYER = "application/vnd.oci.image.layer.v1.tar"


def tar_of(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return out.getvalue()


GOOD, OTHER = tar_of(a=b"a" * 9000, b=b"b"), tar_of(a=b"A" * 9000, b=b"b")
BEHIND = GOOD + b"x" * 4096  # the same files; what stands behind them counts in the digest
STORED = {
    "plain": GOOD,
    "gzip": gzip.compress(GOOD, mtime=0),
    "zstd": zstandard.compress(GOOD),
    "behind": gzip.compress(BEHIND, mtime=0),
}


def push(repository: Repository, stored: bytes, diff_id: str, tag: str) -> None:
    rootfs = {"type": "layers", "diff_ids": [diff_id]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    for blob in (config, stored):
        repository.push_blob(blob, digest_of(blob), len(blob))
    layers = [Descriptor(LAYER, digest_of(stored), len(stored))]
    described = Descriptor(OCI_CONFIG, digest_of(config), len(config))
    repository.push_manifest(manifest_bytes(config=described, layers=layers), OCI_MANIFEST, tag)


@pytest.fixture(params=["registry", "layout"])
def place(request: Any, tmp_path: Path) -> str:
    if request.param == "layout":
        return f"oci-layout:{tmp_path}/layout"
    registry = request.getfixturevalue("registry")
    return f"{registry.host}/diffids/{tmp_path.name.lower().strip('_')}"


@pytest.mark.slow
@pytest.mark.debian("docker-registry")
@pytest.mark.parametrize("kind", STORED)
def test_a_layer_is_what_its_image_says_or_not_used(place: str, kind: str, tmp_path: Path) -> None:
    raw = BEHIND if kind == "behind" else GOOD
    with open_repository(f"{place}:1", push=True)[0] as repository:
        push(repository, STORED[kind], digest_of(raw), "1")
        push(repository, STORED[kind], digest_of(OTHER), "2")
        cache = str(tmp_path / "cache")
        assert build_image(BuildSettings(ref=f"{place}:1", cache_dir=cache)).built
        with pytest.raises(CorruptDataError, match="unpacks to other bytes"):
            build_image(BuildSettings(ref=f"{place}:2", cache_dir=cache))
        for diff_id in (digest_of(raw), digest_of(OTHER)):
            opened = layer_unpacker.layer_source(repository, digest_of(STORED[kind]), diff_id)
            if diff_id == digest_of(raw):
                with opened() as pieces:
                    assert next(pieces)
            else:
                with pytest.raises(CorruptDataError, match="unpacks to other"), opened() as pieces:
                    assert next(pieces)
