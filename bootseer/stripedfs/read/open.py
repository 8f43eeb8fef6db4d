"""From a URL, or a name on a store, to what can be read: a file's source, or a tree of files.

A striped checkpoint is found by its pointer; where there is none, the plain object of that name
is read as it is. A striped file's manifest is compared with what the store holds before the first
byte is read (see `sources.striped_source`).
"""

from __future__ import annotations

import contextlib

from bootseer.errors import CorruptDataError, NotFoundError, UsageError
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store, open_store
from bootseer.storage.urls import split_object
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import Link, TreeManifest
from bootseer.stripedfs.format.pointer import Version
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import Found
from bootseer.stripedfs.read.sources import FileSource, file_source, plain_source
from bootseer.stripedfs.read.tree import Tree


def locate(url: str, options: StoreOptions | None = None) -> tuple[Store, Found]:
    """What a URL stands for, and the store it was found in, which the caller closes.

    Looks above the URL's folder for a directory checkpoint that holds it. Raises NotFoundError.
    """
    try:
        folder, name = split_object(url)
    except UsageError:
        store = open_store(url, options)  # the root of a store has no name
        return store, namespace.look(store, "")
    first: NotFoundError | None = None
    if namespace.is_member(name):  # whether it is a file of its own only its folder's pointer says
        with contextlib.suppress(UsageError):
            above, part = split_object(folder)
            if part not in (".", ".."):
                folder, name = above, f"{part}/{name}"
    while True:
        store = open_store(folder, options)
        try:
            return store, namespace.look(store, name)
        except NotFoundError as error:
            first = first or error
            store.close()
        except BaseException:  # who asked never had it to close
            store.close()
            raise
        try:
            folder, part = split_object(folder)
        except UsageError:
            raise first from None
        if part in (".", ".."):
            raise first
        name = f"{part}/{name}"


def open_source(store: Store, name: str) -> FileSource:
    """Open a file by its name. Raises UsageError for a folder or a directory checkpoint."""
    return _check_file(store, name, open_any(store, name))


def open_any(store: Store, name: str) -> FileSource | Tree:
    """Open what a name stands for: a striped file, a directory checkpoint, or a plain object."""
    version = pointer.pointed(store, name)
    if isinstance(version, Link):
        name = pointer.resolve(store, name)
        version = pointer.current(store, name)
    return plain_source(store, name) if version is None else _open_version(store, name, version)


def open_file(store: Store, found: Found) -> FileSource:
    """Open a file that was looked up or listed. Raises UsageError for a folder."""
    if found.tree is not None:
        return found.tree.file("" if found.entry is None else found.entry.path)
    if found.version is None:
        return plain_source(store, found.name)
    return _check_file(store, found.name, _open_version(store, found.name, found.version))


def is_source_of(found: Found, source: FileSource) -> bool:
    """Whether a source gives the bytes that were listed, and not those of a later version."""
    if found.version is not None and found.tree is None:
        return source.key.endswith(f"/{found.version.folder}")
    return source.size_bytes == found.size_bytes


def _open_version(store: Store, name: str, version: Version) -> FileSource | Tree:
    """Open a version, or the one that replaced it if it was collected meanwhile."""
    try:
        manifest = pointer.manifest_of(store, version)
        if isinstance(manifest, TreeManifest):
            return Tree(store, version, manifest)
        return file_source(store, version, manifest)
    except (NotFoundError, CorruptDataError) as error:
        newer = pointer.current(store, name)
        if newer is None:
            raise
        if newer.folder == version.folder:
            if isinstance(error, NotFoundError):
                raise pointer.gone(store, version) from error
            raise
    return _open_version(store, name, newer)


def _check_file(store: Store, name: str, opened: FileSource | Tree) -> FileSource:
    if isinstance(opened, Tree):
        raise UsageError(
            f"{name} in {store.url} is a directory checkpoint; open it as a tree, or one of its "
            "files"
        )
    return opened
