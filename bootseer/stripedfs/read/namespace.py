"""A store's folders as users see them: each striped checkpoint under its own name.

`ckpt.pt.stripes/` with a current version appears as the file `ckpt.pt`, or as the folder `ckpt`
for a directory checkpoint, and hides a plain object of the same name. What lies within a directory
checkpoint is listed in its manifest. Folders of checkpoints that were never published do not
appear.
"""

from __future__ import annotations

import contextlib
import datetime
import posixpath
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootseer.errors import BootseerError, NotFoundError
from bootseer.storage.store import TEMPORARY, Stat, Store
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import (
    Attributes,
    Link,
    StoredAttributes,
    TreeEntry,
    TreeFile,
    TreeFolder,
    TreeLink,
    TreeManifest,
)
from bootseer.stripedfs.format.pointer import SUFFIX, CachedPointer, Version
from bootseer.stripedfs.read.tree import Tree
from bootseer.stripedfs.workers import call_in_parallel

ROOT = Stat("", 0, 0.0, True)
DCP_METADATA = ".metadata"
DCP_SHARD = re.compile(r"__\d+_\d+\.distcp\Z")


class PathInfo(NamedTuple):
    """One file, folder or link; `name` is the user's, without any suffix of ours.

    `version` is set for a striped file and for the root of a directory checkpoint; `tree` and
    `entry` for what lies within one; `stamp` is the store's version of a plain file's bytes.
    `problem`: why nothing but the name is known, as of a checkpoint whose pointer is damaged.
    `link`: the target of a symbolic link that lies in a folder of the store. `attributes`: the
    mode and time that were set; for plain files and folders in listings only (`list_folder`).
    """

    name: str
    size_bytes: int
    mtime_s: float
    is_folder: bool
    version: Version | None = None
    tree: Tree | None = None
    entry: TreeEntry | None = None
    stamp: str = ""
    problem: BootseerError | None = None
    link: str = ""
    attributes: Attributes | None = None

    @property
    def etag(self) -> str:
        """Changes when the bytes may have; "" for folders and where the store has no versions."""
        if isinstance(self.entry, TreeFile):
            return f"{self.entry.digest.hex()}-{self.size_bytes}"
        return self.stamp if self.version is None else self.version.pointer.version

    @property
    def shares_folder(self) -> bool:
        """Whether it is a directory checkpoint with more files in the plain folder of its name."""
        return (
            self.version is not None and self.entry is None and self.version.pointer.shares_folder
        )

    @property
    def striped(self) -> bool:
        """Whether the bytes are striped."""
        if self.tree is not None:
            return isinstance(self.entry, TreeFile) and self.entry.striped
        return self.version is not None and not self.is_folder


def look_up(store: Store, name: str, *, follow: bool = True) -> PathInfo:
    """What a name stands for: a symbolic link for what it leads to, unless `follow` is False.

    Links on the way to the name are followed. Raises NotFoundError when it stands for nothing.
    """
    return _look_up(store, name, follow, pointer.MOST_LINKS)


def _look_up(store: Store, name: str, follow: bool, most_links: int) -> PathInfo:
    if not name:
        return _plain_info(ROOT)
    literal, name = name, name.removesuffix(SUFFIX)
    if not pointer.is_checkpoint_name(literal):  # may be a folder still
        return _plain_info(store.stat(literal))
    if "/" in name and is_dcp_file(posixpath.basename(name)):
        folder = pointer.read_pointer(store, posixpath.dirname(name))
        if isinstance(folder, Version) and folder.pointer.shares_folder:
            # What an earlier save left in the plain folder is not part of the checkpoint any more.
            info = find_in_tree(store, name, follow=follow, most_links=most_links)
            assert info is not None  # as its pointer said
            return info
    version = pointer.read_pointer(store, name)
    if isinstance(version, Link) and follow:
        target = pointer.resolve_target(store, name, version)
        return _follow(store, name, target, follow, most_links)
    if version is not None:
        return _pointer_info(name, version)
    if literal != name:
        try:
            return _plain_file_info(store, literal)
        except NotFoundError:
            pass
    try:
        return _plain_info(store.stat(name))
    except NotFoundError:
        info = find_in_tree(store, literal, follow=follow, most_links=most_links)
        if info is None:
            raise
        return info


def _follow(store: Store, link: str, target: str, follow: bool, most_links: int) -> PathInfo:
    """What a link leads to."""
    if not most_links:
        raise pointer.circular_link_error(store, link)
    return _look_up(store, "" if target == "." else target, follow, most_links - 1)


