"""Removing and renaming what lies on a store, under the names that its users see."""

from __future__ import annotations

import contextlib
import posixpath

from bootseer.errors import AccessDeniedError, BootseerError, BusyError, NotFoundError, UsageError
from bootseer.storage.base import Store
from bootseer.stripedfs import versions
from bootseer.stripedfs.names import Found
from bootseer.stripedfs.versions import CURRENT, folder_of


def remove(store: Store, found: Found, *, recursive: bool = False) -> None:
    """Remove a file, a directory checkpoint, or a folder (with what is in it if `recursive`).

    A striped checkpoint loses its pointer first, so that nobody begins to read what is going.
    Raises AccessDeniedError for a part of a directory checkpoint and for the store's root.
    """
    check_whole(store, found)
    if found.version is not None:
        unpublish(store, found.name)
    if found.version is not None and found.is_folder:
        return
    if found.is_folder and recursive:
        store.delete_tree(found.name)
    else:
        store.delete(found.name)


def unpublish(store: Store, name: str) -> None:
    """Remove the striped checkpoint of a name with all its versions; a missing one is no error.

    What somebody is writing under the name just now stays: it will be the next version.
    """
    folder = folder_of(name)
    store.delete(f"{folder}/{CURRENT}")
    try:
        found = list(store.list(folder))
    except NotFoundError:
        return
    for stat in found:
        store.delete_tree(stat.name)
    with contextlib.suppress(BootseerError):
        store.delete(folder)  # not when it holds a draft


def move(store: Store, found: Found, new_name: str) -> None:
    """Give a file, directory checkpoint or folder another name, over a file that has it.

    Who reads the old name sees it whole or not at all. Raises BusyError when a folder has the
    new name, AccessDeniedError as `remove`.
    """
    check_whole(store, found)
    if new_name == found.name:
        return
    if f"{new_name}/".startswith(f"{found.name}/"):
        raise UsageError(f"{found.name} cannot be moved into itself")
    if found.version is None:
        store.rename(found.name, new_name)
        if not found.is_folder:
            unpublish(store, new_name)  # it would hide what was moved there
        return
    try:
        store.rename(folder_of(found.name), folder_of(new_name))
    except BusyError:
        _move_version(store, found, new_name)
    if not found.is_folder:
        store.delete(new_name)


def _move_version(store: Store, found: Found, new_name: str) -> None:
    """The new name is striped too: its pointer goes from its own version to ours at once."""
    version = found.version
    assert version is not None
    current = versions.current(store, new_name)
    if current is not None and current.is_tree != version.is_tree:
        raise BusyError(
            f"{new_name} in {store.url} is a {'folder' if current.is_tree else 'file'}; "
            "remove it first"
        )
    folder = folder_of(new_name)
    store.rename(version.folder, f"{folder}/{version.pointer.version}")
    store.replace(f"{folder}/{CURRENT}", version.pointer.encode())
    unpublish(store, found.name)
    if current is not None:
        store.delete_tree(current.folder)


def check_new(store: Store, name: str) -> None:
    """Raise AccessDeniedError when a new name would lie within a directory checkpoint."""
    parent = posixpath.dirname(name)
    while parent:
        version = versions.current(store, parent)
        if version is not None and version.is_tree:
            raise _part_of_tree(store, name)
        parent = posixpath.dirname(parent)


def exists(store: Store, name: str) -> bool:
    """Whether a plain object or folder has this name."""
    try:
        store.stat(name)
    except NotFoundError:
        return False
    return True


def check_whole(store: Store, found: Found) -> None:
    """Raise AccessDeniedError for a part of a directory checkpoint, and for the store's root."""
    if found.tree is not None and found.entry is not None:
        raise _part_of_tree(store, found.name)
    if not found.name:
        raise AccessDeniedError(f"the root of {store.url} stays; name what lies in it")


def _part_of_tree(store: Store, name: str) -> AccessDeniedError:
    return AccessDeniedError(
        f"{name} is part of a directory checkpoint in {store.url}, which never changes; put the "
        "directory anew"
    )
