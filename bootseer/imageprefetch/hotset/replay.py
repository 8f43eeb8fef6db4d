"""A hot set read ahead through a tree that is there already: `image replay`, and further mounts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage import hotset_manifest
from bootseer.blockimage.pack_format import Frame, Index, parse_boot
from bootseer.blockimage.pack_writer import owners, warm_of
from bootseer.blockimage.serve.data_file import WARMING
from bootseer.blockimage.serve.page_cache_warmer import (
    WINDOW_BYTES,
    clone_mount,
    open_regular_below,
)
from bootseer.blocks.extents import Extent
from bootseer.config.loading import default_cache, default_runtime
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, from_os_error
from bootseer.imageprefetch import block_image_parts
from bootseer.imageprefetch.block_image_repo import open_image
from bootseer.imageprefetch.hotset import local_hotsets
from bootseer.imageprefetch.image_cache import KeptFrames, LocalStore
from bootseer.imageprefetch.mount.readahead_notices import announce
from bootseer.imageprefetch.mount.server_registry import (
    Server,
    known,
    open_whole,
    until_unmounted,
    whole_at,
)
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.repository import Repository
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.system.fork import name_thread

if TYPE_CHECKING:
    from bootseer.imageprefetch.mount.mount import MountSettings

THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """What was asked to be read ahead. `workload` is the hot set's, which may be the default."""

    workload: str
    hot_set: str
    files: int
    bytes: int


def replay(
    ref: str,
    directory: str,
    workload: str = "",
    *,
    cache: str = "",
    threads: int = THREADS,
    runtime_dir: str = "",
    options: StoreOptions = DEFAULTS,
    plain_http: bool | None = None,
) -> Replayed:
    """Have the kernel read a workload's hot set ahead in the tree at `directory`, in order.

    `directory` is the image `ref`, mounted by us (its server tells of itself in `runtime_dir`) or
    unpacked by anybody. Returns when all of it is there. Raises NotFoundError when the image has no
    hot set.
    """
    repository, reference = open_repository(ref, options, plain_http=plain_http)
    with repository:
        subject, _ = repository.image(reference.version)
        digest, hot = _chosen(repository, subject.digest, ref, workload)
        index = _index(repository, hot)
    for server in known(runtime_dir or default_runtime()):
        if server.block_image == hot.block_image:
            announce(server, _ranges(index))
    if index.fetch and not index.frames:
        index = _by_files(index, ref, cache, options, plain_http)
    try:
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, f"open the tree {directory}") from error
    _warm(root, index, threads)
    return _told(hot.workload, digest, index)


def replay_while_mounted(settings: MountSettings, server: Server) -> Replayed | None:
    """`replay_beside` that ends when the image is unmounted; None when nothing is known yet."""
    gone, done = threading.Event(), threading.Event()

    def watch() -> None:
        until_unmounted(server, done.is_set)
        gone.set()

    threading.Thread(target=watch, name="image-mounts", daemon=True).start()
    try:
        return replay_beside(settings, server, gone.is_set)
    except NotFoundError:
        return None
    finally:
        done.set()


def replay_beside(settings: MountSettings, server: Server, stopped: Callable[[], bool]) -> Replayed:
    """Read the hot set of a further workload ahead, in an image that a server of this node serves.

    What is published for it comes before what this node made for itself, and both before the
    image's default hot set. Ends early when `stopped`; keeps nobody from unmounting the image.
    Raises NotFoundError when there is none, or the image is mounted nowhere any more.
    """
    if not whole_at(server):
        raise _gone(settings)
    index, workload, digest = _index_for(settings, server)
    announce(server, _ranges(index))
    if index.fetch and not index.frames:
        index = _by_files(
            index, settings.ref, settings.cache, settings.options, settings.plain_http
        )
    try:
        root = open_whole(server, clone_mount)
    except OSError as error:
        raise from_os_error(error, f"open the tree of {settings.ref}") from error
    if root is None:
        raise _gone(settings)
    _warm(root, index, THREADS, stopped)
    return _told(workload, digest, index)


def _gone(settings: MountSettings) -> NotFoundError:
    return NotFoundError(f"{settings.ref} is unmounted again, or covered; mount it anew")


