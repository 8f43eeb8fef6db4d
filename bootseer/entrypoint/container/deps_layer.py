"""The dependencies of a container's job as a layer above its image.

What an install changed is kept as an image of one layer beside the job's image, in the same
repository, under a tag that names what the install depended on (`layer_key`). Later starts mount it
above the image, and install nothing. The first one runs the install in a container of its own, on
the same root, and publishes what that changed in the background.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import posixpath
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bootseer import events
from bootseer.config.paths import default_cache, default_runtime
from bootseer.config.sections import DepsSettings
from bootseer.entrypoint import detached, job_process
from bootseer.entrypoint.container import layer_folders
from bootseer.entrypoint.container.container_files import ContainerFiles
from bootseer.entrypoint.container.layer_key import EXACT_NOTE, LayerKey, make_key
from bootseer.entrypoint.container.left_out import LeftOut
from bootseer.entrypoint.container.root_overlay import mount_root
from bootseer.errors import (
    BootseerError,
    NotFoundError,
    NotSupportedError,
    UsageError,
    describe,
    from_os_error,
)
from bootseer.imageprefetch.run import podman, podman_options, temporary_mounts
from bootseer.imageprefetch.run.command import RunProgram, run_foreground
from bootseer.imageprefetch.run.run_image import ImageAtHand, InputFailedError, raw_config
from bootseer.light_dataclasses import dataclass, replace
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.reference import parse_reference
from bootseer.system import mount_calls
from bootseer.system.file_lock import FileLock

if TYPE_CHECKING:
    from bootseer.imageprefetch.mount.mount import MountedImage
    from bootseer.imageprefetch.mount.settings import MountSettings

PHASE = "deps.install"
PUBLISHER = "bootseer.entrypoint.container.publish_layer"
LAYER, ROOT = "deps", "root"
"""Folders beside the image's tree: the layer's own mount, and the container's root."""
LOOK_S = 4.0
"""How long the registry is asked for image and layer before the install runs plainly."""
DAY_S = 86_400.0
_CACHE_VARIABLES = ("PIP_CACHE_DIR", "UV_CACHE_DIR", "XDG_CACHE_HOME")
_MEMORY = ("/tmp", "/var/tmp", "/dev/shm")
"""Places where file systems in memory are common, for what programs need while they run."""
_LOW_MIB = 256
LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a start has at hand: its settings, the container's folder, how an image is mounted, and
    what runs podman."""

    deps: DepsSettings
    mount: MountSettings
    folder: str
    mount_image: Callable[[MountSettings], MountedImage]
    writer: events.NullWriter
    environ: Mapping[str, str]
    run_program: RunProgram = run_foreground


class DepsLayer:
    """The root of one container, with its dependencies in it."""

    def __init__(self, start: Surroundings, image: ImageAtHand) -> None:
        self._start, self._image = start, image
        self._stack = contextlib.ExitStack()
        self._reasons: list[str] = []
        self.root = os.path.join(start.folder, ROOT)
        self.mounts: list[tuple[str, MountedImage]] = []
        """What of the layer is mounted, by its directory."""

    def bring(self) -> None:
        """Mount the root with the dependencies in it.

        Raises InputFailedError where a signal ended the start, BootseerError where there can be no
        root, or the install failed: then it is to run plainly.
        """
        span = self._start.writer.begin(PHASE, {"bootseer.source": "layer"})
        try:
            form = self._bring()
        except InputFailedError as failure:
            about = {"process.exit.code": failure.exit_code, "error.type": "install"}
            self._start.writer.end(span, PHASE, "error", about)
            if failure.by_signal:
                raise
            raise NotSupportedError(self._describe_failure(failure)) from failure
        except BaseException as error:
            self._start.writer.end(span, PHASE, "error", {"error.type": type(error).__name__})
            raise
        reason = "; ".join(self._reasons)
        if reason:
            job_process.say(f"deps: {reason}; going on the plain way")
        about = {"bootseer.form": form, **({"bootseer.reason": reason} if reason else {})}
        self._start.writer.end(span, PHASE, "fallback" if reason else "ok", about)

    def _bring(self) -> str:
        """As `bring`; returns how the dependencies came: `layer` or `install`."""
        self._check_room()
        self._check_options()
        key = self._find_key()
        layer = self._mount_layer(key) if key is not None else ""
        if layer:
            self._mount_root([layer, self._image.tree], self._make_folder())
            return "layer"
        folder, lock = layer_folders.make(self._cache())
        self._stack.callback(layer_folders.let_go, folder, lock)
        upper = self._mount_root([self._image.tree], folder)
        self._install()
        self._unmount_root()
        if key is not None:
            self._publish(key, folder, upper, lock)
        # What the job writes must not get into what is published.
        self._mount_root([upper, self._image.tree], self._make_folder())
        return "install"

    def _check_room(self) -> None:
        """Raise NotSupportedError where the cache cannot hold what a container writes."""
        cache = self._cache()
        try:
            os.makedirs(cache, exist_ok=True)
            disk = os.statvfs(cache)
        except OSError as error:
            raise from_os_error(error, f"look at {cache}") from error
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < LEAST_FREE_BYTES:
            raise NotSupportedError(
                f"the disk of the cache {cache} has {free_bytes >> 20} MiB left, and what a "
                f"container writes needs {LEAST_FREE_BYTES >> 20} MiB at least; make room there"
            )

    def _check_options(self) -> None:
        """Raise NotSupportedError where an install's result might not be in the layer alone."""
        image = self._image
        unknown = podman_options.find_unknown(image.options, self._is_passing)
        if unknown:
            raise NotSupportedError(
                f"with podman's option {unknown} it is not known what an install reads and writes"
            )
        if podman.lacks_working_directory(image.tree, image.config.working_dir, image.options):
            raise NotSupportedError(
                f"the image lacks its working directory {image.config.working_dir}; make it there"
            )

    def _is_passing(self, place: str) -> bool:
        """Whether what is written at a place of the container is no result of an install."""
        environ = self._variables()
        caches = [environ[name] for name in _CACHE_VARIABLES if environ.get(name)]
        passing = LeftOut([*_MEMORY, *caches], self._start.deps.exclude)
        return passing(posixpath.normpath(place))

    def _variables(self) -> dict[str, str]:
        """The variables of the image and of podman's options."""
        image = self._image
        of_image = dict(pair.partition("=")[::2] for pair in image.config.env)
        return of_image | podman_options.given_variables(image.options)

    def _find_key(self) -> LayerKey | None:
        start, image = self._start, self._image
        files = ContainerFiles.of(image.tree, image.options, image.config.working_dir)
        environ = self._variables()
        user = podman_options.user(image.options) or image.config.user
        try:
            return make_key(start.deps, image.digest, files, environ, user)
        except (BootseerError, OSError) as error:
            self._reasons.append(describe(error))
            return None

    # --- the layer --------------------------------------------------------------------------

    def name(self) -> str:
        """The name that the layer has in the registry, once it is published.

        Raises UsageError where the install cannot be kept as a layer.
        """
        return self._ref_of(self._require_key())

    def publish_if_missing(self) -> str:
        """Install, and publish what that changed, unless the registry has it; returns its name.

        Raises UsageError where it cannot be kept, InputFailedError where it failed, and what the
        registry raises.
        """
        self._check_options()
        key = self._require_key()
        settings = replace(self._start.mount, ref=self._ref_of(key), look_begun_s=0.0)
        try:
            repository, reference = open_repository(settings.ref, plain_http=settings.plain_http)
            with repository:
                digest = repository.image(reference.version)[0].digest
            if not self._is_old(settings, digest):
                return settings.ref
        except NotFoundError:
            pass
        folder, lock = layer_folders.make(self._cache())
        self._stack.callback(layer_folders.let_go, folder, lock)
        upper = self._mount_root([self._image.tree], folder)
        self._install()
        self._unmount_root()
        from bootseer.entrypoint.container import publish_layer

        publish_layer.publish(self._publication(key, folder, upper))
        return settings.ref

    def _require_key(self) -> LayerKey:
        key = self._find_key()
        if key is None:
            raise UsageError("; ".join(self._reasons))
        return key

    def _ref_of(self, key: LayerKey) -> str:
        return f"{parse_reference(self._start.mount.ref).place}:{key.tag}"

    def _mount_layer(self, key: LayerKey) -> str:
        """Mount the layer of a key; returns where, "" where there is none that may be used."""
        start = self._start
        ref = self._ref_of(key)
        target = os.path.join(start.folder, LAYER)
        settings = replace(
            start.mount,
            ref=ref,
            directory=target,
            look_s=LOOK_S,
            look_begun_s=start.mount.look_begun_s or time.monotonic(),
            platform_known=True,
            not_begun="",
            eager=True,
            missing_ok=True,
        )
        runtime = os.path.abspath(start.mount.runtime or default_runtime())
        try:
            os.makedirs(target, exist_ok=True)
            self._doubt_old(settings)
            mounted = start.mount_image(settings)
            self._stack.enter_context(temporary_mounts.unmounting(target, runtime))
            self.mounts.append((target, mounted))
            if self._is_old(settings, mounted.digest):
                return ""
        except NotFoundError:
            return ""  # no start with these inputs has published yet
        except (BootseerError, OSError, ValueError) as error:
            self._reasons.append(describe(error))
            return ""
        return target

    def _doubt_old(self, settings: MountSettings) -> None:
        """Have the registry asked for a layer that this node knows, and that has grown old."""
        from bootseer.imageprefetch.image_cache import ImageCache

        cache = ImageCache(self._cache())
        digest = cache.read_pin(parse_reference(settings.ref).name)
        if digest and cache.config(digest) is not None and self._is_old(settings, digest):
            cache.forget_asked(digest, settings.workload)

    def _is_old(self, settings: MountSettings, digest: str) -> bool:
        """Whether a layer is to be made again, as newer versions may fit its requirements."""
        config = json.loads(raw_config(settings, digest, settings.look_begun_s))
        if ((config.get("config") or {}).get("Labels") or {}).get(EXACT_NOTE) == "true":
            return False
        try:
            created = datetime.datetime.fromisoformat(str(config.get("created")))
        except ValueError:
            return True
        return time.time() - created.timestamp() > self._start.deps.max_age_days * DAY_S

    # --- the install ------------------------------------------------------------------------

    def _install(self) -> None:
        """Run the install in a container on the root. Raises InputFailedError."""
        image, command = self._image, self._start.deps.install
        config = replace(image.config, entrypoint=(), cmd=())
        options = podman_options.without_entrypoint(podman_options.helper_options(image.options))
        # What it changes there would be missing in later starts, which do not run it.
        options = podman_options.with_fixed_volumes(options, self._is_passing)
        words = podman.container_words(image.tree, config, options, command, root=self.root)
        ended_by: list[int] = []
        code = self._start.run_program(words, ended_by.append)
        if ended_by:  # the signal was for the start, whether the install heeded it or not
            raise InputFailedError(code or 128 + ended_by[0], by_signal=True)
        if code:
            raise InputFailedError(code)

    def _describe_failure(self, failure: InputFailedError) -> str:
        disk = os.statvfs(self._cache())
        free_mib = disk.f_bavail * disk.f_frsize >> 20
        full = f" (the disk of its cache has {free_mib} MiB left)" if free_mib < _LOW_MIB else ""
        return f"the install for the layer ended with exit code {failure.exit_code}{full}"

    def _publish(self, key: LayerKey, folder: str, upper: str, lock: FileLock) -> None:
        """Publish what the install changed, in a process of its own."""
        held = lock.descriptor  # until the publisher has its own: the job may end at once
        request = {**self._publication(key, folder, upper), "held": held}
        try:
            detached.start_detached(
                "deps.publish", PUBLISHER, request, self._start.environ, keep=(held,)
            )
        except OSError as error:
            self._reasons.append(f"the layer is not published: {error.strerror}")

    def _publication(self, key: LayerKey, folder: str, upper: str) -> dict[str, object]:
        """What `publish_layer` is asked for."""
        start, image = self._start, self._image
        return {
            "repository": parse_reference(start.mount.ref).place,
            "tag": key.tag,
            "image": image.digest,
            "folder": folder,
            "upper": upper,
            "lower": image.tree,
            "cache": self._cache(),
            "plain_http": start.mount.plain_http,
            "exclude": list(start.deps.exclude),
            "shown": podman_options.list_targets(image.options),
            "pins": dict(key.pins),
            "command": list(events.redact(start.deps.install)),
        }

    # --- the root ---------------------------------------------------------------------------

    def _make_folder(self) -> str:
        """A folder on the node's disk for what a container writes."""
        tree = self._stack.enter_context(temporary_mounts.directory(self._cache()))
        return os.path.dirname(tree)

    def _cache(self) -> str:
        return os.path.abspath(self._start.mount.cache or default_cache())

    def _mount_root(self, lowers: list[str], folder: str) -> str:
        upper = mount_root(lowers, folder, self.root)
        self._stack.callback(self._unmount_root)
        return upper

    def _unmount_root(self) -> None:
        with contextlib.suppress(OSError):
            mount_calls.unmount(self.root, lazily=True)
        # Copies of the mount in other namespaces go with its directory: they would look like a
        # container that goes on.
        with contextlib.suppress(OSError):
            os.rmdir(self.root)

    def close(self) -> None:
        """Unmount the root and the layer, and remove what was written; twice is safe."""
        self._stack.close()
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(self._start.folder, LAYER))
        layer_folders.sweep(self._cache())
