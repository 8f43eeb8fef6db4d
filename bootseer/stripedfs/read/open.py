"""From a URL, or a name on a store, to what can be read: a file's source, or a tree of files.

A striped checkpoint is found by its pointer; where there is none, the plain object of that name
is read as it is. A striped file's manifest is compared with what the store holds before the first
byte is read (see `sources.open_stripes`).
"""

from __future__ import annotations

import contextlib

from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, UsageError
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store
from bootseer.storage.urls import split_object
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import Link, Manifest, TreeManifest
from bootseer.stripedfs.format.pointer import Version
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo
from bootseer.stripedfs.read.sources import FileSource, open_plain_file, open_striped_file
from bootseer.stripedfs.read.tree import Tree

MOST_VERSIONS = 4
"""Versions that are tried of one name, where each replaced the one before while it was opened."""


def locate(url: str, options: StoreOptions | None = None) -> tuple[Store, PathInfo]:
    """What a URL stands for, and the store it is in, which the caller closes.

    A directory checkpoint above the URL's folder may hold it. Raises NotFoundError.
    """
    try:
        folder, name = split_object(url)
    except UsageError:
        store = open_store(url, options)  # the root of a store has no name
        return store, namespace.look_up(store, "")
    missing: NotFoundError | None = None
    if namespace.is_dcp_file(name):  # its folder's pointer says whether it is a file of its own
        with contextlib.suppress(UsageError):
            above, part = split_object(folder)
            if part not in (".", ".."):
                folder, name = above, f"{part}/{name}"
    while True:
        store = open_store(folder, options)
        try:
            return store, namespace.look_up(store, name)
        except NotFoundError as error:
            missing = missing or error
            store.close()
        except BaseException:  # the caller has no store to close
            store.close()
            raise
        try:
            folder, part = split_object(folder)
        except UsageError:
            raise missing from None
        if part in (".", ".."):
            raise missing
        name = f"{part}/{name}"


def open_any(store: Store, name: str) -> FileSource | Tree:
    """Open what a name stands for: a striped file, a directory checkpoint, or a plain object."""
    version = pointer.read_pointer(store, name)
    if isinstance(version, Link):
        name = pointer.follow_links(store, name)
        version = pointer.read_current(store, name)
    return open_plain_file(store, name) if version is None else _open_version(store, name, version)


def open_file(store: Store, info: PathInfo) -> FileSource:
    """Open a file that was looked up or listed. Raises UsageError for a folder."""
    if info.tree is not None:
        return info.tree.file("" if info.entry is None else info.entry.path)
    if info.version is None:
        return open_plain_file(store, info.name)
    return _check_file(store, info.name, _open_version(store, info.name, info.version))


def is_source_of(info: PathInfo, source: FileSource) -> bool:
    """Whether a source gives the bytes that were listed, and not those of a later version."""
    if info.version is not None and info.tree is None:
        return source.key.endswith(f"/{info.version.folder}")
    return source.size_bytes == info.size_bytes


def _open_version(store: Store, name: str, version: Version) -> FileSource | Tree:
    """Open a version, or the one that replaced it if it was collected meanwhile."""
    tries = 0
    while True:
        tries += 1
        manifest: Manifest | TreeManifest | None = None
        try:
            manifest = pointer.read_manifest(store, version)
            if isinstance(manifest, TreeManifest):
                return Tree(store, version, manifest)
            return open_striped_file(store, version, manifest)
        except (NotFoundError, CorruptDataError) as error:
            damaged = manifest is None and isinstance(error, CorruptDataError)
            newer = _read_newer(store, name, damaged=damaged)
            if newer is None:
                raise
            if newer.folder == version.folder:
                if isinstance(error, NotFoundError):
                    raise pointer.lost_version_error(store, version) from error
                raise
            if tries == MOST_VERSIONS:
                raise
        version = newer


def _read_newer(store: Store, name: str, *, damaged: bool) -> Version | None:
    """The current version; None also where it cannot be read after a `damaged` manifest."""
    try:
        return pointer.read_current(store, name)
    except BootseerError:
        if damaged:  # which is what the caller reports
            return None
        raise


def _check_file(store: Store, name: str, opened: FileSource | Tree) -> FileSource:
    if isinstance(opened, Tree):
        raise UsageError(
            f"{name} in {store.url} is a directory checkpoint; open it as a tree, or one of its "
            "files"
        )
    return opened
