"""Images from their block images: what `ImageMounter` asks for, by `imageprefetch.mount.mount`."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bootseer.config.loading import default_runtime
from bootseer.errors import AccessDeniedError, BootseerError, BusyError, CorruptDataError
from bootseer.fuse.mount.mount_point import find_mount, unmount
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.mount import MountSettings
from bootseer.imageprefetch.snapshotter import layer_unpacker
from bootseer.imageprefetch.snapshotter.mount_helper import MountHelper
from bootseer.imageprefetch.snapshotter.types import Image
from bootseer.storage.options import DEFAULTS, StoreOptions

if TYPE_CHECKING:
    from bootseer.storage.oci.repository import Repository

PULL_STALL_S = 5.0
"""While containerd waits for an answer, a registry that says nothing for so long is given up."""
_LAYERS_OF_MOUNTS = 16  # a mount over a dead one, over a dead one, …


@dataclass(frozen=True, slots=True)
class LazySettings:
    """How all images are mounted; the fields are those of `MountSettings`.

    `only`, when it names any, are the registries and repositories (`host/team`) whose images may
    be lazy.
    """

    only: tuple[str, ...] = ()
    workload: str = ""
    cache: str = ""
    cache_limit_bytes: int = 64 << 30
    kept_limit_bytes: int = 16 << 30
    runtime: str = ""
    fill: bool = True
    fill_rate_bytes_s: int = 64 << 20
    record: bool = True
    events_dir: str = ""
    log_file: str = ""
    options: StoreOptions = DEFAULTS


class BlockImageMounter:
    """An ImageMounter; a context manager."""

    def __init__(self, settings: LazySettings) -> None:
        self._settings = settings
        stall_s = min(settings.options.stall_s, PULL_STALL_S)
        self._hurried = dataclasses.replace(settings.options, stall_s=stall_s)
        self._runtime = settings.runtime or default_runtime()
        self._helper = MountHelper(settings.events_dir)

    def __enter__(self) -> BlockImageMounter:
        self._helper.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Mounts stay."""
        self._helper.server.close()

    def find(self, reference: str, digest: str) -> Image:
        """One request, for the manifest. Raises what the registry raises."""
        with self._repository(reference, self._hurried) as repository:
            descriptor, manifest = repository.image(digest or _version(reference))
        layers = tuple(layer.digest for layer in manifest.layers)
        return Image(descriptor.digest, reference, layers)

    def check(self, reference: str) -> None:
        from bootseer.storage.oci.reference import parse_reference

        place, only = parse_reference(reference).place, self._settings.only
        if only and not any(f"{place}/".startswith(f"{prefix.rstrip('/')}/") for prefix in only):
            raise AccessDeniedError(
                f"{place} is not among the places that --only allows to be lazy"
            )

    def mount(self, image: Image, directory: str) -> None:
        shared = {
            field.name: getattr(self._settings, field.name)
            for field in dataclasses.fields(self._settings)
            if field.name not in ("only", "options")
        }
        name = _by_digest(image)
        self._helper.mount(
            MountSettings(
                ref=name,
                directory=directory,
                options=self._hurried,
                platform_known=True,  # which one it wants is containerd's to say
                **shared,
            )
        )

    def umount(self, directory: str) -> None:
        umount(directory, self._runtime)

    def answers(self, directory: str) -> bool:
        return answers(directory, self._runtime)

    def unpack(self, image: Image, layers: int, directory: str) -> None:
        from bootseer.imageprefetch.image_build.image_sources import CONFIG_BYTES, diff_ids_of

        with self._repository(image.reference, self._settings.options) as repository:
            config = repository.image(image.digest)[1].config
            diff_ids = diff_ids_of(repository.blob(config, limit_bytes=CONFIG_BYTES))
            if len(diff_ids) != len(image.layers):
                raise CorruptDataError(f"the config of {image.digest} lists other layers")
            opened = [
                (digest, layer_unpacker.opened_layer(repository, digest, diff_id))
                for digest, diff_id in zip(image.layers, diff_ids, strict=True)
            ][:layers]
            layer_unpacker.unpack(opened, directory)

    def _repository(self, reference: str, options: StoreOptions) -> Repository:
        from bootseer.storage.oci.open import open_repository

        return open_repository(reference, options)[0]


def umount(directory: str, runtime_dir: str) -> None:
    """Unmount whatever is there; nothing is no error. Raises BusyError where it stays."""
    for _ in range(_LAYERS_OF_MOUNTS):
        if find_mount(directory) is None:
            return
        try:
            mounting.umount(directory, lazily=True, runtime_dir=runtime_dir)
        except BootseerError:  # its server is gone, or was another node's before a restart
            with contextlib.suppress(BootseerError):
                unmount(directory, lazily=True, force=True)
    raise BusyError(f"{directory} cannot be unmounted; look what holds it")


def answers(directory: str, runtime_dir: str) -> bool:
    """Whether the mount there belongs to a server that lives."""
    found = find_mount(directory)
    return found is not None and any(
        (server.device, server.source) == (found.device, found.source)
        for server in server_registry.servers(runtime_dir)
    )


def _version(reference: str) -> str:
    from bootseer.storage.oci.reference import parse_reference

    return parse_reference(reference).version


def _by_digest(image: Image) -> str:
    """The image's name by its digest, so that a tag which moves meanwhile changes nothing."""
    from bootseer.storage.oci.reference import parse_reference

    return f"{parse_reference(image.reference).place}@{image.digest}"
