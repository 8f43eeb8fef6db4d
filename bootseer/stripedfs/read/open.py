"""From a name on a store to something that can be read: a file's source, or a tree of files.

A striped checkpoint is found by its pointer; where there is none, the plain object of that name
is taken as it is. What the manifest promises is compared with what the store holds before the
first byte is read: one request a stripe, all at the same time, tells its length and its replicas.
"""

from __future__ import annotations

import contextvars
import posixpath
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bootseer.errors import CorruptDataError, NotFoundError, UsageError
from bootseer.storage.store import Store
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import (
    Link,
    Manifest,
    TreeEntry,
    TreeFile,
    TreeLink,
    TreeManifest,
)
from bootseer.stripedfs.read.sources import (
    FileSource,
    PlainSource,
    SmallSource,
    Stretches,
    StripedSource,
)

METADATA_STREAMS = 16
MAX_STEPS = 4096
"""Parts of a path and of the links on it, before it is taken for a loop."""
A = TypeVar("A")
B = TypeVar("B")


class Tree:
    """A directory checkpoint that was opened: its manifest, and where its version lies."""

    def __init__(self, store: Store, version: pointer.Version, manifest: TreeManifest) -> None:
        self.store = store
        self.version = version
        self.manifest = manifest
        self.entries = {entry.path: entry for entry in manifest.entries}
        """Every entry by its path; the root is none."""
        self.folders: dict[str, list[TreeEntry]] = {}
        """What lies directly in each folder that is not empty; "" is the root."""
        for entry in manifest.entries:
            self.folders.setdefault(posixpath.dirname(entry.path), []).append(entry)

    def find(self, path: str) -> TreeEntry:
        """The entry that a path leads to, through the tree's links. Raises NotFoundError."""
        left, at = path.split("/")[::-1], ""
        for _ in range(MAX_STEPS):
            if not left:
                return self.entries[at]
            part = left.pop()
            if part == "..":
                at = posixpath.dirname(at)
                continue
            at = f"{at}/{part}" if at else part
            found = self.entries.get(at)
            if found is None:
                break
            if isinstance(found, TreeLink):
                at = posixpath.dirname(at)
                left += [p for p in found.target.split("/")[::-1] if p not in ("", ".")]
        raise NotFoundError(f"{path} is not in {self.version.folder} in {self.store.url}")

    def file(self, path: str) -> FileSource:
        """Open the file that a path leads to. Raises NotFoundError when it is none."""
        found = self.find(path)
        if not isinstance(found, TreeFile):
            raise NotFoundError(f"{path} in {self.version.folder} in {self.store.url} is a folder")
        return self.source(found)

    def source(self, entry: TreeFile) -> FileSource:
        """Open one of its files. Raises CorruptDataError when what is stored does not fit."""
        label = f"{entry.path} of {self.version.folder} in {self.store.url}"
        if not entry.striped:
            name = f"{self.version.folder}/{entry.object}"
            return SmallSource(self.store, name, entry.size_bytes, entry.digest, label)
        found = pointer.striped_file(self.store, self.version, entry)
        return striped_source(self.store, found, label)


def open_source(store: Store, name: str) -> FileSource:
    """Open a file, striped or plain. Raises UsageError for a folder or a directory checkpoint."""
    opened = open_entry(store, name)
    if isinstance(opened, Tree):
        raise UsageError(
            f"{name} in {store.url} is a directory checkpoint; open it as a tree, or one of its "
            "files"
        )
    return opened


def open_entry(store: Store, name: str) -> FileSource | Tree:
    """Open what a name stands for: a striped file, a directory checkpoint, or a plain object."""
    pointed = pointer.pointed(store, name)
    if isinstance(pointed, Link):
        name = pointer.resolve(store, name)
        pointed = pointer.current(store, name)
    found = None if pointed is None else pointer.load_version(store, name, pointed)
    if found is None:
        return plain_source(store, name)
    version, manifest = found
    if isinstance(manifest, TreeManifest):
        return Tree(store, version, manifest)
    try:
        return file_source(store, version, manifest)
    except CorruptDataError:
        again = pointer.load(store, name)
        if again is None or again[0].folder == version.folder:
            raise
    # The version was replaced and collected between its manifest and its stripes.
    version, manifest = again
    if isinstance(manifest, TreeManifest):
        return Tree(store, version, manifest)
    return file_source(store, version, manifest)


def file_source(store: Store, version: pointer.Version, manifest: Manifest) -> FileSource:
    """Open a striped file whose manifest was read."""
    label = f"{version.folder} in {store.url}"
    return striped_source(store, pointer.StripedObject(version.folder, manifest), label)


def plain_source(store: Store, name: str) -> PlainSource:
    """Open an ordinary object by its stretches. Raises UsageError for a folder."""
    stat = store.stat(name)
    if stat.is_folder:
        raise UsageError(f"{name} in {store.url} is a folder; name a file in it")
    return PlainSource(store, stat, store.locations(name) if stat.size_bytes else [])


def striped_source(store: Store, striped: pointer.StripedObject, label: str) -> StripedSource:
    """Compare every stripe's length with the manifest, and learn where it lies."""
    layout = striped.manifest.layout
    wanted = {striped.part(s): n for s in range(layout.width) if (n := layout.stripe_length(s))}
    found = in_parallel(lambda part: _stretches(store, part, label), list(wanted))
    for (part, length), stretches in zip(wanted.items(), found, strict=True):
        if stretches.length != length:
            raise CorruptDataError(
                f"{part} of {label} has {stretches.length} bytes and the manifest says {length}; "
                "put the checkpoint anew"
            )
    return StripedSource(store, striped, label, dict(zip(wanted, found, strict=True)))


def _stretches(store: Store, part: str, label: str) -> Stretches:
    try:
        return Stretches(store.locations(part))
    except NotFoundError as error:
        raise CorruptDataError(f"{part} of {label} is missing; put the checkpoint anew") from error


def in_parallel(call: Callable[[A], B], items: Sequence[A] | Iterable[A]) -> list[B]:
    """Results in the items' order; the first error met is raised after all calls have ended."""
    listed = list(items)
    if len(listed) < 2:
        return [call(item) for item in listed]
    with ThreadPoolExecutor(min(METADATA_STREAMS, len(listed)), "bootseer-metadata") as pool:
        # Each in a copy of our context, so that a limit of time holds for it, too.
        waiting = [pool.submit(contextvars.copy_context().run, call, item) for item in listed]
        return [future.result() for future in waiting]
