"""Publishing what an install in a container changed, beside the job that goes on.

The layer is pushed as an image of its own, then its block image; its tag comes last, so that a
start which finds it finds all of it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.depsnap import pins
from bootseer.entrypoint.container import layer_folders
from bootseer.entrypoint.container.layer_key import EXACT_NOTE
from bootseer.entrypoint.container.left_out import LeftOut
from bootseer.entrypoint.plan import Request
from bootseer.errors import NoSpaceError
from bootseer.events.writer import NullWriter
from bootseer.storage.oci.manifest import Descriptor, digest_of, manifest_bytes
from bootseer.storage.oci.media_types import CREATED_NOTE, OCI_CONFIG, OCI_MANIFEST
from bootseer.system.priority import use_idle_disk

if TYPE_CHECKING:
    from bootseer.imageprefetch.image_build.overlay_layer import LayerFile

PHASE = "deps.publish"
IMAGE_NOTE = "dev.bootseer.layer.image"
SPARE_BYTES = 1 << 30


def run(request: Request, writer: NullWriter, _job: int) -> None:
    """Publish by the request of `deps_layer`. What it raises is reported by the caller."""
    given: dict[str, Any] = dict(request)
    os.nice(19)
    use_idle_disk()
    lock = layer_folders.hold(given["folder"])
    os.close(given["held"])  # inherited, so that the folder was held from the beginning
    span = writer.begin(PHASE, {"bootseer.source": "layer"})
    try:
        size_bytes = publish(given)
    except BaseException as error:
        writer.end(span, PHASE, "error", {"error.type": type(error).__name__})
        raise
    finally:
        layer_folders.let_go(given["folder"], lock)
    writer.end(span, PHASE, "ok", {"bootseer.bytes": size_bytes})


def publish(given: dict[str, Any]) -> int:
    """Push a layer by the request of `deps_layer`; returns its bytes.

    One of an install that changed nothing as well, so that the next start need not install.
    """
    from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
    from bootseer.imageprefetch.image_build.overlay_layer import Changes, write_layer
    from bootseer.storage.oci.open import open_repository

    left_out = LeftOut(given["shown"], given["exclude"])
    _check_room(given["folder"], given["upper"])
    changes = Changes(given["upper"], given["lower"], left_out)
    layer = write_layer(changes, os.path.join(given["folder"], "layer.tar.zst"))
    place, plain_http = given["repository"], given["plain_http"]
    repository, _ = open_repository(place, plain_http=plain_http, push=True)
    with repository:
        _, base = repository.image(given["image"])
        config = json.loads(repository.blob(base.config, limit_bytes=16 << 20))
        labels = {EXACT_NOTE: "true"} if _is_exact(given["upper"], given["pins"]) else {}
        raw_config, raw = make_image(layer, config, given["image"], given["command"], labels)
        repository.push_blob(layer.path, layer.digest, layer.size_bytes)
        repository.push_blob(raw_config, digest_of(raw_config), len(raw_config))
        pushed = repository.push_manifest(raw, OCI_MANIFEST)
        build_image(
            BuildSettings(
                ref=f"{place}@{pushed.digest}",
                cache_dir=given["cache"],
                plain_http=plain_http,
                threads=1,
                for_overlay=True,
            )
        )
        repository.push_manifest(raw, OCI_MANIFEST, given["tag"])
    return layer.size_bytes


def _check_room(folder: str, upper: str) -> None:
    """Raise NoSpaceError unless the layer fits beside what containers write to the same disk."""
    needed_bytes = SPARE_BYTES
    for path, _, names in os.walk(upper):
        for name in names:
            with contextlib.suppress(OSError):
                needed_bytes += 2 * os.lstat(os.path.join(path, name)).st_size  # itself and blocks
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < needed_bytes:
        raise NoSpaceError(
            f"{needed_bytes >> 20} MiB are needed on the disk of {folder} to publish the layer, "
            f"and {disk.f_bavail * disk.f_frsize >> 20} MiB are free; make room there"
        )


def _is_exact(upper: str, pinned: Mapping[str, str]) -> bool:
    """Whether every package that was installed has a pin, so that no index decided."""
    found: list[str] = []
    for _, folders, _ in os.walk(upper):
        found += [name for name in folders if name.endswith((".dist-info", ".egg-info"))]
    installed = pins.of_distributions(found)
    counted = {name: version for name, version in installed.items() if name not in pins.SEEDS}
    return bool(pinned) and pins.cover(pinned, counted)


def make_image(
    layer: LayerFile,
    base: dict[str, Any],
    image: str,
    command: Sequence[str],
    labels: Mapping[str, str] | None = None,
) -> tuple[bytes, bytes]:
    """The config and the manifest of an image that is this layer alone."""
    from bootseer.imageprefetch.image_build.overlay_layer import MEDIA_TYPE

    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    platform = {key: base[key] for key in ("os", "architecture", "variant") if base.get(key)}
    history = {"created": created, "created_by": " ".join(command)}
    config = {
        "created": created,
        **platform,
        "config": {"Labels": dict(labels)} if labels else {},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
        "history": [history],
    }
    raw_config = json.dumps(config, separators=(",", ":")).encode()
    manifest = manifest_bytes(
        config=Descriptor(OCI_CONFIG, digest_of(raw_config), len(raw_config)),
        layers=[Descriptor(MEDIA_TYPE, layer.digest, layer.size_bytes)],
        annotations={CREATED_NOTE: created, IMAGE_NOTE: image},
    )
    return raw_config, manifest
