"""Removing and renaming what lies on a store, under the names that its users see."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import posixpath

from bootseer.errors import AccessDeniedError, BootseerError, BusyError, NotFoundError, UsageError
from bootseer.storage.store import Store
from bootseer.stripedfs.format import pointer as versions
from bootseer.stripedfs.format.manifest import Attributes, Link, StoredAttributes
from bootseer.stripedfs.format.pointer import ATTRIBUTES, CURRENT, MANIFEST, checkpoint_folder
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo

MOVED = ".moved"


def remove(store: Store, found: PathInfo, *, recursive: bool = False) -> None:
    """Remove a file, a directory checkpoint, or a folder (with what is in it if `recursive`).

    A striped checkpoint loses its pointer first, so that nobody begins to read what is going.
    Raises AccessDeniedError for a part of a directory checkpoint and for the store's root.
    """
    check_whole(store, found)
    if found.version is not None or found.link:
        unpublish(store, found.name)
    if found.version is not None and found.is_folder:
        if found.shares_folder:
            _remove_beside(store, found.name, recursive=recursive)
        return
    if found.is_folder and recursive:
        store.delete_tree(found.name)
    else:
        store.delete(found.name)
    if found.version is None and not found.link:
        with contextlib.suppress(BootseerError):
            store.delete(f"{checkpoint_folder(found.name)}/{ATTRIBUTES}")
            store.delete(checkpoint_folder(found.name))  # not when it holds a draft


def set_attributes(store: Store, found: PathInfo, attributes: Attributes) -> PathInfo:
    """Keep a mode and a time; what of `attributes` is None stays as it is.

    Of a striped file its pointer is replaced, as if it were published again. Raises BusyError
    when it was published meanwhile, AccessDeniedError for a directory checkpoint.
    """
    wanted = (found.attributes or Attributes()).updated(attributes)
    if found.link:
        changed = found._replace(attributes=Attributes(mtime_ns=wanted.mtime_ns))
        link(store, found.name, link_of(changed))
        return changed
    if found.version is None:
        kept = StoredAttributes(namespace.attribute_stamp(found), wanted)
        store.replace(f"{checkpoint_folder(found.name)}/{ATTRIBUTES}", kept.encode())
        return found._replace(attributes=wanted)
    if found.is_folder:
        raise _part_of_tree(store, found.name)
    if versions.read_current(store, found.name) != found.version:
        raise BusyError(f"{found.name} in {store.url} was just replaced; try again")
    pointer = dataclasses.replace(found.version.pointer, attributes=wanted)
    store.replace(f"{checkpoint_folder(found.name)}/{CURRENT}", pointer.encode())
    version = dataclasses.replace(found.version, pointer=pointer)
    return found._replace(version=version, attributes=wanted)


def _remove_beside(store: Store, name: str, *, recursive: bool) -> None:
    """The plain folder of a directory that was removed; with other files in it if `recursive`."""
    if recursive:
        store.delete_tree(name)
        return
    remove_members(store, name)
    with contextlib.suppress(BootseerError):
        store.delete(name)  # not while there are others


def remove_members(store: Store, folder: str) -> None:
    """Remove from a plain folder the files that its directory's version has taken the place of."""
    try:
        listed = namespace.list_folder(store, PathInfo(folder, 0, 0.0, True))
    except NotFoundError:
        return
    for each in listed:
        if namespace.is_dcp_file(posixpath.basename(each.name)) and not each.is_folder:
            remove(store, each)


def unpublish(store: Store, name: str) -> None:
    """Remove the striped checkpoint of a name with all its versions; a missing one is no error.

    What somebody is writing under the name just now stays: it will be the next version.
    """
    withdraw(store, name)
    remove_versions(store, name)


def withdraw(store: Store, name: str) -> None:
    """Let a name stand for no striped checkpoint any more; a missing one is no error."""
    store.delete(f"{checkpoint_folder(name)}/{CURRENT}")


def remove_versions(store: Store, name: str) -> None:
    """Remove what lies on the store of a checkpoint that was withdrawn."""
    folder = checkpoint_folder(name)
    try:
        found = list(store.list(folder))
    except NotFoundError:
        return
    for stat in found:
        store.delete_tree(stat.name)
    with contextlib.suppress(BootseerError):
        store.delete(folder)  # not when it holds a draft


def move(store: Store, found: PathInfo, new_name: str) -> None:
    """Give a file, directory checkpoint or folder another name, over a file that has it.

    Who reads the old name sees it whole or not at all. One that was cut short can be repeated.
    Raises BusyError when a folder has the new name, AccessDeniedError as `remove` and `check_new`.
    """
    check_whole(store, found)
    if new_name == found.name:
        return
    check_new(store, new_name)
    if f"{new_name}/".startswith(f"{found.name}/"):
        raise UsageError(f"{found.name} cannot be moved into itself")
    if found.version is None and not found.link:
        store.rename(found.name, new_name)
        if not found.is_folder:
            unpublish(store, new_name)  # it would hide what was moved there
        if found.attributes is not None:
            remove_versions(store, found.name)
            set_attributes(store, namespace.look_up(store, new_name), found.attributes)
        return
    try:
        store.rename(checkpoint_folder(found.name), checkpoint_folder(new_name))
    except BusyError:
        if found.link:
            link(store, new_name, link_of(found))
            unpublish(store, found.name)
            return
        _move_version(store, found, new_name)
    if found.shares_folder and exists(store, found.name):
        store.rename(found.name, new_name)
    if not found.is_folder:
        store.delete(new_name)


