"""The files and folders of a mounted tree by inode, for as long as the tree or the kernel has them.

A folder's inode follows from its path, a file's from its path and from what identifies its bytes: a
version that replaces another is another inode, with pages of its own in the page cache, and
readers of the earlier one go on with it. A node that left the tree stays until the kernel has
dropped its last reference, and one that waits to be published stays until then.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

import xxhash

from bootseer.errors import AccessDeniedError
from bootseer.fuse.operations import ROOT, FileSystemError, Inode
from bootseer.stripedfs.format.pointer import CachedPointer
from bootseer.stripedfs.read.namespace import PathInfo
from bootseer.system.lru import put_youngest

INODE_MASK = (1 << 63) - 1
MOST_REMEMBERED = 4096
"""Removed inodes that are remembered; an older one is searched for again, in vain."""


class AskedListing:
    """A folder's listing that one thread asks the store for, and others wait for.

    Not `concurrent.futures.Future`, which takes 8 ms to import, for which mounts would wait.
    """

    __slots__ = ("_answered", "_error", "_listed")

    def __init__(self) -> None:
        self._answered = threading.Event()
        self._listed: dict[bytes, Inode] = {}
        self._error: BaseException | None = None

    def answer(self, listed: dict[bytes, Inode]) -> None:
        """The store's answer."""
        self._listed = listed
        self._answered.set()

    def fail(self, error: BaseException) -> None:
        """Why there is none."""
        self._error = error
        self._answered.set()

    def wait(self) -> dict[bytes, Inode]:
        """Wait for the answer; raises the error where there is none."""
        self._answered.wait()
        if self._error is not None:
            raise self._error
        return self._listed


class Node:
    """One file or folder; `path` is relative to the tree's root."""

    __slots__ = (
        "asked",
        "cached",
        "changes",
        "children",
        "hidden",
        "info",
        "inode",
        "key",
        "listed",
        "listed_s",
        "name",
        "parent",
        "path",
        "references",
        "staged",
        "touched",
    )

    def __init__(self, inode: Inode, path: str, parent: Inode, info: PathInfo) -> None:
        self.inode = inode
        self.path = path
        self.name = os.fsencode(path.rpartition("/")[2])
        self.parent = parent
        self.info = info
        self.hidden: set[bytes] = set()
        """Of a checkpoint's folder: files removed here; others see them until all are removed."""
        self.children: dict[bytes, Inode] | None = None
        self.listed_s = 0.0
        """When `children` were asked for; 0 = ask again."""
        self.changes = 0
        """How often everything known of it became outdated, as by a rename."""
        self.touched: set[bytes] = set()
        """Names in it that this mount changed since the store was asked."""
        self.asked: AskedListing | None = None
        """The listing that a thread is asking the store for."""
        self.listed = True
        """Whether it is still in its folder."""
        self.references = 0
        """The kernel's references, as far as this process gave them."""
        self.staged = False
        """Whether it waits for its set to be published: no folder lists it, and it stays."""
        self.cached: dict[str, CachedPointer] = {}
        """Of a folder: the pointers of its checkpoints as they were last read."""
        self.key = ""
        """The key of the bytes that it was opened with."""

    @property
    def is_fixed(self) -> bool:
        """Whether it can never change, as what is within a directory checkpoint."""
        return self.info.tree is not None and not self.info.shares_folder


