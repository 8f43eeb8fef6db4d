"""Reading a hot set ahead through a mounted tree: for `image replay`, and for further mounts.

A server replays the hot set of the mount that started it from the pack. A further mount of the
image, which shares the server, may be of another workload, and its hot set is read through the
file system. `image replay` does the same in any tree, mounted by us or unpacked.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage import hotset_manifest
from bootseer.blockimage.pack_format import Frame, Index
from bootseer.blockimage.pack_writer import owners, warm_of
from bootseer.blockimage.serve.data_file import WARMING
from bootseer.blockimage.serve.page_cache_warmer import (
    WINDOW_BYTES,
    clone_mount,
    open_regular_below,
)
from bootseer.blocks.extents import Extent
from bootseer.config.loading import default_cache, default_runtime
from bootseer.errors import BootseerError, NotFoundError, from_os_error
from bootseer.imageprefetch.block_image_repo import check_boot, find_block_image
from bootseer.imageprefetch.hotset import local_hotsets
from bootseer.imageprefetch.hotset.image_hotsets import open_image
from bootseer.imageprefetch.image_cache import CachedFrames, ImageCache
from bootseer.imageprefetch.mount.readahead_notices import announce_readahead
from bootseer.imageprefetch.mount.server_registry import (
    ServerRecord,
    await_unmount,
    list_records,
    open_whole_tree,
    whole_paths,
)
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.repository import Repository
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.system.child_processes import name_thread

if TYPE_CHECKING:
    from bootseer.imageprefetch.mount.settings import MountSettings

THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayResult:
    """What was read ahead. `workload` is the hot set's, which may be the default one."""

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
) -> ReplayResult:
    """Read a workload's hot set ahead, in order, in the tree at `directory`.

    `directory` has the image `ref`, mounted by us (servers are registered in `runtime_dir`) or
    unpacked by other means. Returns when everything has been read. Raises NotFoundError when the
    image has no hot set.
    """
    repository, reference = open_repository(ref, options, plain_http=plain_http)
    with repository:
        subject, _ = repository.image(reference.version)
        digest, hot = _choose(repository, subject.digest, ref, workload)
        index = _fetch_index(repository, hot)
    for server in list_records(runtime_dir or default_runtime()):
        if server.block_image == hot.block_image:
            announce_readahead(server, _ranges(index))
    if index.fetch and not index.frames:
        index = _index_by_files(index, ref, cache, options, plain_http)
    try:
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, f"open the tree {directory}") from error
    _warm(root, index, threads)
    return _result(hot.workload, digest, index)


def replay_while_mounted(settings: MountSettings, server: ServerRecord) -> ReplayResult | None:
    """As `replay_through`, until the image is unmounted; None where it has no hot set."""
    unmounted, done = threading.Event(), threading.Event()

    def watch() -> None:
        await_unmount(server, done.is_set)
        unmounted.set()

    threading.Thread(target=watch, name="image-mounts", daemon=True).start()
    try:
        return replay_through(settings, server, unmounted.is_set)
    except NotFoundError:
        return None
    finally:
        done.set()


def replay_through(
    settings: MountSettings, server: ServerRecord, stopped: Callable[[], bool]
) -> ReplayResult:
    """Read the hot set of a further mount's workload ahead, in an image that `server` serves.

    A published hot set of the workload comes before one that this node made for itself, and both
    before the image's default hot set. Ends early when `stopped`; the image can be unmounted
    meanwhile. Raises NotFoundError when there is none, or the image is not mounted any more.
    """
    if not whole_paths(server):
        raise _unmounted_error(settings)
    index, workload, digest = _index_for(settings, server)
    announce_readahead(server, _ranges(index))
    if index.fetch and not index.frames:
        index = _index_by_files(
            index, settings.ref, settings.cache, settings.options, settings.plain_http
        )
    try:
        root = open_whole_tree(server, clone_mount)
    except OSError as error:
        raise from_os_error(error, f"open the tree of {settings.ref}") from error
    if root is None:
        raise _unmounted_error(settings)
    _warm(root, index, THREADS, stopped)
    return _result(workload, digest, index)


def _unmounted_error(settings: MountSettings) -> NotFoundError:
    return NotFoundError(f"{settings.ref} is unmounted again, or covered; mount it anew")


