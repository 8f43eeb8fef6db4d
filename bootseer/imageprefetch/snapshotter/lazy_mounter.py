"""An `ImageMounter` that mounts images from their block images."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from bootseer.config.loading import default_runtime
from bootseer.context_managers import Closing
from bootseer.errors import AccessDeniedError, BootseerError, BusyError, CorruptDataError
from bootseer.fuse.mount.mount_point import find_mount, unmount
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.imageprefetch.snapshotter import layer_unpacker
from bootseer.imageprefetch.snapshotter.mount_helper import MountHelper
from bootseer.imageprefetch.snapshotter.types import StockImage
from bootseer.storage.oci.config import LIMIT_BYTES, diff_ids_of
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.reference import parse_reference
from bootseer.storage.oci.repository import Repository
from bootseer.storage.options import DEFAULTS, StoreOptions

PULL_STALL_S = 5.0
"""How long a registry may be silent while containerd waits for an answer."""
_STACKED_MOUNTS = 16  # a mount over a dead one, over a dead one, …


@dataclass(frozen=True, slots=True)
class LazySettings:
    """The settings of all mounts; the fields are those of `MountSettings`.

    `only` are the registries and repositories (`host/team`) whose images may be lazy; with none,
    all may.
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


class BlockImageMounter(Closing):
    """An `ImageMounter`; a context manager. Closing it leaves the mounts."""

    def __init__(self, settings: LazySettings) -> None:
        self._settings = settings
        stall_s = min(settings.options.stall_s, PULL_STALL_S)
        self._hurried = dataclasses.replace(settings.options, stall_s=stall_s)
        self._runtime = settings.runtime or default_runtime()
        self._helper = MountHelper(settings.events_dir)

    def __enter__(self) -> BlockImageMounter:
        self._helper.server.start()
        return self

    def close(self) -> None:
        """End the process that mounts; mounts stay."""
        self._helper.server.close()

    def find(self, reference: str, digest: str) -> StockImage:
        """Ask the registry for the manifest. Raises what the registry raises."""
        with self._open_repository(reference, self._hurried) as repository:
            descriptor, manifest = repository.image(digest or _version(reference))
        layers = tuple(layer.digest for layer in manifest.layers)
        return StockImage(descriptor.digest, reference, layers)

    def check(self, reference: str) -> None:
        place, only = parse_reference(reference).place, self._settings.only
        if only and not any(f"{place}/".startswith(f"{prefix.rstrip('/')}/") for prefix in only):
            raise AccessDeniedError(
                f"{place} is not among the places that --only allows to be lazy"
            )

    def mount(self, image: StockImage, directory: str) -> None:
        shared = {
            field.name: getattr(self._settings, field.name)
            for field in dataclasses.fields(self._settings)
            if field.name not in ("only", "options")
        }
        self._helper.mount(
            MountSettings(
                ref=parse_reference(image.reference).with_digest(image.digest),
                directory=directory,
                options=self._hurried,
                platform_known=True,  # containerd chooses it
                **shared,
            )
        )

    def umount(self, directory: str) -> None:
        umount(directory, self._runtime)

    def answers(self, directory: str) -> bool:
        return answers(directory, self._runtime)

    def unpack(self, image: StockImage, layers: int, directory: str) -> None:
        with self._open_repository(image.reference, self._settings.options) as repository:
            config = repository.image(image.digest)[1].config
            diff_ids = diff_ids_of(repository.blob(config, limit_bytes=LIMIT_BYTES))
            if len(diff_ids) != len(image.layers):
                raise CorruptDataError(f"the config of {image.digest} lists other layers")
            sources = [
                (digest, layer_unpacker.layer_source(repository, digest, diff_id))
                for digest, diff_id in zip(image.layers, diff_ids, strict=True)
            ][:layers]
            layer_unpacker.unpack(sources, directory)

    def _open_repository(self, reference: str, options: StoreOptions) -> Repository:
        return open_repository(reference, options)[0]


def umount(directory: str, runtime_dir: str) -> None:
    """Unmount what is mounted there, if anything. Raises BusyError where that fails."""
    for _ in range(_STACKED_MOUNTS):
        if find_mount(directory) is None:
            return
        try:
            mounting.umount(directory, lazily=True, runtime_dir=runtime_dir)
        except BootseerError:  # its server has ended, or was another node's before a restart
            with contextlib.suppress(BootseerError):
                unmount(directory, lazily=True, force=True)
    raise BusyError(f"{directory} cannot be unmounted; look what holds it")


def answers(directory: str, runtime_dir: str) -> bool:
    """Whether the mount there belongs to a server that lives."""
    mounted = find_mount(directory)
    return mounted is not None and any(
        (server.device, server.source) == (mounted.device, mounted.source)
        for server in server_registry.list_servers(runtime_dir)
    )


def _version(reference: str) -> str:
    return parse_reference(reference).version
