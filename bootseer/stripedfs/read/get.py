"""Fetch a checkpoint, or any plain object, into a local file or directory: parallel, verified."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bootseer.errors import (
    CorruptDataError,
    NoSpaceError,
    NotSupportedError,
    UsageError,
    from_os_error,
)
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import digest_of
from bootseer.stripedfs.format.manifest import TreeFile, TreeFolder, TreeLink
from bootseer.stripedfs.read import batches
from bootseer.stripedfs.read.namespace import Found, children, rooted, source_of
from bootseer.stripedfs.read.open import Tree
from bootseer.stripedfs.read.partial_download import Arrived, Landing
from bootseer.stripedfs.read.sources import DigestedSource, FileSource
from bootseer.stripedfs.write.stripe_pool import Pool
from bootseer.stripedfs.write.write_settings import SILENT, Progress
from bootseer.system.regular_files import read_fully, write_fully

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.storage.options import StoreOptions

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
    """Fetch the checkpoint or plain file `url`; `destination` appears when all of it is there.

    A file lands in `destination`, or under its own name in it when that is a folder. A directory
    checkpoint becomes the folder `destination`, which must not exist or be empty. With `resume`
    what an interrupted get of the same bytes left is verified and kept. Setuid, setgid and sticky
    bits are not restored. Raises the store's errors, CorruptDataError for damage, NoSpaceError.
    """
    from bootseer.stripedfs.read.locate import locate
    from bootseer.stripedfs.shared_fetcher import shared_fetcher

    store, found = locate(url, options)
    try:
        fetcher = fetcher or shared_fetcher()
        return get_found(store, found, destination, fetcher, resume=resume, progress=progress)
    finally:
        store.close()


def get_found(
    store: Store,
    found: Found,
    destination: str,
    fetcher: Fetcher,
    *,
    resume: bool = True,
    progress: Progress = SILENT,
) -> GetReport:
    """`get` of what was found in a store that is open already."""
    opened = _opened(store, found)
    destination = os.path.abspath(destination)
    if not isinstance(opened, Tree) and os.path.isdir(destination):
        destination = f"{destination}/{found.name.rpartition('/')[2]}"
    key = _tree_key(opened) if isinstance(opened, Tree) else opened.key
    size_bytes = None if isinstance(opened, Tree) else opened.size_bytes
    with Landing(destination, key, size_bytes=size_bytes, resume=resume and bool(key)) as landing:
        run = _Run(landing, fetcher, progress)
        try:
            report = run.tree(opened) if isinstance(opened, Tree) else run.file(opened)
            landing.publish()
        except NoSpaceError:
            landing.discard()  # the disk is full: what we hold of it helps nobody
            raise
        except BaseException:  # interrupted: the next get goes on from here
            landing.save()
            raise
        return report


def _opened(store: Store, found: Found) -> FileSource | Tree:
    if not found.is_folder:
        return source_of(store, found)
    if found.version is None or found.entry is not None:
        raise UsageError(
            f"{found.name} in {store.url} is a folder; name a checkpoint or a file in it"
        )
    found = rooted(store, found)
    tree = found.tree
    assert tree is not None
    listed = children(store, found) if found.beside else []
    others = [each.name for each in listed if each.tree is None]
    if others:
        raise NotSupportedError(
            f"{found.name} in {store.url} also holds {', '.join(others[:3])}, saved one by one and "
            "part of no version; get those by name, or copy the folder from a mount"
        )
    return tree


def _tree_key(tree: Tree) -> str:
    return f"tree-{tree.version.pointer.manifest_digest.hex()}"


class _Run:
    """One get: batches come from several threads."""

    def __init__(self, landing: Landing, fetcher: Fetcher, progress: Progress) -> None:
        self._landing, self._fetcher, self._progress = landing, fetcher, progress
        self._lock = threading.Lock()
        self._kept_bytes = 0

    def file(self, source: FileSource) -> GetReport:
        """Fetch a single file."""
        self._landing.check_room(source.size_bytes)
        self._progress.expect(source.size_bytes)
        self._fetch(iter([("", source)]), source)
        _sync(self._landing.path(""))
        return GetReport(self._landing.destination, 1, source.size_bytes, self._kept_bytes)

    def tree(self, tree: Tree) -> GetReport:
        """Fetch a directory checkpoint."""
        size_bytes = tree.manifest.size_bytes
        self._landing.check_room(size_bytes)
        self._progress.expect(size_bytes)
        entries = tree.manifest.entries
        folders = [entry for entry in entries if isinstance(entry, TreeFolder)]
        for folder in folders:
            _made(self._landing.path(folder.path))
        files = [entry for entry in entries if isinstance(entry, TreeFile)]
        self._fetch(self._sources(tree, files), None, tree.store)
        for file in files:
            path = self._landing.path(file.path)
            _sync(path)
            _dress(path, file.mode, file.mtime_ns)
        for link in entries:
            if isinstance(link, TreeLink):
                _link(link.target, self._landing.path(link.path))
        for folder in reversed(folders):  # the deepest first: a folder's time changes with content
            _dress(self._landing.path(folder.path), folder.mode, folder.mtime_ns)
        os.chmod(self._landing.part, tree.manifest.mode & PERMISSIONS)
        return GetReport(self._landing.destination, len(files), size_bytes, self._kept_bytes)

    def _sources(self, tree: Tree, files: list[TreeFile]) -> Iterator[tuple[str, FileSource]]:
        for entry in files:
            self._landing.make(entry.path, entry.size_bytes)
            yield entry.path, tree.source(entry)

    def _fetch(
        self,
        files: Iterator[tuple[str, FileSource]],
        only: FileSource | None,
        store: Store | None = None,
    ) -> None:
        place = only.store if only is not None else store
        assert place is not None
        batches.run(files, self._land, limit_bytes=batches.batch_bytes(place))

    def _land(self, batch: batches.Batch, memory: list[memoryview], pool: Pool) -> None:
        """Fetch what is missing of a batch and write it to the files."""
        pool.check()
        missing = [
            pair for pair in zip(batch, memory, strict=True) if not self._is_there(*pair, pool)
        ]
        batches.fetch(self._fetcher, missing)
        arrived = []
        for segment, view in missing:
            _written(self._landing.path(segment.path), segment.offset, view)
            digest = "" if isinstance(segment.source, DigestedSource) else digest_of(view).hex()
            end = segment.offset + segment.length
            arrived.append((segment.path, Arrived(segment.offset, end, digest)))
            self._progress.advance(segment.length)
        self._landing.note(arrived)

    def _is_there(self, segment: batches.Segment, view: memoryview, pool: Pool) -> bool:
        """Whether an earlier get wrote these bytes and they are still right."""
        noted = self._landing.arrived(segment.path, segment.offset, segment.length)
        if noted is None:
            return False
        source = segment.source
        try:
            _read(self._landing.path(segment.path), segment.offset, view)
            if isinstance(source, DigestedSource):
                for start in range(0, segment.length, source.block_bytes):
                    pool.check()
                    piece = view[start : start + source.block_bytes]
                    source.open_block((segment.offset + start) // source.block_bytes, piece, piece)
            elif digest_of(view).hex() != noted:
                return False
        except (CorruptDataError, OSError):
            return False
        with self._lock:
            self._kept_bytes += segment.length
        self._progress.advance(segment.length)
        return True


def _written(path: str, offset: int, view: memoryview) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            write_fully(fd, view, offset)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error


def _read(path: str, offset: int, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if read_fully(fd, view, offset) < len(view):
            raise CorruptDataError(f"{path} is shorter than it was; fetch it again")
    finally:
        os.close(fd)


def _sync(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error


def _dress(path: str, mode: int, mtime_ns: int) -> None:
    try:
        os.chmod(path, mode & PERMISSIONS)
        os.utime(path, ns=(mtime_ns, mtime_ns))
    except OSError as error:
        raise from_os_error(error, f"set the mode of {path}") from error


def _made(path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"make the folder {path}") from error


def _link(target: str, path: str) -> None:
    try:
        if os.path.lexists(path):
            os.unlink(path)
        os.symlink(target, path)
    except OSError as error:
        raise from_os_error(error, f"make the link {path}") from error