def _index_for(settings: MountSettings, server: ServerRecord) -> tuple[Index, str, str]:
    """The best hot set for a mount: its index, its workload and its digest."""
    cache, workload = ImageCache(settings.cache), settings.workload
    own = local_hotsets.find(cache, server.digest, workload, server.block_image)
    fault: BootseerError | None = None
    try:
        repository, _ = open_repository(
            settings.ref, settings.options, plain_http=settings.plain_http
        )
        with repository:
            referrers = repository.referrers(server.digest)
            chosen = hotset_manifest.choose(repository, referrers, server.block_image, workload)
            if chosen is not None and (own is None or chosen[1].workload == workload):
                index = _fetch_index(repository, chosen[1])
                return index, chosen[1].workload, chosen[0].digest
    except BootseerError as error:  # the node's own hot set needs no registry
        fault = error
    if own is not None:
        with CachedFrames.open(own.path, own.pack) as frames:
            boot = check_boot(frames.boot(own.pack), own.pack.boot_digest)
        return boot.index(), workload, own.pack.digest
    raise fault or NotFoundError(
        f"{settings.ref} has no hot set of workload {settings.workload!r}; record it first"
    )


def _ranges(index: Index) -> list[Extent]:
    """The ranges of the image's data that a hot set consists of."""
    return [*index.fetch, *(extent for frame in index.frames for extent in frame.extents)]


def _result(workload: str, digest: str, index: Index) -> ReplayResult:
    ranges = [range_ for frame in index.frames for range_ in frame.warm]
    return ReplayResult(
        workload,
        digest,
        len({range_.path for range_ in ranges}),
        sum(range_.length for range_ in ranges),
    )


def _choose(
    repository: Repository, image: str, ref: str, workload: str
) -> tuple[str, hotset_manifest.HotSet]:
    referrers = repository.referrers(image)
    block = find_block_image(repository, referrers)
    chosen = (
        hotset_manifest.choose(repository, referrers, block.digest, workload) if block else None
    )
    if chosen is None:
        raise NotFoundError(
            f"{ref} has no hot set; make one with `bootseer image record` and "
            "`bootseer image hotset build --push`"
        )
    return chosen[0].digest, chosen[1]


def _fetch_index(repository: Repository, hot: hotset_manifest.HotSet) -> Index:
    boot = bytearray(hot.boot_length)
    repository.store.read_range(hot.pack.digest, 0, boot)
    return check_boot(boot, hot.boot_digest).index()


def _index_by_files(
    index: Index, ref: str, cache: str, options: StoreOptions, plain_http: bool | None
) -> Index:
    """The index of a hot set that names only blocks, since it is most of its image, by files."""
    cache = os.path.abspath(cache or default_cache())
    with open_image(ref, cache, options=options, plain_http=plain_http) as image:
        paths: dict[bytes, int] = {}
        files = owners(image.parts.files, index.fetch)
        warm = warm_of(files.ranges(index.fetch), paths)
    return Index((Frame(0, 1, b"", (), warm),), tuple(paths))


def _never() -> bool:
    return False


def _warm(root: int, index: Index, threads: int, stopped: Callable[[], bool] = _never) -> None:
    """Read all ranges ahead, in order, in several threads; returns when they have arrived.

    Closes `root`.
    """
    windows = [
        (index.paths[range_.path], at, min(WINDOW_BYTES, range_.offset + range_.length - at))
        for frame in index.frames
        for range_ in frame.warm
        for at in range(range_.offset, range_.offset + range_.length, WINDOW_BYTES)
    ]

    def unless_stopped(
        read: Callable[[int, bytes, int, int], None],
    ) -> Callable[[tuple[bytes, int, int]], None]:
        return lambda window: None if stopped() else read(root, *window)

    try:
        with ThreadPoolExecutor(threads, initializer=name_thread, initargs=(WARMING,)) as pool:
            list(pool.map(unless_stopped(_read_ahead), windows))
            # A thread must live until its bytes have arrived, or a server of ours could not tell
            # whose read that was.
            list(pool.map(unless_stopped(_await_arrival), windows))
    finally:
        os.close(root)


def _read_ahead(root: int, path: bytes, offset: int, length: int) -> None:
    # A file that has changed is read when a program asks for it.
    with contextlib.suppress(OSError):
        fd = open_regular_below(root, path)
        try:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def _await_arrival(root: int, path: bytes, offset: int, length: int) -> None:
    with contextlib.suppress(OSError):
        fd = open_regular_below(root, path)
        try:
            os.pread(fd, 1, offset + length - 1)
        finally:
            os.close(fd)
