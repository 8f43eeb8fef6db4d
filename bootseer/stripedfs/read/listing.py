"""What `bootseer stripe ls` lists: checkpoints of a folder, or what one checkpoint holds."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bootseer.errors import BootseerError, NotFoundError
from bootseer.storage.store import Store
from bootseer.stripedfs.format.manifest import VERSION_PATTERN, Manifest, TreeFile, TreeLink
from bootseer.stripedfs.format.pointer import checkpoint_folder, load_version, read_striped_file
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo
from bootseer.stripedfs.workers import call_in_parallel


@dataclasses.dataclass(frozen=True, slots=True)
class ListingEntry:
    """One line of a listing. `width` and `chunk_bytes` are 0 for what is not striped.

    `versions` counts the complete versions of a checkpoint, with the current one; `problem` says
    why an entry could not be read, and `exit_code` is of that error (else 0). `kind` is "unknown"
    where even that could not be read.
    """

    name: str
    kind: Literal["file", "tree", "plain", "folder", "link", "unknown"]
    size_bytes: int
    mtime_s: float
    width: int = 0
    chunk_bytes: int = 0
    version: str = ""
    versions: int = 0
    target: str = ""
    problem: str = ""
    exit_code: int = 0


def list_entries(store: Store, info: PathInfo, *, recursive: bool = False) -> list[ListingEntry]:
    """List what a folder holds, by name, or describe a file.

    `recursive` goes into the folders of a directory checkpoint.
    """
    if not info.is_folder:
        return [_describe(store, info)]
    folders, infos = [info], []
    while folders:
        children = namespace.list_folder(store, folders.pop())
        infos += children
        if recursive:
            folders += [c for c in children if c.is_folder and c.tree is not None]
    infos.sort(key=lambda each: each.name)
    return call_in_parallel(lambda each: _describe(store, each), infos)


def _describe(store: Store, info: PathInfo) -> ListingEntry:
    if info.problem is not None:
        return _describe_unreadable(info, "unknown", info.problem)
    if info.link:
        return ListingEntry(info.name, "link", 0, info.mtime_s, target=info.link)
    try:
        if info.tree is not None:
            return _describe_tree_entry(store, info)
        if info.version is not None:
            return _describe_version(store, info)
    except BootseerError as error:
        return _describe_unreadable(info, "tree" if info.is_folder else "file", error)
    kind: Literal["folder", "plain"] = "folder" if info.is_folder else "plain"
    return ListingEntry(info.name, kind, info.size_bytes, info.mtime_s)


def _describe_unreadable(
    info: PathInfo, kind: Literal["tree", "file", "unknown"], error: BootseerError
) -> ListingEntry:
    return ListingEntry(
        info.name,
        kind,
        info.size_bytes,
        info.mtime_s,
        problem=str(error),
        exit_code=error.exit_code,
    )


def _describe_version(store: Store, info: PathInfo) -> ListingEntry:
    assert info.version is not None
    version, manifest = load_version(store, info.name, info.version)
    width, chunk_bytes = (
        (manifest.layout.width, manifest.layout.chunk_bytes)
        if isinstance(manifest, Manifest)
        else (0, manifest.chunk_bytes)
    )
    return ListingEntry(
        info.name,
        "file" if width else "tree",
        version.pointer.size_bytes,
        info.mtime_s,
        width,
        chunk_bytes,
        version.pointer.version,
        count_versions(store, info.name),
    )


def _describe_tree_entry(store: Store, info: PathInfo) -> ListingEntry:
    assert info.tree is not None
    entry = info.entry
    if isinstance(entry, TreeLink):
        return ListingEntry(info.name, "link", 0, info.mtime_s, target=entry.target)
    if not isinstance(entry, TreeFile):
        return ListingEntry(info.name, "folder", 0, info.mtime_s)
    if not entry.striped:
        return ListingEntry(info.name, "plain", entry.size_bytes, info.mtime_s)
    layout = read_striped_file(store, info.tree.version, entry).manifest.layout
    return ListingEntry(
        info.name, "file", entry.size_bytes, info.mtime_s, layout.width, layout.chunk_bytes
    )


def count_versions(store: Store, name: str) -> int:
    """The number of complete versions in a checkpoint's folder."""
    try:
        names = [s.name for s in store.list(checkpoint_folder(name)) if s.is_folder]
    except NotFoundError:
        return 0
    return sum(1 for each in names if VERSION_PATTERN.match(each.rpartition("/")[2]))
