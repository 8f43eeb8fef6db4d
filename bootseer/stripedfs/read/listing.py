"""What `ls` tells: checkpoints of a folder, or what one checkpoint holds."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bootseer.errors import BootseerError, NotFoundError
from bootseer.storage.store import Store
from bootseer.stripedfs.format.manifest import VERSION_PATTERN, Manifest, TreeFile, TreeLink
from bootseer.stripedfs.format.pointer import folder_of, load_version, striped_file
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import Found
from bootseer.stripedfs.workers import call_in_parallel


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """One line of a listing. `width` and `chunk_bytes` are 0 for what is not striped.

    `versions` counts the whole versions that the store holds of a checkpoint, the current one
    included; `problem` says why an entry could not be looked at, and `exit_code` is of that error
    (else 0). It is of `kind` "unknown" where not even that could be told.
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


def listing(store: Store, found: Found, *, recursive: bool = False) -> list[Listed]:
    """What was found: of a file itself, else what lies in it, by name.

    `recursive` goes into the folders of a directory checkpoint.
    """
    if not found.is_folder:
        return [_described(store, found)]
    waiting, listed = [found], []
    while waiting:
        children = namespace.children(store, waiting.pop())
        listed += children
        if recursive:
            waiting += [c for c in children if c.is_folder and c.tree is not None]
    return call_in_parallel(
        lambda each: _described(store, each), sorted(listed, key=lambda f: f.name)
    )


def _described(store: Store, found: Found) -> Listed:
    if found.problem is not None:
        return _unreadable(found, "unknown", found.problem)
    if found.link:
        return Listed(found.name, "link", 0, found.mtime_s, target=found.link)
    try:
        if found.tree is not None:
            return _of_tree(store, found)
        if found.version is not None:
            return _of_version(store, found)
    except BootseerError as error:
        return _unreadable(found, "tree" if found.is_folder else "file", error)
    kind_: Literal["folder", "plain"] = "folder" if found.is_folder else "plain"
    return Listed(found.name, kind_, found.size_bytes, found.mtime_s)


def _unreadable(
    found: Found, kind: Literal["tree", "file", "unknown"], error: BootseerError
) -> Listed:
    return Listed(
        found.name,
        kind,
        found.size_bytes,
        found.mtime_s,
        problem=str(error),
        exit_code=error.exit_code,
    )


def _of_version(store: Store, found: Found) -> Listed:
    assert found.version is not None
    loaded = load_version(store, found.name, found.version)
    assert loaded is not None  # a version was pointed to
    version, manifest = loaded
    striped = isinstance(manifest, Manifest)
    return Listed(
        found.name,
        "file" if striped else "tree",
        version.pointer.size_bytes,
        found.mtime_s,
        manifest.layout.width if isinstance(manifest, Manifest) else 0,
        manifest.layout.chunk_bytes if isinstance(manifest, Manifest) else manifest.chunk_bytes,
        version.pointer.version,
        count_versions(store, found.name),
    )


def _of_tree(store: Store, found: Found) -> Listed:
    assert found.tree is not None
    entry = found.entry
    if isinstance(entry, TreeLink):
        return Listed(found.name, "link", 0, found.mtime_s, target=entry.target)
    if not isinstance(entry, TreeFile):
        return Listed(found.name, "folder", 0, found.mtime_s)
    if not entry.striped:
        return Listed(found.name, "plain", entry.size_bytes, found.mtime_s)
    layout = striped_file(store, found.tree.version, entry).manifest.layout
    return Listed(
        found.name, "file", entry.size_bytes, found.mtime_s, layout.width, layout.chunk_bytes
    )


def count_versions(store: Store, name: str) -> int:
    """Whole versions that a checkpoint's folder holds."""
    try:
        listed = [s for s in store.list(folder_of(name)) if s.is_folder]
    except NotFoundError:
        return 0
    return sum(1 for s in listed if VERSION_PATTERN.match(s.name.rpartition("/")[2]))
