"""A folder of a store, a directory checkpoint or a single file as a mounted, read-only tree.

Inode numbers follow from the paths, so a process started later on the same tree serves the same
mount. Folders are read when they are looked into; those of a store (a directory checkpoint never
changes) again after `REFRESH_S`, so that new checkpoints appear.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash

from bootseer.errors import BootseerError
from bootseer.fuse.operations import (
    ROOT,
    Attr,
    Data,
    Entry,
    FileSystemError,
    Handle,
    Inode,
    Opened,
    Reply,
)
from bootseer.storage.base import Store
from bootseer.stripedfs import names
from bootseer.stripedfs.manifest import TreeFile, TreeFolder, TreeLink
from bootseer.stripedfs.mountsettings import DIRECT_BYTES
from bootseer.stripedfs.names import Found
from bootseer.stripedfs.source import DigestedSource, FileSource, StripedSource
from bootseer.stripedfs.treefiles import Complaints, OpenFiles

if TYPE_CHECKING:
    from bootseer.blocks.fetch import Fetcher

REFRESH_S = 30.0
INODE_MASK = (1 << 63) - 1
XATTR = b"user.bootseer."


class Node:
    """One file or folder; its inode follows from `path`, which is relative to the tree's root."""

    __slots__ = ("children", "found", "inode", "listed_s", "name", "opened_key", "parent", "path")

    def __init__(self, inode: Inode, path: str, parent: Inode, found: Found) -> None:
        self.inode = inode
        self.path = path
        self.name = os.fsencode(path.rpartition("/")[2])
        self.parent = parent
        self.found = found
        self.children: dict[bytes, Inode] | None = None
        self.listed_s = 0.0
        self.opened_key = ""

    @property
    def fixed(self) -> bool:
        """Within a directory checkpoint: nothing of it changes."""
        return self.found.tree is not None


