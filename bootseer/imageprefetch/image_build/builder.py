"""Building the block image of a stock image, once.

A build works in a folder in the cache, named after the image's digest and locked meanwhile; a
second build of the image waits, and then finds the block image. A killed build is continued by the
next one: fetched layers stay, and so does a finished artifact that was not pushed. Concurrent
builds on several nodes give the same bytes, so the later ones push nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bootseer.blockimage import artifact
from bootseer.blockimage.artifact import Artifact
from bootseer.blockimage.build import DATA_NAME, finish
from bootseer.blockimage.data_writer import LEVEL, MAX_DATA_BYTES, DataWriter
from bootseer.errors import (
    BusyError,
    CorruptDataError,
    NotFoundError,
    UsageError,
    from_os_error,
)
from bootseer.imageprefetch.image_build.docker_daemon import save_image
from bootseer.imageprefetch.image_build.flatten import LIMITS, Flattener, Limits
from bootseer.imageprefetch.image_build.image_sources import (
    ArchiveLayers,
    ImageLayers,
    RepositoryLayers,
    check_same_layers,
)
from bootseer.storage.lease import Watch, try_acquire
from bootseer.storage.oci import config, media_types
from bootseer.storage.oci.manifest import Descriptor, Manifest, Platform
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.platforms import check_platform
from bootseer.storage.oci.repository import Progress, Repository
from bootseer.storage.open import open_store
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.system import file_lock

Note = Callable[[str], None]
KEPT_S = 7 * 86_400.0  # how long the folder of a killed build is kept
FETCH_TRIES = 3  # a try may continue what was begun, so that it is not known whose bytes are wrong
POLL_S = 0.5  # between two looks at another node's lease


def _ignore(_: object) -> None:
    """The default of all callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """The settings of one build.

    - `ref` names the image: as container programs do, `oci-layout:DIR[:TAG]`,
      `docker-archive:FILE[:NAME]` or `docker-daemon:NAME`.
    - `to` is the image in a repository to which the block image refers, if `ref` is in none.
    - `lease` is the URL of a store that all nodes share, so that one of them builds and the others
      wait for it.
    - `rebuild` builds even if there is a block image.
    - `for_overlay`: the image is to lie above another one, and hides parts of it.
    - `wait_s` limits the wait for another build.
    """

    ref: str
    cache_dir: str
    to: str = ""
    platform: Platform | None = None
    options: StoreOptions = DEFAULTS
    plain_http: bool | None = None
    socket: str = ""
    lease: str = ""
    rebuild: bool = False
    for_overlay: bool = False
    threads: int = 2
    level: int = LEVEL
    limits: Limits = LIMITS
    data_limit_bytes: int = MAX_DATA_BYTES
    wait_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build, or (`built` is false) the block image that was found.

    `subject` and `block_image` are the digests of the stock image's and the artifact's manifests.
    """

    place: str
    subject: str
    block_image: str
    built: bool
    entries: int = 0
    files: int = 0
    layers_bytes: int = 0
    data_bytes: int = 0
    stored_bytes: int = 0
    meta_bytes: int = 0
    build_s: float = 0.0
    push_s: float = 0.0


def build_image(
    settings: BuildSettings,
    *,
    expect: Callable[[int], None] = _ignore,
    progress: Progress = _ignore,
    note: Note = _ignore,
    stage: Note = _ignore,
) -> BuildReport:
    """Build the block image of a stock image, unless there is one.

    `progress` is called with stored bytes of layers, and then of what is pushed; `expect` before
    with their number; `note` with a line when the build waits. All three are called in several
    threads.
    `stage` is called with a line for each finished part of the work, in the calling thread.
    Raises what repositories raise, CorruptDataError for a damaged or hostile image, BusyError
    when another build on this node takes longer than `wait_s`.
    """
    target = _target_ref(settings)
    opened, reference = open_repository(
        target, settings.options, plain_http=settings.plain_http, push=True
    )
    with opened as repository:
        subject, manifest = repository.image(reference.version, settings.platform)
        if settings.platform is not None:
            _check_platform(repository, manifest, settings.platform, settings.ref)
        job = _Job(
            settings, repository, subject, manifest, _Listeners(expect, progress, note, stage)
        )
        if (existing := job.find_existing()) is not None:
            return existing
        with (
            _lock_folder(job.folder, settings.wait_s, note),
            _hold_lease(settings, job.folder, note),
        ):
            if (existing := job.find_existing()) is not None:  # made while this build waited
                return existing
            _remove_old(os.path.dirname(job.folder), job.folder)
            return job.run()


def _target_ref(settings: BuildSettings) -> str:
    """The image in a repository to which the block image will refer."""
    if _is_outside(settings.ref) and not settings.to:
        raise UsageError(
            f"{settings.ref} lies in no repository; say with --to which image of a registry or "
            "layout it is, so that the block image can be found from there"
        )
    if settings.to and not _is_outside(settings.ref):
        raise UsageError(
            f"{settings.ref} lies in a repository already, and its block image goes there; --to "
            "is for archives and for images that a container program holds"
        )
    return settings.to or settings.ref


def _is_outside(ref: str) -> bool:
    """Whether an image is not in a repository."""
    return ref.startswith(("docker-archive:", "docker-daemon:"))


@dataclass(frozen=True, slots=True)
class _Listeners:
    expect: Callable[[int], None]
    progress: Progress
    note: Note
    stage: Note


def _check_platform(repository: Repository, manifest: Manifest, wanted: Platform, ref: str) -> None:
    """Check the platform of an image that no index names, by its config."""
    raw = repository.blob(manifest.config, limit_bytes=config.LIMIT_BYTES)
    offered = config.platform_of(raw)
    if offered is not None:
        check_platform(offered, wanted, ref)


class _Job:
    """The build of one image, whose repository is open."""

    def __init__(
        self,
        settings: BuildSettings,
        repository: Repository,
        subject: Descriptor,
        manifest: Manifest,
        listeners: _Listeners,
    ) -> None:
        self._settings, self._repository = settings, repository
        self._subject, self._manifest = subject, manifest
        self._listeners = listeners
        self._layers: ImageLayers | None = None
        name = subject.digest.replace(":", "-")
        self.folder = os.path.join(settings.cache_dir, "images", "build", name)

    def find_existing(self) -> BuildReport | None:
        """The report of a block image that the repository has already."""
        if self._settings.rebuild:
            return None
        for block in self._repository.referrers(self._subject.digest, media_types.BLOCK_IMAGE):
            if self._is_whole(block):
                place = self._repository.reference.place
                return BuildReport(place, self._subject.digest, block.digest, False)
            self._listeners.note(f"the block image {block.digest} lacks parts; building it again")
        return None

    def _is_whole(self, block: Descriptor) -> bool:
        try:
            manifest = self._repository.manifest(block)
        except (NotFoundError, CorruptDataError):
            return False
        layers = manifest.layers if isinstance(manifest, Manifest) else ()
        return len(layers) > 0 and all(self._repository.has_blob(one.digest) for one in layers)

    def run(self) -> BuildReport:
        """Build, or take an earlier build's finished artifact, and push it."""
        begun_s = time.monotonic()
        built = None if self._settings.rebuild else artifact.load(self.folder)
        is_earlier = built is not None
        if built is None:
            built = self._build_with_retries()
            artifact.save(built, self.folder)
        built_s = time.monotonic()
        how = (
            "is there from an earlier build" if is_earlier else f"made in {built_s - begun_s:.1f} s"
        )
        size = f"{built.size_bytes / (1 << 20):.1f} MiB"
        self._listeners.stage(f"block image {how}: {built.about['files']} files in {size}")
        self._listeners.expect(built.size_bytes)
        try:
            pushed = artifact.push(
                built, self._repository, self._subject, progress=self._listeners.progress
            )
        except CorruptDataError:
            artifact.forget(self.folder)  # it is damaged: the next build starts again
            raise
        report = BuildReport(
            self._repository.reference.place,
            self._subject.digest,
            pushed.digest,
            True,
            entries=int(built.about["entries"]),
            files=int(built.about["files"]),
            layers_bytes=int(built.about["layers_bytes"]),
            data_bytes=int(built.about["data_bytes"]),
            stored_bytes=built.size_bytes,
            meta_bytes=int(built.about["meta_bytes"]),
            build_s=round(built_s - begun_s, 3),
            push_s=round(time.monotonic() - built_s, 3),
        )
        self._listeners.stage(f"pushed to {report.place} in {report.push_s:.1f} s")
        shutil.rmtree(self.folder, ignore_errors=True)
        return report

    def _build_with_retries(self) -> Artifact:
        """Build, again if a layer had wrong bytes, which another mirror may have right."""
        for _ in range(FETCH_TRIES - 1):
            try:
                return self._build()
            except CorruptDataError as error:
                if self._layers is None or not self._layers.damaged:
                    raise
                self._listeners.note(f"{error}; fetching it again")
        return self._build()

    def _build(self) -> Artifact:
        settings = self._settings
        self._layers = None
        with self._open_layers() as layers:
            self._layers = layers
            self._listeners.expect(layers.size_bytes)
            path = os.path.join(self.folder, DATA_NAME)
            with DataWriter(
                path,
                threads=settings.threads,
                level=settings.level,
                limit_bytes=settings.data_limit_bytes,
            ) as data:
                flattener = Flattener(data.store, settings.limits, for_overlay=settings.for_overlay)
                count = len(layers.diff_ids)
                for number in reversed(range(count)):
                    name = f"layer {number + 1} of {count}"
                    begun_s = time.monotonic()
                    flattener.add(lambda n=number: layers.open_layer(n), name)  # type: ignore[misc]
                    self._listeners.stage(f"{name} read in {time.monotonic() - begun_s:.1f} s")
                entries = flattener.entries()
                del flattener  # its tree takes as much memory as the entries
                table = data.finish()
            built = finish(entries, table, self.folder)
            about = {
                "entries": len(entries),
                "layers_bytes": layers.size_bytes,
                "level": settings.level,
                "diff_ids": list(layers.diff_ids),
            }
        packed = artifact.pack(built, about)
        os.unlink(built.meta_path)
        return packed

    def _open_layers(self) -> ImageLayers:
        ref = self._settings.ref
        if not _is_outside(ref):
            return RepositoryLayers.open(
                self._repository,
                self._manifest,
                self.folder,
                self._listeners.progress,
                limit_bytes=self._settings.limits.unpacked_bytes,
            )
        return self._open_archive(ref)

    def _open_archive(self, ref: str) -> ImageLayers:
        kind, _, rest = ref.partition(":")
        if kind == "docker-daemon":
            path, name = os.path.join(self.folder, "saved.tar"), ""
            self._listeners.note(f"fetching {rest} from the container program")
            save_image(rest, path, socket=self._settings.socket)
        else:
            path, name = _archive_name(rest)
        layers = ArchiveLayers.open(
            path,
            name,
            self.folder,
            self._listeners.progress,
            limit_bytes=self._settings.limits.unpacked_bytes,
        )
        raw = self._repository.blob(self._manifest.config, limit_bytes=config.LIMIT_BYTES)
        check_same_layers(
            layers.diff_ids, config.diff_ids_of(raw), f"{ref} and {self._settings.to}"
        )
        return layers