def _index_for(settings: MountSettings, server: Server) -> tuple[Index, str, str]:
    """The best hot set there is for a mount: its index, its workload and its digest."""
    local = LocalStore(settings.cache)
    own = local_hotsets.find(local, server.digest, settings.workload, server.block_image)
    chosen = None
    fault: BootseerError | None = None
    try:
        repository, _ = open_repository(
            settings.ref, settings.options, plain_http=settings.plain_http
        )
        with repository:
            listed = repository.referrers(server.digest)
            chosen = hotset_manifest.choose(
                repository, listed, server.block_image, settings.workload
            )
            if chosen is not None and (own is None or chosen[1].workload == settings.workload):
                index = _index(repository, chosen[1])
                return index, chosen[1].workload, chosen[0].digest
    except BootseerError as error:  # what is here needs no registry
        fault = error
    if own is not None:
        with KeptFrames(own.path, own.pack) as frames:
            boot = block_image_parts.boot_of(frames.boot(own.pack), own.pack)
        return boot.index(), settings.workload, own.pack.digest
    raise fault or NotFoundError(
        f"{settings.ref} has no hot set of workload {settings.workload!r}; record it first"
    )


def _ranges(index: Index) -> list[Extent]:
    """All of the data that a hot set is made of."""
    return [*index.fetch, *(one for frame in index.frames for one in frame.extents)]


def _told(workload: str, digest: str, index: Index) -> Replayed:
    warmed = [one for frame in index.frames for one in frame.warm]
    return Replayed(
        workload,
        digest,
        len({one.path for one in warmed}),
        sum(one.length for one in warmed),
    )


def _chosen(
    repository: Repository, image: str, ref: str, workload: str
) -> tuple[str, hotset_manifest.HotSet]:
    listed = repository.referrers(image)
    block = block_image_parts.block_image_of(repository, listed)
    chosen = hotset_manifest.choose(repository, listed, block.digest, workload) if block else None
    if chosen is None:
        raise NotFoundError(
            f"{ref} has no hot set; make one with `bootseer image record` and "
            "`bootseer image hotset build --push`"
        )
    return chosen[0].digest, chosen[1]


def _index(repository: Repository, hot: hotset_manifest.HotSet) -> Index:
    boot = bytearray(hot.boot_length)
    repository.store.read_range(hot.pack.digest, 0, boot)
    if f"sha256:{hashlib.sha256(boot).hexdigest()}" != hot.boot_digest:
        raise CorruptDataError("the pack's first bytes do not match their digest")
    return parse_boot(boot).index()


def _by_files(
    index: Index, ref: str, cache: str, options: StoreOptions, plain_http: bool | None
) -> Index:
    """A hot set that is most of its image names blocks alone: look up whose bytes they are."""
    place = os.path.abspath(cache or default_cache())
    with open_image(ref, place, options=options, plain_http=plain_http) as image:
        paths: dict[bytes, int] = {}
        files = owners(image.parts.files, index.fetch)
        warm = warm_of(files.ranges(index.fetch), paths)
    return Index((Frame(0, 1, b"", (), warm),), tuple(paths))


def _never() -> bool:
    return False


def _warm(root: int, index: Index, threads: int, stopped: Callable[[], bool] = _never) -> None:
    """Read all ranges ahead, in order and from several threads; returns when they are there.

    Closes `root`.
    """
    windows = [
        (index.paths[one.path], at, min(WINDOW_BYTES, one.offset + one.length - at))
        for frame in index.frames
        for one in frame.warm
        for at in range(one.offset, one.offset + one.length, WINDOW_BYTES)
    ]

    def unless_stopped(
        read: Callable[[int, bytes, int, int], None],
    ) -> Callable[[tuple[bytes, int, int]], None]:
        return lambda window: None if stopped() else read(root, *window)

    try:
        with ThreadPoolExecutor(threads, initializer=name_thread, initargs=(WARMING,)) as pool:
            list(pool.map(unless_stopped(_ahead), windows))
            # A thread must live until what it asked for has arrived, or a server of ours could
            # not tell any more whose read that was.
            list(pool.map(unless_stopped(_arrived), windows))
    finally:
        os.close(root)


def _ahead(root: int, path: bytes, offset: int, length: int) -> None:
    # A file that is not as it was is read when somebody asks for it, as without us.
    with contextlib.suppress(OSError):
        fd = open_regular_below(root, path)
        try:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def _arrived(root: int, path: bytes, offset: int, length: int) -> None:
    with contextlib.suppress(OSError):
        fd = open_regular_below(root, path)
        try:
            os.pread(fd, 1, offset + length - 1)
        finally:
            os.close(fd)