def list_folder(
    store: Store, folder: PathInfo, cache: dict[str, CachedPointer] | None = None
) -> list[PathInfo]:
    """What lies directly in a folder, by name.

    `cache` is filled with the pointers that were read, and saves reading them in the next call. A
    checkpoint that cannot be read is listed with its `problem`. Raises what keeps the whole folder
    from being listed: its own error, or a store that became unreachable before any pointer was
    read.
    """
    if folder.tree is None and folder.version is None:
        return _list_plain_folder(store, folder.name, {} if cache is None else cache)
    tree = load_tree(store, folder).tree
    assert tree is not None
    top = "" if folder.entry is None else folder.entry.path
    entries = tree.folders.get(top, ())
    named = ((f"{folder.name}/{posixpath.basename(e.path)}", e) for e in entries)
    infos = [_entry_info(tree, name, e) for name, e in named]
    if not folder.shares_folder:
        return infos
    names = {each.name for each in infos}
    others = _list_shared_folder(store, folder.name, {} if cache is None else cache)
    infos += (each for each in others if each.name not in names)
    return sorted(infos, key=lambda each: each.name)


def _list_plain_folder(
    store: Store, folder: str, cache: dict[str, CachedPointer]
) -> list[PathInfo]:
    infos: dict[str, PathInfo] = {}
    striped: list[tuple[str, float]] = []
    for stat in _list_store(store, folder):
        if stat.is_folder and stat.name.endswith(SUFFIX) and pointer.is_checkpoint_name(stat.name):
            striped.append((stat.name.removesuffix(SUFFIX), stat.mtime_s))
        else:
            infos[stat.name] = _plain_info(stat)

    def read(checkpoint: tuple[str, float]) -> CachedPointer | BootseerError | None:
        name, mtime_s = checkpoint
        try:
            return pointer.read_if_changed(store, name, mtime_s, cache.get(name))
        except BootseerError as error:  # of this checkpoint alone
            return error

    pointers = call_in_parallel(read, striped)
    faults = [each for each in pointers if isinstance(each, BootseerError) and each.retryable]
    if faults and len(faults) == len(pointers):
        raise faults[0]
    cache.clear()
    for (name, mtime_s), each in zip(striped, pointers, strict=True):
        if isinstance(each, CachedPointer):
            cache[name] = each
            if not isinstance(each.content, StoredAttributes):
                infos[name] = _pointer_info(name, each.content)
            elif name in infos:
                infos[name] = _apply_attributes(infos[name], each.content)
        elif each is not None:
            infos[name] = PathInfo(name, 0, mtime_s, False, problem=each)
    return [infos[name] for name in sorted(infos)]


def _list_shared_folder(
    store: Store, folder: str, cache: dict[str, CachedPointer]
) -> list[PathInfo]:
    """Files in the plain folder of a directory checkpoint that are not part of its version."""
    try:
        infos = _list_plain_folder(store, folder, cache)
    except NotFoundError:
        return []
    return [each for each in infos if not is_dcp_file(posixpath.basename(each.name))]


def _list_store(store: Store, folder: str) -> Iterator[Stat]:
    """What a store lists, and files of users whose names begin with a dot (DCP's `.metadata`)."""
    yield from store.list(folder)
    for stat in store.temporaries(folder):
        if not is_temporary(stat.name.rpartition("/")[2]):
            yield stat


def attribute_stamp(info: PathInfo) -> str:
    """Identifies the plain file that attributes are set for; a rename keeps it. "" for a folder.

    A folder has none, as changing a file in it changes the folder's time.
    """
    return "" if info.is_folder else f"{info.size_bytes}-{info.mtime_s!r}"


def _apply_attributes(info: PathInfo, stored: StoredAttributes) -> PathInfo:
    """Add attributes to a plain file or folder, if they were set for what is there now."""
    fits = stored.stamp == attribute_stamp(info)
    return info._replace(attributes=stored.attributes) if fits else info


def is_dcp_file(base: str) -> bool:
    """Whether a file of this name is part of a distributed checkpoint of torch, which is one whole.

    The names are those of torch/distributed/checkpoint/filesystem.py in torch 2.13.
    """
    return base == DCP_METADATA or bool(DCP_SHARD.match(base))


def is_temporary(base: str) -> bool:
    """Whether a store (or NFS) uses this name for itself."""
    return base.startswith((TEMPORARY, ".nfs"))