class Nodes:
    """All nodes of a tree; every method may be called from any thread."""

    def __init__(self, info: PathInfo) -> None:
        self.lock = threading.RLock()
        self.root = Node(ROOT, "", ROOT, info)
        self._known: dict[Inode, Node] = {ROOT: self.root}
        self._removed: dict[Inode, None] = {}

    def get(self, inode: Inode | None) -> Node | None:
        """The node of an inode; None when there is none."""
        return None if inode is None else self._known.get(inode)

    def all(self) -> list[Node]:
        """What is in the tree, as far as it was listed; the root first."""
        with self.lock:
            return [node for node in self._known.values() if node.listed]

    def was_removed(self, inode: Inode) -> bool:
        """Whether this process knew the inode, and removed it."""
        return inode in self._removed

    def children(self, folder: Node, listed: Mapping[bytes, Inode]) -> list[Node]:
        """The nodes of a listing, by name, less what was removed meanwhile."""
        with self.lock:
            nodes = (self._known.get(listed[name]) for name in sorted(listed))
            return [node for node in nodes if node is not None]

    def refer(self, inode: Inode) -> bool:
        """Count another reference of the kernel; False where there is no such node any more."""
        with self.lock:
            node = self._known.get(inode)
            if node is not None:
                node.references += 1
            return node is not None

    def forget(self, inode: Inode, count: int) -> None:
        """Count references that the kernel dropped; another process may have given some of them."""
        with self.lock:
            node = self._known.get(inode)
            if node is not None:
                node.references = max(0, node.references - count)
                self._tidy(node)

    def fill(
        self, folder: Node, infos: Sequence[PathInfo], kept: Mapping[bytes, Node]
    ) -> dict[bytes, Inode]:
        """Make these a folder's entries. `kept` stay as they are, whatever the infos say."""
        with self.lock:
            children: dict[bytes, Inode] = {}
            for each in infos:
                base = each.name.rpartition("/")[2]
                node = kept.get(os.fsencode(base)) or self._match(folder, base, each)
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
        """Let a folder be listed again; None is no folder."""
        with self.lock:
            if folder is not None:
                folder.changes += 1
                folder.listed_s = 0.0

    def touch(self, folder: Inode, name: bytes) -> None:
        """Note that this mount changed what the store has under a name."""
        with self.lock:
            node = self._known.get(folder)
            if node is not None:
                node.touched.add(name)

    def add(self, folder: Node, name: bytes, info: PathInfo) -> Node:
        """Add what is being made, under a new inode."""
        base = os.fsdecode(name)
        with self.lock:
            node = Node(self._new_inode(), below(folder, base), folder.inode, info)
            self._put(node, folder, name)
        return node

    def add_unlisted(self, folder: Node, name: bytes, info: PathInfo) -> Node:
        """Add a node that no folder lists: it will replace another one."""
        base = os.fsdecode(name)
        with self.lock:
            node = Node(self._new_inode(), below(folder, base), folder.inode, info)
            node.listed = False
            self._known[node.inode] = node
        return node

    def set_staged(self, node: Node, staged: bool) -> None:
        """Note that a node waits to be published with its set, or no longer does."""
        with self.lock:
            node.staged = staged
            self._tidy(node)

    def supersede(self, node: Node) -> None:
        """Give a node's name to a new inode of the same file, and take it out of its folder."""
        with self.lock:
            folder = self._known.get(node.parent)
            if folder is not None:
                self.add(folder, node.name, node.info)
            node.path += "\0"  # never listed: it must not be found by its path again
            node.listed = False

    def remove(self, node: Node) -> None:
        """Remove a node from its folder."""
        with self.lock:
            self._take_out(node)
            self.drop(node.inode)

    def move(self, node: Node, folder: Node, name: bytes, info: PathInfo) -> None:
        """Rename a node; it keeps its inode, and so does what the kernel knows below it."""
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
                    each.info = each.info._replace(name=info.name + rest)
            node.changes += 1  # a listing that has begun uses its former name
            node.path, node.name, node.parent, node.info = path, name, folder.inode, info
            _forget_key(node)
            self._put(node, folder, name)

    def drop(self, inode: Inode) -> None:
        """Take a node out of the tree, with all that is below it."""
        leaving = [inode]
        while leaving:
            node = self._known.get(leaving.pop())
            if node is None:
                continue
            leaving += (node.children or {}).values()
            node.children, node.listed_s, node.listed = None, 0.0, False
            self._tidy(node)

    def _tidy(self, node: Node) -> None:
        """Forget a node that neither the tree nor the kernel has, nor a set that is being saved."""
        if node.listed or node.references or node.staged:
            return
        self._known.pop(node.inode, None)
        put_youngest(self._removed, node.inode, None, MOST_REMEMBERED)
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

    def _match(self, folder: Node, base: str, info: PathInfo) -> Node:
        """The node of what a folder holds: the known one, if it is of these bytes."""
        path, stamp = below(folder, base), stamp_of(info)
        inode = inode_of(path, stamp)
        earlier = self.get((folder.children or {}).get(os.fsencode(base)))
        if earlier is not None and earlier.info.is_folder and info.is_folder:
            node: Node | None = earlier
        else:
            node = self._known.get(inode)
            if node is not None and node.path != path:  # moved away since, or of the same hash
                same = earlier is not None and stamp_of(earlier.info) == stamp
                node, inode = earlier if same else None, self._new_inode()
        if node is None:
            node = self._known[inode] = Node(inode, path, folder.inode, info)
            self._removed.pop(inode, None)
            return node
        changed = node.info.version != info.version
        if changed:
            self.outdate(node)
        if changed or info.version is None:  # else a directory checkpoint may be read already
            node.info = info
        node.listed = True
        return node

    def _new_inode(self) -> Inode:
        while True:
            inode = Inode(secrets.randbits(63) & INODE_MASK)
            if inode > ROOT and inode not in self._known:
                return inode


def _forget_key(moved: Node) -> None:
    """Forget the key of a moved version, which contains its place; a plain file's does not."""
    if moved.info.version is not None or moved.info.tree is not None:
        moved.key = ""


def readable(node: Node) -> Node:
    """Refuse a node of which only the name is known; the listing reported its problem."""
    if isinstance(node.info.problem, AccessDeniedError):
        raise FileSystemError(errno.EACCES)
    if node.info.problem is not None:
        raise FileSystemError(errno.EIO)
    return node


def below(folder: Node, base: str) -> str:
    """The path of a folder's entry."""
    return f"{folder.path}/{base}" if folder.path else base


def base_of(info: PathInfo) -> bytes:
    """The last part of a name."""
    return os.fsencode(info.name.rpartition("/")[2])


def stamp_of(info: PathInfo) -> str:
    """Distinguishes a file's bytes from those of another version; "" for a folder."""
    if info.is_folder:
        return ""
    if info.link:
        return f"link-{info.link}"
    if info.version is not None:
        return f"{info.version.pointer.version}-{info.version.pointer.manifest_digest.hex()}"
    return f"{info.size_bytes}-{info.mtime_s!r}-{info.stamp}"


def inode_of(path: str, stamp: str) -> Inode:
    """The inode of a path within any tree: 63 bits of a hash, never the root's."""
    named = os.fsencode(path) + b"\0" + os.fsencode(stamp) if stamp else os.fsencode(path)
    number = xxhash.xxh3_64_intdigest(named) & INODE_MASK
    return Inode(number if number > ROOT else number + 2)
