"""From a stock image to its block image, once.

A build works in a folder of its own below the cache, named after the image's digest and locked
while somebody is at it; whoever comes second waits, and then finds the block image there. What
is killed goes on: fetched layers stay, and so does a finished artifact that was not pushed yet.
Builds on several nodes at once give the same bytes, so that the later ones push nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from bootseer.imageprefetch.image_build.flatten import LIMITS, Flattener, Limits
from bootseer.imageprefetch.image_build.image_sources import (
    CONFIG_BYTES,
    ArchiveLayers,
    Layers,
    RepositoryLayers,
    diff_ids_of,
    same_tree,
)
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.system import file_lock

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor, Manifest, Platform
    from bootseer.storage.oci.repository import Progress, Repository

Note = Callable[[str], None]
KEPT_S = 7 * 86_400.0  # what a killed build left, for the next one of the image
FETCH_TRIES = 3  # one may go on with what was begun, so that nobody knows whose bytes are wrong
LOOK_S = 0.5  # between two looks at another node's lease


def _unheard(told: object) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """What is built, and how.

    `ref` names the image: as container programs do, `oci-layout:DIR[:TAG]`,
    `docker-archive:FILE[:NAME]` or `docker-daemon:NAME`. `to` is where the image lies that the
    block image is to refer to, when `ref` is no repository. `lease` is the URL of a store that
    all nodes share, so that one of them builds and the others wait for it. `rebuild` builds
    although there is one. `wait_s` bounds the wait for another build.
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
    threads: int = 2
    level: int = LEVEL
    limits: Limits = LIMITS
    data_limit_bytes: int = MAX_DATA_BYTES
    wait_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class BuildReport:
    """`subject` is the stock image's manifest, `block_image` the artifact's. `built` is false
    when one was there already."""

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
    expect: Callable[[int], None] = _unheard,
    progress: Progress = _unheard,
    note: Note = _unheard,
    stage: Note = _unheard,
) -> BuildReport:
    """Make the block image of a stock image, unless there is one.

    `progress` counts stored bytes of layers, then of what is pushed, and `expect` is told before
    how many will come; `note` hears of waiting. All three are called from several threads. `stage`
    is called with a line for each part of the work that is done, by the calling thread.
    Raises what repositories raise, CorruptDataError for a damaged or hostile image, BusyError
    when another build on this node takes longer than `wait_s`.
    """
    from bootseer.storage.oci.open import open_repository

    target = _target(settings)
    opened, reference = open_repository(
        target, settings.options, plain_http=settings.plain_http, push=True
    )
    with opened as repository:
        subject, manifest = repository.image(reference.version, settings.platform)
        if settings.platform is not None:
            _check_platform(repository, manifest, settings.platform, settings.ref)
        job = _Job(settings, repository, subject, manifest, _Ears(expect, progress, note, stage))
        if (there := job.there()) is not None:
            return there
        with _locked(job.folder, settings.wait_s, note), _leased(settings, job.folder, note):
            if (there := job.there()) is not None:  # who had the lock may have made it
                return there
            _forget_old(os.path.dirname(job.folder), job.folder)
            return job.run()


def _target(settings: BuildSettings) -> str:
    """The image in a repository that the block image is to refer to."""
    if _foreign(settings.ref) and not settings.to:
        raise UsageError(
            f"{settings.ref} lies in no repository; say with --to which image of a registry or "
            "layout it is, so that the block image can be found from there"
        )
    if settings.to and not _foreign(settings.ref):
        raise UsageError(
            f"{settings.ref} lies in a repository already, and its block image goes there; --to "
            "is for archives and for images that a container program holds"
        )
    return settings.to or settings.ref


def _foreign(ref: str) -> bool:
    return ref.startswith(("docker-archive:", "docker-daemon:"))


@dataclass(frozen=True, slots=True)
class _Ears:
    expect: Callable[[int], None]
    progress: Progress
    note: Note
    stage: Note


