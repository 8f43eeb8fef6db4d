"""Fetch a checkpoint, or any plain object, into a local file or directory: parallel, verified."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import (
    CorruptDataError,
    NoSpaceError,
    NotSupportedError,
    OsAction,
    UsageError,
)
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import compute_digest
from bootseer.stripedfs.format.manifest import TreeFile, TreeFolder, TreeLink
from bootseer.stripedfs.progress import SILENT, Progress
from bootseer.stripedfs.read import batches
from bootseer.stripedfs.read.namespace import PathInfo, list_folder, load_tree
from bootseer.stripedfs.read.open import locate, open_file
from bootseer.stripedfs.read.partial_download import ArrivedRange, PartialDownload, open_fd
from bootseer.stripedfs.read.sources import DigestedSource, FileSource
from bootseer.stripedfs.read.tree import Tree
from bootseer.stripedfs.shared_fetcher import shared_fetcher
from bootseer.stripedfs.workers import WorkerPool
from bootseer.system.regular_files import read_fully, write_fully

PERMISSIONS = 0o777


@dataclasses.dataclass(frozen=True, slots=True)
class GetReport:
    """What a get did; `kept_bytes` had arrived in an interrupted one."""

    path: str
    files: int
    size_bytes: int
    kept_bytes: int


def get(
    url: str,
    destination: str,
    *,
    options: StoreOptions | None = None,
    fetcher: Fetcher | None = None,
    resume: bool = True,
    progress: Progress = SILENT,
) -> GetReport:
    """Fetch the checkpoint or plain file `url`; `destination` appears when all of it has arrived.

    A file is written to `destination`, or under its own name in it when that is a folder. A
    directory checkpoint becomes the folder `destination`, which must not exist or be empty. With
    `resume`, what an interrupted get of the same bytes left is verified and kept. Setuid, setgid
    and sticky bits are not restored. Raises the store's errors, CorruptDataError for damage,
    NoSpaceError.
    """
    store, info = locate(url, options)
    try:
        fetcher = fetcher or shared_fetcher()
        return get_from_store(store, info, destination, fetcher, resume=resume, progress=progress)
    finally:
        store.close()


def get_from_store(
    store: Store,
    info: PathInfo,
    destination: str,
    fetcher: Fetcher,
    *,
    resume: bool = True,
    progress: Progress = SILENT,
) -> GetReport:
    """`get` of what was looked up in a store that is open already."""
    opened = _open_for_get(store, info)
    destination = os.path.abspath(destination)
    if not isinstance(opened, Tree) and os.path.isdir(destination):
        destination = f"{destination}/{info.name.rpartition('/')[2]}"
    if isinstance(opened, Tree):
        key, size_bytes = f"tree-{opened.version.pointer.manifest_digest.hex()}", None
    else:
        key, size_bytes = opened.key, opened.size_bytes
    with PartialDownload.open(
        destination, key, size_bytes=size_bytes, resume=resume and bool(key)
    ) as download:
        run = _Get(download, fetcher, progress)
        try:
            report = run.get_tree(opened) if isinstance(opened, Tree) else run.get_file(opened)
            download.publish()
        except NoSpaceError:
            download.discard()  # frees our part of the full disk
            raise
        except BaseException:  # interrupted: the next get goes on from here
            download.save()
            raise
        return report


def _open_for_get(store: Store, info: PathInfo) -> FileSource | Tree:
    if not info.is_folder:
        return open_file(store, info)
    if info.version is None or info.entry is not None:
        raise UsageError(
            f"{info.name} in {store.url} is a folder; name a checkpoint or a file in it"
        )
    info = load_tree(store, info)
    tree = info.tree
    assert tree is not None
    listed = list_folder(store, info) if info.shares_folder else []
    others = [each.name for each in listed if each.tree is None]
    if others:
        raise NotSupportedError(
            f"{info.name} in {store.url} also holds {', '.join(others[:3])}, saved one by one and "
            "part of no version; get those by name, or copy the folder from a mount"
        )
    return tree


class _Get:
    """One get: batches arrive in several threads."""

    def __init__(self, download: PartialDownload, fetcher: Fetcher, progress: Progress) -> None:
        self._download, self._fetcher, self._progress = download, fetcher, progress
        self._lock = threading.Lock()
        self._kept_bytes = 0

    def get_file(self, source: FileSource) -> GetReport:
        """Fetch a single file."""
        self._expect(source.size_bytes)
        self._fetch(iter([("", source)]), source.store)
        _sync(self._download.path(""))
        return GetReport(self._download.destination, 1, source.size_bytes, self._kept_bytes)

    def get_tree(self, tree: Tree) -> GetReport:
        """Fetch a directory checkpoint."""
        size_bytes = tree.manifest.size_bytes
        self._expect(size_bytes)
        entries = tree.manifest.entries
        folders = [entry for entry in entries if isinstance(entry, TreeFolder)]
        for folder in folders:
            _make_folder(self._download.path(folder.path))
        files = [entry for entry in entries if isinstance(entry, TreeFile)]
        self._fetch(self._make_files(tree, files), tree.store)
        for file in files:
            path = self._download.path(file.path)
            _sync(path)
            _set_attributes(path, file.mode, file.mtime_ns)
        for link in entries:
            if isinstance(link, TreeLink):
                _make_link(link.target, self._download.path(link.path))
        for folder in reversed(folders):  # the deepest first: a folder's time changes with content
            _set_attributes(self._download.path(folder.path), folder.mode, folder.mtime_ns)
        os.chmod(self._download.part, tree.manifest.mode & PERMISSIONS)
        return GetReport(self._download.destination, len(files), size_bytes, self._kept_bytes)

    def _expect(self, size_bytes: int) -> None:
        self._download.check_room(size_bytes)
        self._progress.expect(size_bytes)

    def _make_files(self, tree: Tree, files: list[TreeFile]) -> Iterator[tuple[str, FileSource]]:
        for entry in files:
            self._download.make(entry.path, entry.size_bytes)
            yield entry.path, tree.source(entry)

    def _fetch(self, files: Iterator[tuple[str, FileSource]], store: Store) -> None:
        batches.run_batches(files, self._fetch_batch, limit_bytes=batches.batch_bytes(store))

    def _fetch_batch(
        self, batch: batches.Batch, memory: list[memoryview], pool: WorkerPool
    ) -> None:
        """Fetch what is missing of a batch and write it to the files."""
        pool.check()
        missing = [pair for pair in zip(batch, memory, strict=True) if not self._keep(*pair, pool)]
        batches.fetch_segments(self._fetcher, missing)
        arrived = []
        for segment, view in missing:
            _write_at(self._download.path(segment.path), segment.offset, view)
            digest = (
                "" if isinstance(segment.source, DigestedSource) else compute_digest(view).hex()
            )
            end = segment.offset + segment.length
            arrived.append((segment.path, ArrivedRange(segment.offset, end, digest)))
            self._progress.advance(segment.length)
        self._download.add(arrived)

    def _keep(self, segment: batches.Segment, view: memoryview, pool: WorkerPool) -> bool:
        """Whether an interrupted get wrote these bytes and they are still right."""
        noted = self._download.find_digest(segment.path, segment.offset, segment.length)
        if noted is None:
            return False
        source = segment.source
        try:
            _read_at(self._download.path(segment.path), segment.offset, view)
            if isinstance(source, DigestedSource):
                for start in range(0, segment.length, source.block_bytes):
                    pool.check()
                    block = view[start : start + source.block_bytes]
                    source.open_block((segment.offset + start) // source.block_bytes, block, block)
            elif compute_digest(view).hex() != noted:
                return False
        except (CorruptDataError, OSError):
            return False
        with self._lock:
            self._kept_bytes += segment.length
        self._progress.advance(segment.length)
        return True


def _write_at(path: str, offset: int, view: memoryview) -> None:
    with OsAction(f"write {path}"), open_fd(path, os.O_WRONLY) as fd:
        write_fully(fd, view, offset)


def _read_at(path: str, offset: int, view: memoryview) -> None:
    with open_fd(path, os.O_RDONLY) as fd:
        if read_fully(fd, view, offset) < len(view):
            raise CorruptDataError(f"{path} is shorter than it was; fetch it again")


def _sync(path: str) -> None:
    with OsAction(f"write {path}"), open_fd(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def _set_attributes(path: str, mode: int, mtime_ns: int) -> None:
    with OsAction(f"set the mode of {path}"):
        os.chmod(path, mode & PERMISSIONS)
        os.utime(path, ns=(mtime_ns, mtime_ns))


def _make_folder(path: str) -> None:
    with OsAction(f"make the folder {path}"):
        os.makedirs(path, mode=0o700, exist_ok=True)


def _make_link(target: str, path: str) -> None:
    with OsAction(f"make the link {path}"):
        if os.path.lexists(path):
            os.unlink(path)
        os.symlink(target, path)
