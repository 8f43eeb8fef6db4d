"""Removing and renaming what lies on a store, under the names that users see."""

from __future__ import annotations

import contextlib
import errno
import posixpath

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import AccessDeniedError, BootseerError, BusyError, NotFoundError, UsageError
from bootseer.storage.store import Store
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import Attributes, Link, StoredAttributes
from bootseer.stripedfs.format.pointer import ATTRIBUTES, CURRENT, MANIFEST, checkpoint_folder
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo

MOVED = ".moved"


def remove(store: Store, info: PathInfo, *, recursive: bool = False) -> None:
    """Remove a file, a directory checkpoint, or a folder (with what is in it if `recursive`).

    The pointer of a striped checkpoint is removed first, so that it is not opened any more.
    Raises AccessDeniedError for a part of a directory checkpoint and for the store's root.
    """
    check_whole(store, info)
    if info.version is not None or info.link:
        unpublish(store, info.name)
    if info.version is not None and info.is_folder:
        if info.shares_folder:
            _remove_shared_folder(store, info.name, recursive=recursive)
        return
    if info.is_folder and recursive:
        store.delete_tree(info.name)
    else:
        store.delete(info.name)
    if info.version is None and not info.link:
        with contextlib.suppress(BootseerError):
            store.delete(f"{checkpoint_folder(info.name)}/{ATTRIBUTES}")
            store.delete(checkpoint_folder(info.name))  # fails when it holds a draft


def set_attributes(store: Store, info: PathInfo, attributes: Attributes) -> PathInfo:
    """Store a mode and a time; what is None in `attributes` stays as it is.

    The pointer of a striped file is replaced, as if it were published again. Raises BusyError
    when it was published meanwhile, AccessDeniedError for a directory checkpoint.
    """
    wanted = (info.attributes or Attributes()).update(attributes)
    if info.link:
        info = info._replace(attributes=Attributes(mtime_ns=wanted.mtime_ns))
        make_link(store, info.name, stored_link(info))
        return info
    if info.version is None:
        stored = StoredAttributes(namespace.attribute_stamp(info), wanted)
        store.replace(f"{checkpoint_folder(info.name)}/{ATTRIBUTES}", stored.encode())
        return info._replace(attributes=wanted)
    if info.is_folder:
        raise _part_of_tree_error(store, info.name)
    if pointer.read_current(store, info.name) != info.version:
        raise BusyError(f"{info.name} in {store.url} was just replaced; try again")
    changed = dataclasses.replace(info.version.pointer, attributes=wanted)
    store.replace(f"{checkpoint_folder(info.name)}/{CURRENT}", changed.encode())
    version = dataclasses.replace(info.version, pointer=changed)
    return info._replace(version=version, attributes=wanted)


def _remove_shared_folder(store: Store, name: str, *, recursive: bool) -> None:
    """Remove the plain folder that a removed directory checkpoint shared.

    With other files in it if `recursive`.
    """
    if recursive:
        store.delete_tree(name)
        return
    remove_dcp_files(store, name)
    with contextlib.suppress(BootseerError):
        store.delete(name)  # fails while it holds other files


def remove_dcp_files(store: Store, folder: str) -> None:
    """Remove from a plain folder the files that a version of the directory has replaced."""
    try:
        listed = namespace.list_folder(store, PathInfo(folder, 0, 0.0, True))
    except NotFoundError:
        return
    for each in listed:
        if namespace.is_dcp_file(posixpath.basename(each.name)) and not each.is_folder:
            remove(store, each)


def unpublish(store: Store, name: str) -> None:
    """Remove the striped checkpoint of a name with all its versions; a missing one is no error.

    A draft under the name stays: it will be the next version.
    """
    withdraw(store, name)
    remove_versions(store, name)


def withdraw(store: Store, name: str) -> None:
    """Remove the pointer of a striped checkpoint; a missing one is no error."""
    store.delete(f"{checkpoint_folder(name)}/{CURRENT}")


def remove_versions(store: Store, name: str) -> None:
    """Remove the versions of a checkpoint that was withdrawn."""
    folder = checkpoint_folder(name)
    try:
        listed = list(store.list(folder))
    except NotFoundError:
        return
    for stat in listed:
        store.delete_tree(stat.name)
    with contextlib.suppress(BootseerError):
        store.delete(folder)  # fails when it holds a draft


def move(store: Store, info: PathInfo, new_name: str) -> None:
    """Give a file, directory checkpoint or folder another name, replacing a file that has it.

    Readers of the old name see it whole or not at all. An interrupted move can be repeated. Raises
    BusyError when a folder has the new name, AccessDeniedError as `remove` and `check_new`.
    """
    check_whole(store, info)
    if new_name == info.name:
        return
    check_new(store, new_name)
    if f"{new_name}/".startswith(f"{info.name}/"):
        raise UsageError(f"{info.name} cannot be moved into itself")
    if info.version is None and not info.link:
        store.rename(info.name, new_name)
        if not info.is_folder:
            unpublish(store, new_name)  # it would hide what was moved there
        if info.attributes is not None:
            remove_versions(store, info.name)
            set_attributes(store, namespace.look_up(store, new_name), info.attributes)
        return
    try:
        store.rename(checkpoint_folder(info.name), checkpoint_folder(new_name))
    except BusyError:
        if info.link:
            make_link(store, new_name, stored_link(info))
            unpublish(store, info.name)
            return
        _move_version(store, info, new_name)
    if info.shares_folder and exists(store, info.name):
        store.rename(info.name, new_name)
    if not info.is_folder:
        store.delete(new_name)