def is_reserved(base: str) -> bool:
    """Whether users' files may not have this name: folders of stripes and temporaries have it."""
    return base.endswith(SUFFIX) or is_temporary(base)


def is_dangling(info: PathInfo) -> bool:
    """Whether it is a link within a directory checkpoint to what is not in it."""
    if info.tree is None or not isinstance(info.entry, TreeLink):
        return False
    try:
        info.tree.find(info.entry.path)
    except NotFoundError:
        return True
    return False


def load_tree(store: Store, info: PathInfo) -> PathInfo:
    """The info of a directory checkpoint with its manifest, which is read unless it was."""
    if info.tree is not None:
        return info
    loaded = pointer.load_current(store, info.name)
    if loaded is None or not isinstance(loaded[1], TreeManifest):
        raise NotFoundError(f"{info.name} in {store.url} was removed or replaced meanwhile")
    return info._replace(tree=Tree(store, loaded[0], loaded[1]))


def _plain_info(stat: Stat) -> PathInfo:
    return PathInfo(stat.name, stat.size_bytes, stat.mtime_s, stat.is_folder, stamp=stat.version)


def _plain_file_info(store: Store, name: str) -> PathInfo:
    """A file whose own name ends in our suffix."""
    stat = store.stat(name)
    if stat.is_folder:
        raise NotFoundError(f"{name} in {store.url} was never published")
    return _plain_info(stat)


def _pointer_info(name: str, content: Version | Link) -> PathInfo:
    if isinstance(content, Link):
        mtime = Attributes(mtime_ns=content.mtime_ns)
        seconds = content.mtime_ns / 1e9
        return PathInfo(name, 0, seconds, False, link=content.target, attributes=mtime)
    is_tree, attributes = content.is_tree, content.pointer.attributes
    size = 0 if is_tree else content.pointer.size_bytes
    return PathInfo(name, size, _published_s(content), is_tree, content, attributes=attributes)


def _published_s(version: Version) -> float:
    """When the version was written, as its name says."""
    text = version.pointer.version.split("-")[1]
    try:
        when = datetime.datetime.strptime(text, "%Y%m%dT%H%M%SZ")
    except ValueError:  # digits that are no time
        return 0.0
    return when.replace(tzinfo=datetime.UTC).timestamp()


def find_in_tree(
    store: Store, name: str, *, follow: bool = True, most_links: int = pointer.MOST_LINKS
) -> PathInfo | None:
    """Find `name` in a directory checkpoint above it; None where no folder above it is one.

    A symbolic link above it is followed. Raises NotFoundError for what is not in the nearest one.
    """
    for root in _parents(name):
        version = pointer.read_pointer(store, root)
        if isinstance(version, Link):
            target = pointer.resolve_target(store, root, version)
            path = posixpath.normpath(posixpath.join(target, name[len(root) + 1 :]))
            return _follow(store, root, path, follow, most_links)
        if version is None:
            continue
        version, manifest = pointer.load_version(store, root, version)
        if isinstance(manifest, TreeManifest):
            tree = Tree(store, version, manifest)
            try:
                return _entry_info(tree, name, tree.find(name[len(root) + 1 :]))
            except NotFoundError:
                if not name.endswith(SUFFIX):
                    raise
            name = name.removesuffix(SUFFIX)
            return _entry_info(tree, name, tree.find(name[len(root) + 1 :]))
    return None


def _parents(name: str) -> Iterator[str]:
    parent = posixpath.dirname(name)
    while parent:
        yield parent
        parent = posixpath.dirname(parent)


def _entry_info(tree: Tree, name: str, entry: TreeEntry) -> PathInfo:
    """An entry under the name it was reached by; a link is described as what it leads to."""
    target = entry
    if isinstance(entry, TreeLink):
        with contextlib.suppress(NotFoundError):  # a dangling link is a link all the same
            target = tree.find(entry.path)
    if isinstance(target, TreeFile):
        size, mtime_s = target.size_bytes, target.mtime_ns / 1e9
        return PathInfo(name, size, mtime_s, False, tree.version, tree, entry)
    mtime_ns = target.mtime_ns if isinstance(target, TreeFolder) else 0
    # A link to a folder is no folder, or walking the tree could be endless.
    folder = target is entry and not isinstance(entry, TreeLink)
    return PathInfo(name, 0, mtime_ns / 1e9, folder, tree.version, tree, entry)
