"""A directory checkpoint that was opened: its entries by path, and its files as sources."""

from __future__ import annotations

import posixpath

from bootseer.errors import NotFoundError
from bootseer.storage.store import Store
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import TreeEntry, TreeFile, TreeLink, TreeManifest
from bootseer.stripedfs.read.sources import FileSource, SmallSource, open_stripes

MAX_STEPS = 4096
"""Parts of a path and of the links on it, before it is taken for a loop."""


class Tree:
    """A directory checkpoint that was opened: its manifest, and where its version lies."""

    def __init__(self, store: Store, version: pointer.Version, manifest: TreeManifest) -> None:
        self.store = store
        self.version = version
        self.manifest = manifest
        self.entries = {entry.path: entry for entry in manifest.entries}
        """Every entry by its path; the root is not among them."""
        self.folders: dict[str, list[TreeEntry]] = {}
        """What lies directly in each folder that is not empty; "" is the root."""
        for entry in manifest.entries:
            self.folders.setdefault(posixpath.dirname(entry.path), []).append(entry)

    def find(self, path: str) -> TreeEntry:
        """The entry that a path leads to, through the tree's links. Raises NotFoundError."""
        parts, at = path.split("/")[::-1], ""
        for _ in range(MAX_STEPS):
            if not parts:
                return self.entries[at]
            part = parts.pop()
            if part == "..":
                at = posixpath.dirname(at)
                continue
            at = f"{at}/{part}" if at else part
            entry = self.entries.get(at)
            if entry is None:
                break
            if isinstance(entry, TreeLink):
                at = posixpath.dirname(at)
                parts += [p for p in entry.target.split("/")[::-1] if p not in ("", ".")]
        raise NotFoundError(f"{path} is not in {self.version.folder} in {self.store.url}")

    def file(self, path: str) -> FileSource:
        """Open the file that a path leads to. Raises NotFoundError for a folder."""
        entry = self.find(path)
        if not isinstance(entry, TreeFile):
            raise NotFoundError(f"{path} in {self.version.folder} in {self.store.url} is a folder")
        return self.source(entry)

    def source(self, entry: TreeFile) -> FileSource:
        """Open one of its files. Raises CorruptDataError when what is stored does not fit."""
        label = f"{entry.path} of {self.version.folder} in {self.store.url}"
        if not entry.striped:
            name = f"{self.version.folder}/{entry.object}"
            return SmallSource(self.store, name, entry.size_bytes, entry.digest, label)
        striped = pointer.read_striped_file(self.store, self.version, entry)
        return open_stripes(self.store, striped, label)
