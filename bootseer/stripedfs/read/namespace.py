"""A store's folder as its users see it: each striped checkpoint under its own name.

`ckpt.pt.stripes/` with a current version appears as the file `ckpt.pt`, or as the folder `ckpt`
for a directory checkpoint, and hides a plain object of the same name. What lies within a directory
checkpoint is found in its manifest. Folders of checkpoints that were never published are not
there.
"""

from __future__ import annotations

import contextlib
import datetime
import posixpath
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootseer.errors import BootseerError, NotFoundError
from bootseer.storage.store import Stat, Store
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import (
    Attributes,
    KeptAttributes,
    Link,
    TreeEntry,
    TreeFile,
    TreeFolder,
    TreeLink,
    TreeManifest,
)
from bootseer.stripedfs.format.pointer import SUFFIX, Seen, Version
from bootseer.stripedfs.read.tree import Tree
from bootseer.stripedfs.workers import call_in_parallel

ROOT = Stat("", 0, 0.0, True)
METADATA = ".metadata"
MEMBER = re.compile(r"__\d+_\d+\.distcp\Z")


class Found(NamedTuple):
    """One file or folder; `name` is the user's, without any suffix of ours.

    `version` is there for a striped file and for the root of a directory checkpoint; `tree` and
    `entry` for what lies within one; `stamp` is the store's word for the bytes of a plain one.
    `problem`: why nothing but its name is known, as of a checkpoint whose pointer is damaged.
    `link`: the target of a symbolic link that lies in a folder of the store. `attributes`: what
    mode and time were set to; of plain files and folders only listings tell (`children`).
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
        """Changes whenever the bytes may have; "" where the store tells nothing, and of folders."""
        if isinstance(self.entry, TreeFile):
            return f"{self.entry.digest.hex()}-{self.size_bytes}"
        return self.stamp if self.version is None else self.version.pointer.version

    @property
    def beside(self) -> bool:
        """Whether it is a directory of which some files lie in the plain folder of its name."""
        root = self.version is not None and self.entry is None
        return root and self.version is not None and self.version.pointer.beside

    @property
    def striped(self) -> bool:
        """Whether the bytes are striped."""
        if self.tree is not None:
            return isinstance(self.entry, TreeFile) and self.entry.striped
        return self.version is not None and not self.is_folder


def look(store: Store, name: str, *, follow: bool = True) -> Found:
    """What a name stands for: a symbolic link for what it leads to, unless `follow` is False.

    Links on the way to the name are followed. Raises NotFoundError when it stands for nothing.
    """
    return _look(store, name, follow, pointer.MOST_LINKS)


def _look(store: Store, name: str, follow: bool, most_links: int) -> Found:
    if not name:
        return _plain(ROOT)
    literal, name = name, name.removesuffix(SUFFIX)
    if not pointer.is_name(literal):  # may be a folder still
        return _plain(store.stat(literal))
    if "/" in name and is_member(posixpath.basename(name)):
        folder = pointer.pointed(store, posixpath.dirname(name))
        if isinstance(folder, Version) and folder.pointer.beside:
            # What an earlier save left in the plain folder is no part of it any more.
            found = within_tree(store, name, follow=follow, most_links=most_links)
            assert found is not None  # as its pointer said
            return found
    version = pointer.pointed(store, name)
    if isinstance(version, Link) and follow:
        return _followed(store, name, pointer.target_of(store, name, version), follow, most_links)
    if version is not None:
        return _pointed(name, version)
    if literal != name:
        try:
            return _plain_file(store, literal)
        except NotFoundError:
            pass
    try:
        return _plain(store.stat(name))
    except NotFoundError:
        found = within_tree(store, literal, follow=follow, most_links=most_links)
        if found is None:
            raise
        return found


def _followed(store: Store, link: str, target: str, follow: bool, most_links: int) -> Found:
    """What a link leads to."""
    if not most_links:
        raise pointer.in_a_circle(store, link)
    return _look(store, "" if target == "." else target, follow, most_links - 1)


def children(store: Store, folder: Found, seen: dict[str, Seen] | None = None) -> list[Found]:
    """What lies directly in a folder, by name.

    `seen` is what an earlier call left in it: versions that need not be asked for again. A
    checkpoint that cannot be looked at is found with its `problem`. Raises what keeps the whole
    folder from being listed: its own error, or that the store went away before anything was said.
    """
    if folder.tree is not None or folder.version is not None:
        tree = rooted(store, folder).tree
        assert tree is not None
        top = "" if folder.entry is None else folder.entry.path
        inside = tree.folders.get(top, ())
        named = ((f"{folder.name}/{posixpath.basename(e.path)}", e) for e in inside)
        found = [_entry(tree, name, e) for name, e in named]
        if not folder.beside:
            return found
        taken = {each.name for each in found}
        others = (each for each in _beside(store, folder, seen) if each.name not in taken)
        return sorted([*found, *others], key=lambda each: each.name)
    plain: dict[str, Found] = {}
    striped: list[tuple[str, float]] = []
    known = {} if seen is None else seen
    for stat in _listed(store, folder.name):
        if stat.is_folder and stat.name.endswith(SUFFIX) and pointer.is_name(stat.name):
            striped.append((stat.name.removesuffix(SUFFIX), stat.mtime_s))
        else:
            plain[stat.name] = _plain(stat)
    asked = call_in_parallel(lambda each: _asked(store, *each, known.get(each[0])), striped)
    faults = [each for each in asked if isinstance(each, BootseerError) and each.retryable]
    if faults and len(faults) == len(asked):
        raise faults[0]
    known.clear()
    for (name, mtime_s), each in zip(striped, asked, strict=True):
        if isinstance(each, Seen):
            known[name] = each
            if not isinstance(each.version, KeptAttributes):
                plain[name] = _pointed(name, each.version)
            elif name in plain:
                plain[name] = _with_attributes(plain[name], each.version)
        elif each is not None:
            plain[name] = Found(name, 0, mtime_s, False, problem=each)
    return [plain[name] for name in sorted(plain)]


def stamp_for(found: Found) -> str:
    """Tells what attributes of a plain file are set for; a rename changes nothing. "": a folder.

    What is set of the files of a folder changes the time that the store says of the folder.
    """
    return "" if found.is_folder else f"{found.size_bytes}-{found.mtime_s!r}"


def _with_attributes(found: Found, kept: KeptAttributes) -> Found:
    """As far as they were set for what is there now."""
    fits = kept.stamp == stamp_for(found)
    return found._replace(attributes=kept.attributes) if fits else found


def _beside(store: Store, folder: Found, seen: dict[str, Seen] | None) -> list[Found]:
    """Files of a directory that are no part of its version."""
    plain = Found(folder.name, 0, folder.mtime_s, True)
    try:
        listed = children(store, plain, seen)
    except NotFoundError:
        return []
    return [each for each in listed if not is_member(posixpath.basename(each.name))]


def is_member(base: str) -> bool:
    """Whether a file of this name is one of torch's distributed checkpoints, which are one whole.

    As torch/distributed/checkpoint/filesystem.py of torch 2.13 names them.
    """
    return base == METADATA or bool(MEMBER.match(base))


def _asked(
    store: Store, name: str, mtime_s: float, seen: Seen | None
) -> Seen | BootseerError | None:
    """An error of one checkpoint is no error of the others beside it."""
    try:
        return pointer.current_or_seen(store, name, mtime_s, seen)
    except BootseerError as error:
        return error


def _listed(store: Store, folder: str) -> Iterator[Stat]:
    """What a store lists, and files of users whose names begin with a dot (DCP's `.metadata`)."""
    yield from store.list(folder)
    for stat in store.temporaries(folder):
        if not is_temporary(stat.name.rpartition("/")[2]):
            yield stat


def is_temporary(base: str) -> bool:
    """Whether a store (or NFS) made this name for its own use."""
    return base.startswith((".tmp-", ".nfs"))


def is_reserved(base: str) -> bool:
    """Whether no user's file may be given this name: folders of stripes and temporaries have it."""
    return base.endswith(SUFFIX) or is_temporary(base)


def leads_nowhere(found: Found) -> bool:
    """Whether it is a link of a directory checkpoint to what is not in it."""
    if found.tree is None or not isinstance(found.entry, TreeLink):
        return False
    try:
        found.tree.find(found.entry.path)
    except NotFoundError:
        return True
    return False


def rooted(store: Store, found: Found) -> Found:
    """A directory checkpoint with its manifest read, so that nothing of it is read again."""
    return found._replace(tree=_tree(store, found)) if found.tree is None else found


def _plain(stat: Stat) -> Found:
    return Found(stat.name, stat.size_bytes, stat.mtime_s, stat.is_folder, stamp=stat.version)


def _plain_file(store: Store, name: str) -> Found:
    """A file whose own name ends as those of our folders do."""
    stat = store.stat(name)
    if stat.is_folder:
        raise NotFoundError(f"{name} in {store.url} was never published")
    return _plain(stat)


def _pointed(name: str, pointed: Version | Link) -> Found:
    """What a pointer was found to say."""
    if isinstance(pointed, Link):
        when = Attributes(mtime_ns=pointed.mtime_ns)
        mtime_s = pointed.mtime_ns / 1e9
        return Found(name, 0, mtime_s, False, link=pointed.target, attributes=when)
    return _versioned(name, pointed)


def _versioned(name: str, version: Version) -> Found:
    size = 0 if version.is_tree else version.pointer.size_bytes
    published_s, attributes = _published_s(version), version.pointer.attributes
    return Found(name, size, published_s, version.is_tree, version, attributes=attributes)


def _published_s(version: Version) -> float:
    """When the version was written, as its name says."""
    text = version.pointer.version.split("-")[1]
    try:
        when = datetime.datetime.strptime(text, "%Y%m%dT%H%M%SZ")
    except ValueError:  # digits, but no time: a name is a name
        return 0.0
    return when.replace(tzinfo=datetime.UTC).timestamp()


def _tree(store: Store, found: Found) -> Tree:
    loaded = pointer.load(store, found.name)
    if loaded is None or not isinstance(loaded[1], TreeManifest):
        raise NotFoundError(f"{found.name} in {store.url} was removed or replaced meanwhile")
    return Tree(store, loaded[0], loaded[1])


def within_tree(
    store: Store, name: str, *, follow: bool = True, most_links: int = pointer.MOST_LINKS
) -> Found | None:
    """The entry of a directory checkpoint above `name`; None where no folder above it is one.

    A symbolic link above it leads on. Raises NotFoundError for what is not in the nearest one.
    """
    for root in _parents(name):
        pointed = pointer.pointed(store, root)
        if isinstance(pointed, Link):
            target = pointer.target_of(store, root, pointed)
            on = posixpath.normpath(posixpath.join(target, name[len(root) + 1 :]))
            return _followed(store, root, on, follow, most_links)
        loaded = None if pointed is None else pointer.load_version(store, root, pointed)
        if loaded is not None and isinstance(loaded[1], TreeManifest):
            tree = Tree(store, loaded[0], loaded[1])
            try:
                return _entry(tree, name, tree.find(name[len(root) + 1 :]))
            except NotFoundError:
                if not name.endswith(SUFFIX):
                    raise
            name = name.removesuffix(SUFFIX)
            return _entry(tree, name, tree.find(name[len(root) + 1 :]))
    return None


def _parents(name: str) -> Iterator[str]:
    parent = posixpath.dirname(name)
    while parent:
        yield parent
        parent = posixpath.dirname(parent)


def _entry(tree: Tree, name: str, entry: TreeEntry) -> Found:
    """An entry under the name it was reached by; a link is described as what it leads to."""
    target = entry
    if isinstance(entry, TreeLink):
        with contextlib.suppress(NotFoundError):  # it leads nowhere, and is a link still
            target = tree.find(entry.path)
    if isinstance(target, TreeFile):
        size, mtime_s = target.size_bytes, target.mtime_ns / 1e9
        return Found(name, size, mtime_s, False, tree.version, tree, entry)
    mtime_ns = target.mtime_ns if isinstance(target, TreeFolder) else 0
    # A link to a folder is none: who walks the tree would go round in circles.
    folder = target is entry and not isinstance(entry, TreeLink)
    return Found(name, 0, mtime_ns / 1e9, folder, tree.version, tree, entry)