def link_of(found: PathInfo) -> Link:
    """What the pointer of a link says that was found."""
    assert found.attributes is not None  # as `names` makes them
    return Link(found.link, found.attributes.mtime_ns or 0)


def link(store: Store, name: str, to: Link) -> None:
    """Make a name a symbolic link, over a file or link that has it.

    Readers see what was there before or the link. Raises BusyError when a directory checkpoint
    has the name, UsageError for a target that is too long.
    """
    before = versions.read_current(store, name)
    if before is not None and before.is_tree:
        raise BusyError(f"{name} in {store.url} is a folder; remove it first")
    store.replace(f"{checkpoint_folder(name)}/{CURRENT}", to.encode())
    with contextlib.suppress(BootseerError):  # it is the link by now: gc finds what is left
        if before is not None:
            store.delete_tree(before.folder)
        store.delete(name)  # a plain object that the link hides


def _move_version(store: Store, found: PathInfo, new_name: str) -> None:
    """The new name is striped too: its pointer goes from its own version to ours at once.

    Between the two steps no pointer names ours where it lies: a mark keeps it from collectors,
    also when we end there.
    """
    version = found.version
    assert version is not None
    current = versions.read_current(store, new_name)
    if current is not None and current.is_tree != version.is_tree:
        raise BusyError(
            f"{new_name} in {store.url} is a {'folder' if current.is_tree else 'file'}; "
            "remove it first"
        )
    folder = checkpoint_folder(new_name)
    moved = f"{folder}/{version.pointer.version}"
    store.replace(mark_of(moved), version.pointer.encode())
    try:
        store.rename(version.folder, moved)
    except NotFoundError:
        store.stat(f"{moved}/{MANIFEST}")  # by one before us that was cut short
    store.replace(f"{folder}/{CURRENT}", version.pointer.encode())
    store.delete(mark_of(moved))
    unpublish(store, found.name)
    if current is not None and current.folder != moved:
        store.delete_tree(current.folder)


def mark_of(version: str) -> str:
    """Says that a version was moved into its folder by somebody who has yet to point to it."""
    return f"{version}{MOVED}"


def held(store: Store, folder: str) -> list[str]:
    """Names of all that keeps a folder from being removed, shown to users or not."""
    try:
        return [stat.name for stat in (*store.list(folder), *store.temporaries(folder))]
    except NotFoundError:
        return []


def check_unreserved(name: str) -> None:
    """Raise OSError(EINVAL) where a part of a name is one of stripes or of unfinished files."""
    for part in name.split("/"):
        if namespace.is_reserved(part):
            text = f"{part!r} is a name of stripes or of unfinished files; choose another"
            raise OSError(errno.EINVAL, text, name)


def check_new(store: Store, name: str) -> None:
    """Raise what keeps a new file or folder from having a name.

    As `check_unreserved`; AccessDeniedError within a directory checkpoint, NotADirectoryError
    below a file (striped or plain).
    """
    check_unreserved(name)
    asked = False
    parent = posixpath.dirname(name)
    while parent:
        version = versions.read_pointer(store, parent)
        if isinstance(version, Link):
            text = f"{parent} in {store.url} is a link; name what it leads to"
            raise NotADirectoryError(errno.ENOTDIR, text, name)
        if version is not None and version.is_tree:
            below = name[len(parent) + 1 :].partition("/")[0]
            if not version.pointer.shares_folder or namespace.is_dcp_file(below):
                raise _part_of_tree(store, name)
            return
        if version is not None:
            raise _below_file(store, name, parent)
        if not asked:  # the nearest one that is there tells of all above it
            try:
                if not store.stat(parent).is_folder:
                    raise _below_file(store, name, parent)
                asked = True
            except NotFoundError:
                pass
        parent = posixpath.dirname(parent)


def exists(store: Store, name: str) -> bool:
    """Whether a plain object or folder has this name."""
    try:
        store.stat(name)
    except NotFoundError:
        return False
    return True


def check_whole(store: Store, found: PathInfo) -> None:
    """Raise AccessDeniedError for a part of a directory checkpoint, and for the store's root."""
    if found.tree is not None and found.entry is not None:
        raise _part_of_tree(store, found.name)
    if not found.name:
        raise AccessDeniedError(f"the root of {store.url} stays; name what lies in it")


def _below_file(store: Store, name: str, parent: str) -> NotADirectoryError:
    text = f"{parent} in {store.url} is a file, and nothing can lie below it"
    return NotADirectoryError(errno.ENOTDIR, text, name)


def _part_of_tree(store: Store, name: str) -> AccessDeniedError:
    return AccessDeniedError(
        f"{name} is part of a directory checkpoint in {store.url}, which never changes; put the "
        "directory anew"
    )
