"""`image replay`: a hot set read ahead through a tree that is there already."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

from bootseer.blockimage import hotset
from bootseer.blockimage.front import WARMING
from bootseer.blockimage.pack import Frame, Index, parse_boot
from bootseer.blockimage.packing import owners, warm_of
from bootseer.blockimage.warm import WINDOW_BYTES, open_regular_below
from bootseer.config import default_cache
from bootseer.errors import CorruptDataError, NotFoundError, from_os_error
from bootseer.imageprefetch import pieces
from bootseer.imageprefetch.parts import open_image
from bootseer.storage.oci.registry import Repository, open_repository
from bootseer.storage.options import DEFAULTS, StoreOptions

THREADS = 8
_PR_SET_NAME = 15


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
    options: StoreOptions = DEFAULTS,
    plain_http: bool | None = None,
) -> Replayed:
    """Have the kernel read a workload's hot set ahead in the tree at `directory`, in order.

    `directory` is the image `ref`, mounted by us or unpacked by anybody. Returns when all of it is
    there. Raises NotFoundError when the image has no hot set.
    """
    repository, reference = open_repository(ref, options, plain_http=plain_http)
    with repository:
        subject, _ = repository.image(reference.version)
        digest, hot = _chosen(repository, subject.digest, ref, workload)
        index = _index(repository, hot)
    if index.fetch and not index.frames:
        index = _by_files(index, ref, cache, options, plain_http)
    _warm(directory, index, threads)
    warmed = [one for frame in index.frames for one in frame.warm]
    return Replayed(
        hot.workload,
        digest,
        len({one.path for one in warmed}),
        sum(one.length for one in warmed),
    )


def _chosen(
    repository: Repository, image: str, ref: str, workload: str
) -> tuple[str, hotset.HotSet]:
    listed = repository.referrers(image)
    block = pieces.block_image_of(listed)
    chosen = hotset.choose(repository, listed, block.digest, workload) if block else None
    if chosen is None:
        raise NotFoundError(
            f"{ref} has no hot set; make one with `bootseer image record` and "
            "`bootseer image hotset build --push`"
        )
    return chosen[0].digest, chosen[1]


def _index(repository: Repository, hot: hotset.HotSet) -> Index:
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


def _warm(directory: str, index: Index, threads: int) -> None:
    """Read all ranges ahead, in order and from several threads; returns when they are there."""
    try:
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, f"open the tree {directory}") from error
    windows = [
        (index.paths[one.path], at, min(WINDOW_BYTES, one.offset + one.length - at))
        for frame in index.frames
        for one in frame.warm
        for at in range(one.offset, one.offset + one.length, WINDOW_BYTES)
    ]
    try:
        with ThreadPoolExecutor(threads, initializer=_named) as pool:
            list(pool.map(lambda window: _ahead(root, *window), windows, chunksize=1))
            # A thread must live until what it asked for has arrived, or a server of ours could
            # not tell any more whose read that was.
            list(pool.map(lambda window: _arrived(root, *window), windows, chunksize=1))
    finally:
        os.close(root)


def _named() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, WARMING)


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
