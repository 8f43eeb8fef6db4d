"""The files and folders of a mounted tree by inode, for as long as it or the kernel knows them.

A folder's inode follows from its path, a file's from its path and from what tells its bytes: a
version that replaces another is another inode, with pages of its own in the page cache, and who
has the earlier one open goes on with it. A node that left the tree stays until the kernel has
dropped its last reference.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import xxhash

from bootseer.errors import AccessDeniedError
from bootseer.fuse.operations import ROOT, FileSystemError, Inode
from bootseer.stripedfs.format.pointer import CachedPointer
from bootseer.stripedfs.read.namespace import PathInfo

INODE_MASK = (1 << 63) - 1
MOST_REMEMBERED = 4096
"""Inodes that are known to be gone; an older one is searched for again, in vain."""


class Node:
    """One file or folder; `path` is relative to the tree's root."""

    __slots__ = (
        "asked",
        "cached",
        "changes",
        "children",
        "info",
        "inode",
        "key",
        "listed",
        "listed_s",
        "name",
        "parent",
        "path",
        "references",
        "touched",
    )

    def __init__(self, inode: Inode, path: str, parent: Inode, found: PathInfo) -> None:
        self.inode = inode
        self.path = path
        self.name = os.fsencode(path.rpartition("/")[2])
        self.parent = parent
        self.info = found
        self.children: dict[bytes, Inode] | None = None
        self.listed_s = 0.0
        """When `children` were asked for; 0 = ask again."""
        self.changes = 0
        """How often all that the store had said of it became old: it was renamed, for one."""
        self.touched: set[bytes] = set()
        """Names in it that were changed from here since the store was asked."""
        self.asked: Future[dict[bytes, Inode]] | None = None
        """What somebody asks the store for just now."""
        self.listed = True
        """It is in its folder still."""
        self.references = 0
        """As far as this process gave them to the kernel."""
        self.cached: dict[str, CachedPointer] = {}
        """Of a folder: the versions that its checkpoints had when it was last listed."""
        self.key = ""
        """Names the bytes that it was opened with."""

    @property
    def fixed(self) -> bool:
        """Within a directory checkpoint: nothing of it changes."""
        return self.info.tree is not None and not self.info.shares_folder


