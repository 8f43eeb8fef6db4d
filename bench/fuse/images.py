"""One file as an image: mounted by `image mount`, and by EROFS over a FUSE server in C.

The image lies in an OCI layout; its node cache holds all of it. Once it was verified there as a
whole, `image mount` has EROFS read the cache's file; before, our server answers for it. EROFS over
C has the same metadata and data, the latter as the one file of the C server's mount.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.blockimage import erofs_mount

NAME = "data"
TAG = "1"
SEALED_S, ENDED_S = 300.0, 30.0
READ_AHEAD_KIB = 1024


def write_layout(folder: Path, source: Path) -> str:
    """An image of one uncompressed layer that holds the file; returns its reference."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer = folder / "layer"
    with tarfile.open(layer, "w") as archive:
        archive.add(source, NAME)
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = layer.stat().st_size
    layer.rename(blobs / digest)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    kind = "application/vnd.oci.image"
    about = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": _put(blobs, config, f"{kind}.config.v1+json"),
        "layers": [
            {"mediaType": f"{kind}.layer.v1.tar", "digest": f"sha256:{digest}", "size": size}
        ],
    }
    manifest = _put(blobs, about, f"{kind}.manifest.v1+json")
    manifest["annotations"] = {"org.opencontainers.image.ref.name": TAG}
    index = {"schemaVersion": 2, "manifests": [manifest]}
    (folder / "index.json").write_text(json.dumps(index), encoding="ascii")
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="ascii")
    return f"oci-layout:{folder}:{TAG}"


def _put(blobs: Path, document: object, kind: str) -> dict[str, object]:
    data = json.dumps(document).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


class Image:
    """The image below `folder`, and what this node keeps of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache, self._runtime = folder / "image-cache", folder / "runtime"
        self.meta = folder / "meta"
        self._ref = ""

    def _run(self, *words: str) -> str:
        command = [sys.executable, "-m", "bootseer", "image", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"image {words[0]} failed: {done.stderr.strip()}")
        return done.stdout

    @property
    def data(self) -> Path:
        """The node cache's file of the image's data."""
        (found,) = (self._cache / "blocks").glob("*/data")
        return found

    def prepare(self, source: Path) -> None:
        """Build the image and have all of it on this node, verified as a whole."""
        self._ref = write_layout(self._folder / "layout", source)
        self._run("build", "--cache", str(self._folder / "build"), self._ref)
        with self.mounted(complete=False):
            (link,) = (path for path in self._runtime.rglob("*") if path.name == "meta")
            shutil.copyfile(link, self.meta)

    def _await(self, reached: Callable[[], bool], limit_s: float, fault: str) -> None:
        end = time.monotonic() + limit_s
        while not reached():
            if time.monotonic() > end:
                raise RuntimeError(fault)
            time.sleep(0.1)

    def _is_sealed(self) -> bool:
        return any((self._cache / "blocks").glob("*/sealed"))

    def _has_ended(self) -> bool:
        """Whether the server is gone: it takes its mounts and folder away in its own time."""
        return not any(path.is_dir() for path in (self._runtime / "images").glob("*"))

    @contextlib.contextmanager
    def mounted(self, *, complete: bool) -> Iterator[Path]:
        """The image by `image mount`; yields the file's path.

        One that is served is by then all on this node, verified as a whole: its server rests.
        """
        place = self._folder / f"image-{len(list(self._folder.iterdir()))}"
        place.mkdir()
        if not complete:
            for mark in (self._cache / "blocks").glob("*/sealed"):
                mark.unlink()
        words = ["--cache", str(self._cache), "--runtime", str(self._runtime), "--json"]
        words += ["--no-record", "--fill-rate", "0"]
        said = json.loads(self._run("mount", *words, self._ref, str(place)))
        try:
            if said["complete"] != complete:
                raise RuntimeError(f"the image is mounted otherwise than asked for: {said}")
            self._await(self._is_sealed, SEALED_S, "the image was not verified as a whole in time")
            yield place / NAME
        finally:
            self._run("umount", "--lazy", "--runtime", str(self._runtime), str(place))
            self._await(self._has_ended, ENDED_S, "the image's server did not end")

    @contextlib.contextmanager
    def over(self, served: Path) -> Iterator[Path]:
        """EROFS over the served file of the image's data; yields the file's path."""
        place = self._folder / f"erofs-{len(list(self._folder.iterdir()))}"
        place.mkdir()
        found = erofs_mount.mount_erofs(str(self.meta), str(served), str(place))
        try:
            erofs_mount.set_read_ahead(found.bdis, READ_AHEAD_KIB)
            os.stat(place / NAME)
            yield place / NAME
        finally:
            subprocess.run(["umount", "-l", place], check=False)