def _archive_name(rest: str) -> tuple[str, str]:
    """`FILE[:NAME[:TAG]]`; a file's own name may hold colons where the file is there."""
    if os.path.exists(rest):
        return rest, ""
    path, _, name = rest.partition(":")
    return path, name


@contextlib.contextmanager
def _lock_folder(folder: str, wait_s: float, note: Note) -> Iterator[None]:
    """Work alone in a folder, which is created; the kernel frees its lock with the process."""
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        lock = file_lock.acquire(
            f"{folder}.lock",
            limit_s=wait_s,
            waiting=lambda: note("another build of this image is under way; waiting for it"),
        )
    except BlockingIOError as error:
        raise BusyError(
            f"another build works in {folder} for more than {wait_s:g} s; look for what "
            "it waits for, or try again"
        ) from error
    except OSError as error:
        raise from_os_error(error, f"work below {folder}") from error
    with lock:
        os.makedirs(folder, exist_ok=True)
        yield


def _remove_old(parent: str, own: str) -> None:
    """Remove the folders of builds that were killed long ago and never continued."""
    for name in os.listdir(parent):
        folder = os.path.join(parent, name)
        with contextlib.suppress(OSError):  # another build does this at the same time
            if folder == own or not os.path.isdir(folder):
                continue
            if time.time() - os.stat(folder).st_mtime < KEPT_S:
                continue
            with file_lock.acquire(f"{folder}.lock", limit_s=0):
                shutil.rmtree(folder)


@contextlib.contextmanager
def _hold_lease(settings: BuildSettings, folder: str, note: Note) -> Iterator[None]:
    """Hold the image's lease in the store that the nodes share, if there is one.

    A lease that is lost to another node does no harm: both push the same bytes.
    """
    if not settings.lease:
        yield
        return
    store = open_store(settings.lease, settings.options)
    name = f"image-builds/{os.path.basename(folder)}"
    try:
        watch = Watch(store, name)
        deadline = time.monotonic() + settings.wait_s
        is_noted = False
        while (lease := try_acquire(store, name, watch)) is None:
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"another node has been building {settings.ref} for more than "
                    f"{settings.wait_s:g} s; look for what it waits for, or try again"
                )
            if not is_noted:
                note("another node builds this image; waiting for it")
                is_noted = True
            time.sleep(POLL_S)
        with lease:
            yield
    finally:
        store.close()