def _check_platform(repository: Repository, manifest: Manifest, wanted: Platform, ref: str) -> None:
    """An image that no index names is taken whatever it is for: its config says so alone."""
    from bootseer.imageprefetch.run import image_config
    from bootseer.storage.oci.platforms import check_platform

    raw = repository.blob(manifest.config, limit_bytes=image_config.LIMIT_BYTES)
    offered = image_config.platform_of(raw)
    if offered is not None:
        check_platform(offered, wanted, ref)


class _Job:
    """One image's build, with its repository at hand."""

    def __init__(
        self,
        settings: BuildSettings,
        repository: Repository,
        subject: Descriptor,
        manifest: Manifest,
        ears: _Ears,
    ) -> None:
        self._settings, self._repository = settings, repository
        self._subject, self._manifest = subject, manifest
        self._ears = ears
        self._layers: Layers | None = None
        name = subject.digest.replace(":", "-")
        self.folder = os.path.join(settings.cache_dir, "images", "build", name)

    def there(self) -> BuildReport | None:
        """The report of a block image that the repository has already."""
        if self._settings.rebuild:
            return None
        for found in self._repository.referrers(self._subject.digest, artifact.ARTIFACT):
            if self._is_whole(found):
                place = self._repository.reference.place
                return BuildReport(place, self._subject.digest, found.digest, False)
            self._ears.note(f"the block image {found.digest} lacks parts; building it again")
        return None

    def _is_whole(self, found: Descriptor) -> bool:
        try:
            manifest = self._repository.manifest(found)
        except (NotFoundError, CorruptDataError):
            return False
        layers = getattr(manifest, "layers", ())
        return len(layers) > 0 and all(self._repository.has_blob(one.digest) for one in layers)

    def run(self) -> BuildReport:
        """Build, or take up a finished artifact, and push it."""
        begun = time.monotonic()
        made = None if self._settings.rebuild else artifact.load(self.folder)
        taken_up = made is not None
        if made is None:
            made = self._built()
            artifact.save(made, self.folder)
        built = time.monotonic()
        how = "is there from an earlier build" if taken_up else f"made in {built - begun:.1f} s"
        size = f"{made.size_bytes / (1 << 20):.1f} MiB"
        self._ears.stage(f"block image {how}: {made.about['files']} files in {size}")
        self._ears.expect(made.size_bytes)
        try:
            pushed = artifact.push(
                made, self._repository, self._subject, progress=self._ears.progress
            )
        except CorruptDataError:
            artifact.forget(self.folder)  # what lies there is damaged: the next build begins anew
            raise
        report = BuildReport(
            self._repository.reference.place,
            self._subject.digest,
            pushed.digest,
            True,
            entries=int(made.about["entries"]),
            files=int(made.about["files"]),
            layers_bytes=int(made.about["layers_bytes"]),
            data_bytes=int(made.about["data_bytes"]),
            stored_bytes=made.size_bytes,
            meta_bytes=int(made.about["meta_bytes"]),
            build_s=round(built - begun, 3),
            push_s=round(time.monotonic() - built, 3),
        )
        self._ears.stage(f"pushed to {report.place} in {report.push_s:.1f} s")
        shutil.rmtree(self.folder, ignore_errors=True)
        return report

    def _built(self) -> Artifact:
        """Build; again where a layer came with wrong bytes, which others may have right."""
        for _ in range(FETCH_TRIES - 1):
            try:
                return self._build()
            except CorruptDataError as error:
                if self._layers is None or not self._layers.damaged:
                    raise
                self._ears.note(f"{error}; fetching it again")
        return self._build()

    def _build(self) -> Artifact:
        settings = self._settings
        self._layers = None
        with self._source() as layers:
            self._layers = layers
            self._ears.expect(layers.size_bytes)
            path = os.path.join(self.folder, DATA_NAME)
            with DataWriter(
                path,
                threads=settings.threads,
                level=settings.level,
                limit_bytes=settings.data_limit_bytes,
            ) as data:
                flattener = Flattener(data.store, settings.limits)
                count = len(layers.diff_ids)
                for number in reversed(range(count)):
                    name = f"layer {number + 1} of {count}"
                    begun = time.monotonic()
                    flattener.add(lambda n=number: layers.opened(n), name)  # type: ignore[misc]
                    self._ears.stage(f"{name} read in {time.monotonic() - begun:.1f} s")
                entries = flattener.entries()
                del flattener  # its tree takes as much memory as the entries
                table = data.finish()
            made = finish(entries, table, self.folder)
            about = {
                "entries": len(entries),
                "layers_bytes": layers.size_bytes,
                "level": settings.level,
                "diff_ids": list(layers.diff_ids),
            }
        packed = artifact.pack(made, about)
        os.unlink(made.meta_path)
        return packed

    def _source(self) -> Layers:
        ref = self._settings.ref
        if not _foreign(ref):
            return RepositoryLayers(
                self._repository,
                self._manifest,
                self.folder,
                self._ears.progress,
                limit_bytes=self._settings.limits.unpacked_bytes,
            )
        return self._foreign_source(ref)

    def _foreign_source(self, ref: str) -> Layers:
        kind, _, rest = ref.partition(":")
        if kind == "docker-daemon":
            from bootseer.imageprefetch.image_build.docker_daemon import save_image

            path, name = os.path.join(self.folder, "saved.tar"), ""
            self._ears.note(f"fetching {rest} from the container program")
            save_image(rest, path, socket=self._settings.socket)
        else:
            path, name = _archive_name(rest)
        layers = ArchiveLayers(
            path,
            name,
            self.folder,
            self._ears.progress,
            limit_bytes=self._settings.limits.unpacked_bytes,
        )
        config = self._repository.blob(self._manifest.config, limit_bytes=CONFIG_BYTES)
        same_tree(layers.diff_ids, diff_ids_of(config), f"{ref} and {self._settings.to}")
        return layers