class Nodes:
    """All nodes of a tree; every method may be called from any thread."""

    def __init__(self, found: PathInfo) -> None:
        self.lock = threading.RLock()
        self.root = Node(ROOT, "", ROOT, found)
        self._known: dict[Inode, Node] = {ROOT: self.root}
        self._gone: OrderedDict[Inode, None] = OrderedDict()

    def get(self, inode: Inode | None) -> Node | None:
        """The node of an inode; None when there is none."""
        return None if inode is None else self._known.get(inode)

    def all(self) -> list[Node]:
        """What is in the tree, as far as it was looked at; the root first."""
        with self.lock:
            return [node for node in self._known.values() if node.listed]

    def gone(self, inode: Inode) -> bool:
        """Whether it was a node of this process, and is none any more."""
        return inode in self._gone

    def children(self, folder: Node, listed: Mapping[bytes, Inode]) -> list[Node]:
        """The nodes of a listing, by name, less what vanished meanwhile."""
        with self.lock:
            found = (self._known.get(listed[name]) for name in sorted(listed))
            return [node for node in found if node is not None]

    def refer(self, inode: Inode) -> bool:
        """The kernel is given one more reference; False where there is no such node any more."""
        with self.lock:
            node = self._known.get(inode)
            if node is not None:
                node.references += 1
            return node is not None

    def forget(self, inode: Inode, count: int) -> None:
        """The kernel dropped references; it may drop some that another process gave."""
        with self.lock:
            node = self._known.get(inode)
            if node is not None:
                node.references = max(0, node.references - count)
                self._tidy(node)

    def fill(
        self, folder: Node, found: Sequence[PathInfo], kept: Mapping[bytes, Node]
    ) -> dict[bytes, Inode]:
        """Make these a folder's entries. `kept` stay as they are, whatever was found."""
        with self.lock:
            children: dict[bytes, Inode] = {}
            for each in found:
                base = each.name.rpartition("/")[2]
                node = kept.get(os.fsencode(base)) or self._found(folder, base, each)
                children[node.name] = node.inode
            for name, node in kept.items():
                children[name] = node.inode
                self._known[node.inode], node.listed = node, True
            staying = set(children.values())
            before, folder.children = folder.children or {}, children
            for inode in before.values():
                if inode not in staying:
                    self.drop(inode)
            folder.listed_s = time.monotonic()
            return children

    def outdate(self, folder: Node | None) -> None:
        """What is known of a folder's entries will not do any more; None is no folder."""
        with self.lock:
            if folder is not None:
                folder.changes += 1
                folder.listed_s = 0.0

    def touch(self, folder: Inode, name: bytes) -> None:
        """The store has something else under this name from now on."""
        with self.lock:
            node = self._known.get(folder)
            if node is not None:
                node.touched.add(name)

    def add(self, folder: Node, name: bytes, found: PathInfo) -> Node:
        """A new entry under an inode that nobody had. For what is being made."""
        base = os.fsdecode(name)
        with self.lock:
            node = Node(self._fresh(), below(folder, base), folder.inode, found)
            self._put(node, folder, name)
        return node

    def add_unlisted(self, folder: Node, name: bytes, found: PathInfo) -> Node:
        """A node that is in no folder: what takes the place of another later on."""
        base = os.fsdecode(name)
        with self.lock:
            node = Node(self._fresh(), below(folder, base), folder.inode, found)
            node.listed = False
            self._known[node.inode] = node
        return node

    def supersede(self, node: Node) -> None:
        """Its name goes to a fresh inode of the same file; it is in its folder no more."""
        with self.lock:
            folder = self._known.get(node.parent)
            if folder is not None:
                self.add(folder, node.name, node.info)
            node.path += "\0"  # what no listing gives: nobody shall find it there again
            node.listed = False

    def remove(self, node: Node) -> None:
        """It is in its folder no more."""
        with self.lock:
            self._take_out(node)
            self.drop(node.inode)

    def move(self, node: Node, folder: Node, name: bytes, found: PathInfo) -> None:
        """A node keeps its inode under its new name; what the kernel knows below it, too."""
        path = below(folder, os.fsdecode(name))
        with self.lock:
            self._take_out(node)
            for each in self._known.values():
                if each.path.startswith(f"{node.path}/"):
                    rest = each.path[len(node.path) :]
                    each.path = path + rest
                    if each.listed:  # else another file may have its name by now
                        _forget_key(each)
                    each.changes += 1
                    each.info = each.info._replace(name=found.name + rest)
            node.changes += 1  # who lists it just now does so under its former name
            node.path, node.name, node.parent, node.info = path, name, folder.inode, found
            _forget_key(node)
            self._put(node, folder, name)

    def drop(self, inode: Inode) -> None:
        """It left the tree, with all that is below it."""
        leaving = [inode]
        while leaving:
            node = self._known.get(leaving.pop())
            if node is None:
                continue
            leaving += (node.children or {}).values()
            node.children, node.listed_s, node.listed = None, 0.0, False
            self._tidy(node)

    def _tidy(self, node: Node) -> None:
        """Let go of what neither the tree nor the kernel knows."""
        if node.listed or node.references:
            return
        self._known.pop(node.inode, None)
        self._gone[node.inode] = None
        if len(self._gone) > MOST_REMEMBERED:
            self._gone.popitem(last=False)
        for inode in (node.children or {}).values():
            self.drop(inode)

    def _put(self, node: Node, folder: Node, name: bytes) -> None:
        self._known[node.inode], node.listed = node, True
        folder.touched.add(name)
        if folder.children is None:
            folder.children = {}
        before = folder.children.get(name)
        folder.children[name] = node.inode
        if before is not None and before != node.inode:  # a listing was quicker
            self.drop(before)

    def _take_out(self, node: Node) -> None:
        parent = self._known.get(node.parent)
        if parent is None:
            return
        parent.touched.add(node.name)
        inode = (parent.children or {}).pop(node.name, None)
        if inode is not None and inode != node.inode:  # a listing gave the name another node
            self.drop(inode)

    def _found(self, folder: Node, base: str, found: PathInfo) -> Node:
        """The node of what a folder holds: the one that is known, when it is of these bytes."""
        path, stamp = below(folder, base), stamp_of(found)
        inode = inode_of(path, stamp)
        earlier = self.get((folder.children or {}).get(os.fsencode(base)))
        if earlier is not None and earlier.info.is_folder and found.is_folder:
            node: Node | None = earlier
        else:
            node = self._known.get(inode)
            if node is not None and node.path != path:  # moved away since, or of the same hash
                same = earlier is not None and stamp_of(earlier.info) == stamp
                node, inode = earlier if same else None, self._fresh()
        if node is None:
            node = self._known[inode] = Node(inode, path, folder.inode, found)
            self._gone.pop(inode, None)
            return node
        changed = node.info.version != found.version
        if changed:
            self.outdate(node)
        if changed or found.version is None:  # else a directory checkpoint may be read already
            node.info = found
        node.listed = True
        return node

    def _fresh(self) -> Inode:
        while True:
            inode = Inode(secrets.randbits(63) & INODE_MASK)
            if inode > ROOT and inode not in self._known:
                return inode


def _forget_key(moved: Node) -> None:
    """A version's key names its bytes by where they were; a plain file's, by themselves."""
    if moved.info.version is not None or moved.info.tree is not None:
        moved.key = ""


def readable(node: Node) -> Node:
    """Refuse one of which nothing but its name is known; why was told when it was listed."""
    if isinstance(node.info.problem, AccessDeniedError):
        raise FileSystemError(errno.EACCES)
    if node.info.problem is not None:
        raise FileSystemError(errno.EIO)
    return node


def below(folder: Node, base: str) -> str:
    """The path of a folder's entry."""
    return f"{folder.path}/{base}" if folder.path else base


def base_of(found: PathInfo) -> bytes:
    """The last part of a name."""
    return os.fsencode(found.name.rpartition("/")[2])


def stamp_of(found: PathInfo) -> str:
    """Tells a file's bytes from those of another version; "" for a folder."""
    if found.is_folder:
        return ""
    if found.link:
        return f"link-{found.link}"
    if found.version is not None:
        return f"{found.version.pointer.version}-{found.version.pointer.manifest_digest.hex()}"
    return f"{found.size_bytes}-{found.mtime_s!r}-{found.stamp}"


def inode_of(path: str, stamp: str) -> Inode:
    """The inode of a path within any tree: 63 bits of a hash, never the root's."""
    named = os.fsencode(path) + b"\0" + os.fsencode(stamp) if stamp else os.fsencode(path)
    number = xxhash.xxh3_64_intdigest(named) & INODE_MASK
    return Inode(number if number > ROOT else number + 2)