def stored_link(info: PathInfo) -> Link:
    """What the pointer of a symbolic link says."""
    assert info.attributes is not None  # as `namespace` makes them
    return Link(info.link, info.attributes.mtime_ns or 0)


def make_link(store: Store, name: str, to: Link) -> None:
    """Make a name a symbolic link, replacing a file or link that has it.

    Readers see what was there before or the link. Raises BusyError when a directory checkpoint
    has the name, UsageError for a target that is too long.
    """
    previous = pointer.read_current(store, name)
    if previous is not None and previous.is_tree:
        raise BusyError(f"{name} in {store.url} is a folder; remove it first")
    store.replace(f"{checkpoint_folder(name)}/{CURRENT}", to.encode())
    with contextlib.suppress(BootseerError):  # it is the link by now: gc finds what is left
        if previous is not None:
            store.delete_tree(previous.folder)
        store.delete(name)  # a plain object that the link hides


def _move_version(store: Store, info: PathInfo, new_name: str) -> None:
    """Move a version to a name that is striped, too: one write replaces its pointer.

    Between the two steps no pointer names the version where it lies: a mark keeps it from
    collectors, even if this process is killed there.
    """
    version = info.version
    assert version is not None
    current = pointer.read_current(store, new_name)
    if current is not None and current.is_tree != version.is_tree:
        raise BusyError(
            f"{new_name} in {store.url} is a {'folder' if current.is_tree else 'file'}; "
            "remove it first"
        )
    folder = checkpoint_folder(new_name)
    moved = f"{folder}/{version.pointer.version}"
    store.replace(mark_name(moved), version.pointer.encode())
    try:
        store.rename(version.folder, moved)
    except NotFoundError:
        store.stat(f"{moved}/{MANIFEST}")  # an interrupted move renamed it
    store.replace(f"{folder}/{CURRENT}", version.pointer.encode())
    store.delete(mark_name(moved))
    unpublish(store, info.name)
    if current is not None and current.folder != moved:
        store.delete_tree(current.folder)


def mark_name(version: str) -> str:
    """The object that says that a version was moved to its folder and is not pointed to yet."""
    return f"{version}{MOVED}"


def list_held(store: Store, folder: str) -> list[str]:
    """Names of all that keeps a folder from being removed, visible to users or not."""
    try:
        return [stat.name for stat in (*store.list(folder), *store.temporaries(folder))]
    except NotFoundError:
        return []


def check_unreserved(name: str) -> None:
    """Raise OSError(EINVAL) where a part of a name is reserved for stripes or unfinished files."""
    for part in name.split("/"):
        if namespace.is_reserved(part):
            text = f"{part!r} is a name of stripes or of unfinished files; choose another"
            raise OSError(errno.EINVAL, text, name)


def check_new(store: Store, name: str) -> None:
    """Raise the error that keeps a new file or folder from having a name.

    As `check_unreserved`; AccessDeniedError within a directory checkpoint, NotADirectoryError
    below a file (striped or plain).
    """
    check_unreserved(name)
    checked = False
    parent = posixpath.dirname(name)
    while parent:
        version = pointer.read_pointer(store, parent)
        if isinstance(version, Link):
            text = f"{parent} in {store.url} is a link; name what it leads to"
            raise NotADirectoryError(errno.ENOTDIR, text, name)
        if version is not None and version.is_tree:
            below = name[len(parent) + 1 :].partition("/")[0]
            if not version.pointer.shares_folder or namespace.is_dcp_file(below):
                raise _part_of_tree_error(store, name)
            return
        if version is not None:
            raise _below_file_error(store, name, parent)
        if not checked:  # if the nearest one that exists is a folder, so are all above it
            try:
                if not store.stat(parent).is_folder:
                    raise _below_file_error(store, name, parent)
                checked = True
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


def check_whole(store: Store, info: PathInfo) -> None:
    """Raise AccessDeniedError for a part of a directory checkpoint, and for the store's root."""
    if info.tree is not None and info.entry is not None:
        raise _part_of_tree_error(store, info.name)
    if not info.name:
        raise AccessDeniedError(f"the root of {store.url} stays; name what lies in it")


def _below_file_error(store: Store, name: str, parent: str) -> NotADirectoryError:
    text = f"{parent} in {store.url} is a file, and nothing can lie below it"
    return NotADirectoryError(errno.ENOTDIR, text, name)


def _part_of_tree_error(store: Store, name: str) -> AccessDeniedError:
    return AccessDeniedError(
        f"{name} is part of a directory checkpoint in {store.url}, which never changes; put the "
        "directory anew"
    )