def _archive_name(rest: str) -> tuple[str, str]:
    """`FILE[:NAME[:TAG]]`; a file's own name may hold colons where the file is there."""
    if os.path.exists(rest):
        return rest, ""
    path, _, name = rest.partition(":")
    return path, name


@contextlib.contextmanager
def _locked(folder: str, wait_s: float, note: Note) -> Iterator[None]:
    """Work alone in a folder, which is made; the lock lies beside it and ends with the process."""
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


def _forget_old(parent: str, own: str) -> None:
    """Remove what builds left that were killed long ago and never taken up."""
    for name in os.listdir(parent):
        folder = os.path.join(parent, name)
        with contextlib.suppress(OSError):  # another build does this, too
            if folder == own or not os.path.isdir(folder):
                continue
            if time.time() - os.stat(folder).st_mtime < KEPT_S:
                continue
            with file_lock.acquire(f"{folder}.lock", limit_s=0):
                shutil.rmtree(folder)


@contextlib.contextmanager
def _leased(settings: BuildSettings, folder: str, note: Note) -> Iterator[None]:
    """Hold the image's lease in the store that the nodes share, if there is one.

    A lease that is lost, to whoever took us for dead, is no harm: both push the same bytes.
    """
    if not settings.lease:
        yield
        return
    from bootseer.storage.lease import Watch, try_acquire
    from bootseer.storage.open import open_store

    store = open_store(settings.lease, settings.options)
    name = f"image-builds/{os.path.basename(folder)}"
    try:
        watch = Watch(store, name)
        deadline = time.monotonic() + settings.wait_s
        told = False
        while (lease := try_acquire(store, name, watch)) is None:
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"another node has been building {settings.ref} for more than "
                    f"{settings.wait_s:g} s; look for what it waits for, or try again"
                )
            if not told:
                note("another node builds this image; waiting for it")
                told = True
            time.sleep(LOOK_S)
        with lease:
            yield
    finally:
        store.close()