class StripedTree:
    """`Operations` over what a name on a store stands for; a file is served as the one file of `/`.

    Files of `direct_bytes` and more bypass the page cache. Raises NotFoundError and its relatives
    when there is nothing of that name. Faults that readers get as EIO are told to `say` in words.
    Who made the fetcher closes it after the mount is gone.
    """

    slow = ("lookup", "getattr", "readdir", "open", "getxattr", "listxattr")

    def __init__(
        self,
        store: Store,
        name: str,
        fetcher: Fetcher,
        *,
        direct_bytes: int = DIRECT_BYTES,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.store = store
        self._direct_bytes = direct_bytes
        self.complaints = Complaints(say)
        self.files = OpenFiles(fetcher, self.complaints)
        self._lock = threading.RLock()
        self._nodes: dict[Inode, Node] = {}
        self._owner = (os.geteuid(), os.getegid())
        self._began_ns = time.time_ns()
        found = names.look(store, name)
        self._single = not found.is_folder
        root = Node(ROOT, "", ROOT, found)
        self._nodes[ROOT] = root
        if self._single:
            base = found.name.rpartition("/")[2]
            root.children = {os.fsencode(base): self._add(root, base, found).inode}

    # --- names and attributes -----------------------------------------------------------------

    def lookup(self, parent: Inode, name: bytes) -> Attr:
        with self._answered("lookup"):
            return self._attr(self.child(self.node(parent), name))

    def getattr(self, inode: Inode) -> Attr:
        with self._answered("getattr"):
            return self._attr(self.node(inode))

    def readlink(self, inode: Inode) -> bytes:
        with self._answered("readlink"):
            entry = self.node(inode).found.entry
        if not isinstance(entry, TreeLink):
            raise FileSystemError(errno.EINVAL)
        return os.fsencode(entry.target)

    def readdir(self, inode: Inode) -> Sequence[Entry]:
        with self._answered("readdir"):
            node = self.node(inode)
            listed = self.listing(node)
            nodes = [self._nodes[listed[name]] for name in sorted(listed)]
            return [Entry(child.name, self._attr(child)) for child in nodes]

    def statfs(self) -> tuple[int, int, int, int]:
        with self._lock:
            nodes = list(self._nodes.values())
        return sum(n.found.size_bytes for n in nodes[1:]), 0, len(nodes), 0

    def getxattr(self, inode: Inode, name: bytes) -> bytes:
        with self._answered("getxattr"):
            values = self._xattrs(self.node(inode))
        try:
            return values[name]
        except KeyError:
            raise FileSystemError(errno.ENODATA) from None

    def listxattr(self, inode: Inode) -> Sequence[bytes]:
        with self._answered("listxattr"):
            return list(self._xattrs(self.node(inode)))

    def forget(self, inode: Inode, count: int) -> None:
        """Nothing to do: nodes are bounded by the tree."""

    def destroy(self) -> None:
        self.files.close()

    # --- files --------------------------------------------------------------------------------

    def open(self, inode: Inode, flags: int) -> Opened:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FileSystemError(errno.EROFS)
        with self._answered("open"):
            node = self.node(inode)
            if node.found.is_folder:
                raise FileSystemError(errno.EISDIR)
            source = self.source(node)
        direct = source.size_bytes >= self._direct_bytes
        handle = self.files.add(source, self._where(node))
        # The kernel's pages are still good when they are of the same bytes.
        same, node.opened_key = bool(source.key) and node.opened_key == source.key, source.key
        return Opened(handle, direct=direct, keep_cache=same)

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Callable[[], Reply]
    ) -> Data | None:
        opened = self.files.get(handle)
        if opened is not None:
            return opened.read(offset, size, later)
        reply = later()  # a handle of a process before us: opening its file may take time

        def revive() -> None:
            try:
                node = self.node(inode)
                opened = self.files.revive(handle, self.source(node), self._where(node))
                data = opened.read(offset, size, lambda: reply)
            except Exception as error:  # whatever it is, the reader must not wait for ever
                reply.error(self.complaints.number(error, f"inode {inode}"))
                return
            if data is not None:
                reply.data(data)

        self.files.help(revive)
        return None

    def release(self, inode: Inode, handle: Handle) -> None:
        self.files.drop(handle)

    def source(self, node: Node) -> FileSource:
        """Open a file. May wait for the store."""
        found = node.found
        stamp = (found.version, found.entry, found.size_bytes, found.mtime_s)
        return self.files.source(node.inode, stamp, lambda: names.source_of(self.store, found))

    # --- nodes --------------------------------------------------------------------------------

    def node(self, inode: Inode) -> Node:
        """The node of an inode; one that only a process before us knew is searched for."""
        found = self._nodes.get(inode)
        if found is None:
            self._survey(inode)
            found = self._nodes.get(inode)
        if found is None:
            raise FileSystemError(errno.ESTALE)
        return found

    def child(self, parent: Node, name: bytes) -> Node:
        """A folder's entry. Raises FileSystemError(ENOENT)."""
        inode = self.listing(parent).get(name)
        if inode is None:
            raise FileSystemError(errno.ENOENT)
        return self._nodes[inode]

    def listing(self, node: Node) -> dict[bytes, Inode]:
        """A folder's entries; read again from the store when they are old."""
        if not node.found.is_folder and not (node.inode == ROOT and self._single):
            raise FileSystemError(errno.ENOTDIR)
        with self._lock:
            known = node.children
            old = time.monotonic() - node.listed_s > REFRESH_S
            if known is not None and (node.fixed or self._single or not old):
                return known
        try:
            if node.found.version is not None and node.found.is_folder:
                node.found = names.rooted(self.store, node.found)
            found = names.children(self.store, node.found)
        except BootseerError:
            if known is None:
                raise
            return known  # what was there a while ago is better than nothing
        with self._lock:
            return self._listed(node, found)

    def _listed(self, node: Node, found: Sequence[Found]) -> dict[bytes, Inode]:
        children: dict[bytes, Inode] = {}
        for each in found:
            base = each.name.rpartition("/")[2]
            child = self._add(node, base, each)
            children[child.name] = child.inode
        for gone in (node.children or {}).values():
            if gone not in children.values():
                self._nodes.pop(gone, None)
        node.children, node.listed_s = children, time.monotonic()
        return children

    def _add(self, parent: Node, base: str, found: Found) -> Node:
        path = f"{parent.path}/{base}" if parent.path else base
        inode = inode_of(path)
        known = self._nodes.get(inode)
        if known is not None and known.path == path:
            if known.found.version != found.version or known.found.is_folder != found.is_folder:
                known.children = None
            known.found = self._kept(known, found)
            return known
        if known is not None:
            raise FileSystemError(errno.EOVERFLOW)  # two paths of one 63-bit hash
        node = self._nodes[inode] = Node(inode, path, parent.inode, found)
        return node

    @staticmethod
    def _kept(known: Node, found: Found) -> Found:
        """The record to go on with: a tree that was read already, while it is the same."""
        same = known.found.version is not None and known.found.version == found.version
        return known.found if same else found

    def _survey(self, wanted: Inode) -> None:
        """Look into every folder until an inode is found."""
        waiting = [self._nodes[ROOT]]
        while waiting and wanted not in self._nodes:
            node = waiting.pop()
            for inode in list(self.listing(node).values()):
                child = self._nodes[inode]
                if child.found.is_folder:
                    waiting.append(child)

    def _attr(self, node: Node) -> Attr:
        found, entry = node.found, node.found.entry
        folder = found.is_folder or node.inode == ROOT
        mode = 0o755 if folder else 0o644
        if isinstance(entry, (TreeFile, TreeFolder)):
            mode = entry.mode
        kind = stat.S_IFDIR if folder else stat.S_IFREG
        size = 0 if folder else found.size_bytes
        if isinstance(entry, TreeLink):
            kind, mode, size = stat.S_IFLNK, 0o777, len(os.fsencode(entry.target))
        elif self._read_only:
            mode &= ~0o7222
        return Attr(
            inode=node.inode,
            mode=kind | mode,
            size_bytes=size,
            mtime_ns=int(found.mtime_s * 1e9) or self._began_ns,
            nlink=2 if folder else 1,
            uid=self._owner[0],
            gid=self._owner[1],
        )

    _read_only = True

    def _xattrs(self, node: Node) -> dict[bytes, bytes]:
        where = f"{self.store.url.rstrip('/')}/{node.found.name}"
        values = {XATTR + b"url": os.fsencode(where)}
        if not node.found.is_folder and node.inode != ROOT:
            source = self.source(node)
            if isinstance(source, StripedSource):
                values[XATTR + b"width"] = str(source.layout.width).encode()
                values[XATTR + b"chunk"] = str(source.layout.chunk_bytes).encode()
            if isinstance(source, DigestedSource):
                values[XATTR + b"digest"] = source.digest.encode()
        return values

    def _where(self, node: Node) -> str:
        return node.path or node.found.name

    def _answered(self, what: str) -> Answered:
        return Answered(self.complaints, what)


class Answered:
    """A block whose errors become the answer to the kernel."""

    __slots__ = ("_complaints", "_what")

    def __init__(self, complaints: Complaints, what: str) -> None:
        self._complaints, self._what = complaints, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BootseerError):
            raise FileSystemError(self._complaints.number(error, self._what)) from error


def inode_of(path: str) -> Inode:
    """The inode of a path within any tree: 63 bits of its hash, never the root's."""
    number = xxhash.xxh3_64_intdigest(os.fsencode(path)) & INODE_MASK
    return Inode(number if number > ROOT else number + 2)
