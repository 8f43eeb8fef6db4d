"""A folder of a store, a directory checkpoint or a single file as a mounted, read-only tree.

Inode numbers follow from paths and versions (see `inodes`), so a process started later on the same
tree serves the same mount. Folders are read when they are looked into; those of a store (a
directory checkpoint never changes) again after `REFRESH_S`, so that new checkpoints appear.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    NotFoundError,
    StoreUnavailableError,
)
from bootseer.fuse.operations import (
    ROOT,
    Attr,
    Data,
    Entry,
    FileSystemError,
    Handle,
    Inode,
    Later,
    Opened,
    Operations,
)
from bootseer.storage.retry import limited
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import BadFieldError
from bootseer.stripedfs.format.manifest import (
    Attributes,
    TreeFile,
    TreeFolder,
    TreeLink,
    check_target,
)
from bootseer.stripedfs.mount import xattrs
from bootseer.stripedfs.mount.inodes import AskedListing, Node, Nodes, base_of, readable
from bootseer.stripedfs.mount.open_files import ONE_READ_BYTES, Answered, Complaints, OpenFiles
from bootseer.stripedfs.mount.passthrough_files import Passing
from bootseer.stripedfs.mount.settings import DEADLINE_S, DIRECT_BYTES
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo
from bootseer.stripedfs.read.open import is_source_of, open_file
from bootseer.stripedfs.read.sources import FileSource

if TYPE_CHECKING:
    from bootseer.blocks.cache.sealed_objects import Sealed
    from bootseer.blocks.fetch.fetcher import Fetcher

REFRESH_S = 30.0
AGAIN_S = 5.0
"""After a store could not be asked, known names are used this long before it is asked again."""
MOST_ASKED = 3
"""How often a folder is read or looked at for one request, while others rename or replace it."""
MOST_SURVEYED = 10_000
"""Folders that are searched for an inode that an earlier process knew."""


class Companion(Protocol):
    """What works beside a tree's readers."""

    def note_open(self, node: Node) -> None:
        """A reader opens a file; must be quick."""

    def close(self) -> None:
        """The mount has ended."""


class StripedTree(Operations):
    """`Operations` over `root`, what `name` stands for; a file is served as the one file of `/`.

    Files of `direct_bytes` and more bypass the page cache. Faults that readers get as EIO are
    reported to `say` in words. The fetcher is closed by its maker, after the mount has ended. What
    is asked of the store for one request is tried for `deadline_s`. `root_source` is that of a file
    `root`, where it has been opened already. `inode_a_path`: the server numbers files by their
    paths, so that a file and its replacement share pages. `passing_from`: the fetcher's node cache,
    whose complete files the kernel may read by itself.
    """

    may_block = True

    def __init__(
        self,
        store: Store,
        name: str,
        root: PathInfo,
        fetcher: Fetcher,
        *,
        direct_bytes: int = DIRECT_BYTES,
        deadline_s: float = DEADLINE_S,
        say: Callable[[str], None] | None = None,
        root_source: FileSource | None = None,
        inode_a_path: bool = False,
        passing_from: str = "",
    ) -> None:
        self.store = store
        self._opened_root = (root, root_source)
        self._name_of_root = name
        self._direct_bytes = direct_bytes
        self._deadline_s = deadline_s
        self._inode_a_path = inode_a_path
        self.complaints = Complaints(say)
        self.files = OpenFiles(fetcher, self.complaints)
        self._opened = self.files.by_handle
        self._passing: Passing | None = None
        if passing_from:
            opened = self._opened
            self._passing = Passing(
                passing_from, fetcher, busy=lambda: bool(opened), say=say or (lambda _: None)
            )
        self._owner = (os.geteuid(), os.getegid())
        self._began_ns = time.time_ns()
        self._surveying = threading.Lock()
        self._absent: dict[Inode, float] = {}
        self._away_until_s = 0.0
        self._single = not root.is_folder
        self.nodes = Nodes(root)
        if self._single:
            self.nodes.fill(self.nodes.root, [root], {})
        self._companion: Companion | None = None

    def set_companion(self, companion: Companion) -> None:
        """Tell `companion` of every opening from now on, and close it at the end."""
        self._companion = companion

    # --- names and attributes -----------------------------------------------------------------

    def lookup(self, parent: Inode, name: bytes) -> Attr:
        with self._answer("lookup"):
            for _ in range(MOST_ASKED):
                node = self.child(self.node(parent), name)
                if self.nodes.refer(node.inode):
                    return self._attr(node)
        raise FileSystemError(errno.ESTALE)

    def add_references(self, inodes: Iterable[Inode]) -> None:
        for inode in inodes:
            self.nodes.refer(inode)

    def getattr(self, inode: Inode) -> Attr:
        with self._answer("getattr"):
            return self._attr(self.node(inode))

    def readlink(self, inode: Inode) -> bytes:
        with self._answer("readlink"):
            node = self.node(inode)
            entry = node.info.entry
            if node.info.link:
                return os.fsencode(self._kept_inside(node))
        if not isinstance(entry, TreeLink):
            raise FileSystemError(errno.EINVAL)
        return os.fsencode(entry.target)

    def _kept_inside(self, node: Node) -> str:
        """A link's target, chosen by a writer to the store; never out of this mount."""
        try:
            return check_target(node.path, node.info.link)
        except BadFieldError as error:
            self.complaints.number(CorruptDataError(f"it is not followed: {error}"), node.path)
            raise FileSystemError(errno.EXDEV) from error

    def readdir(self, inode: Inode) -> Sequence[Entry]:
        with self._answer("readdir"):
            node = self.node(inode)
            nodes = self.nodes.children(node, self.listing(node))
            return [Entry(child.name, self._attr(child)) for child in nodes]

    def statfs(self) -> tuple[int, int, int, int]:
        nodes = self.nodes.all()
        return sum(n.info.size_bytes for n in nodes[1:]), 0, len(nodes), 0

    def getxattr(self, inode: Inode, name: bytes) -> bytes:
        with self._answer("getxattr"):
            node = self.node(inode)
            # `ls -l` asks for the ACL of every file: no store is asked for what is never there.
            if name not in xattrs.names_of(node):
                raise FileSystemError(errno.ENODATA)
            if name == xattrs.URL:
                return os.fsencode(f"{self.store.url.rstrip('/')}/{node.info.name}")
            return xattrs.value_of(self.source(node), name)

    def listxattr(self, inode: Inode) -> Sequence[bytes]:
        with self._answer("listxattr"):
            return xattrs.names_of(self.node(inode))

    def forget(self, inode: Inode, count: int) -> None:
        self.nodes.forget(inode, count)

    def destroy(self) -> None:
        if self._companion is not None:
            self._companion.close()
        if self._passing is not None:
            self._passing.close()
        self.files.close()

    # --- files --------------------------------------------------------------------------------

    def open(self, inode: Inode, flags: int) -> Opened:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FileSystemError(errno.EROFS)
        with self._answer("open"):
            node = self.node(inode)
            if node.info.is_folder:
                raise FileSystemError(errno.EISDIR)
            source = self.source(node)
        if self._companion is not None:
            self._companion.note_open(node)
        # The kernel's pages are still good when they are of the same bytes.
        same = bool(source.key) and node.key == source.identity
        passed = self._pass(inode, source, keep_cache=same)
        if passed is not None:
            node.key = source.identity
            return passed
        direct = source.size_bytes >= self._direct_bytes
        place: object = self._where(node) if self._inode_a_path else inode
        if self._inode_a_path:
            self.files.outdate(place, but=source.identity)
        handle = self.files.add(source, self._where(node), place)
        node.key = source.identity
        return Opened(handle, direct=direct, keep_cache=same)

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | memoryview | None:
        opened = self._opened.get(handle)
        if opened is not None:
            return opened.read(offset, size, later)
        reply = later()  # a handle from an earlier process: opening its file may take time

        def revive() -> None:
            try:
                node = self.node(inode)
                opened = self.files.revive(handle, self.source(node), self._where(node), inode)
                opened.read_for(reply, offset, size)
            except Exception as error:  # whatever it is, the reader must not wait for ever
                reply.error(self.complaints.number(error, f"inode {inode}"))

        self.files.help(revive)
        return None

    def _pass(self, inode: Inode, source: FileSource, *, keep_cache: bool) -> Opened | None:
        """An opening that the kernel serves by passthrough; where it cannot, it asks us.

        `keep_cache` counts in the latter case.
        """
        passing = self._passing
        if passing is None:
            return None
        if source.size_bytes > ONE_READ_BYTES and self.files.is_open(inode):
            return None  # while we serve a file, the kernel has us serve each further opening
        sealed = passing.open_sealed(source)
        if sealed is None:
            return None
        handle = self.files.number(source)
        passing.keep(handle, sealed, source)
        direct = source.size_bytes >= self._direct_bytes
        return Opened(handle, direct, keep_cache, backing_fd=sealed.descriptor)

    def open_passed(self, source: FileSource) -> Sealed | None:
        """What the kernel will read by itself for a file, closed by the caller; None: we serve."""
        return self._passing.open_sealed(source) if self._passing is not None else None

    def release(self, inode: Inode, handle: Handle) -> None:
        source = self.files.drop(handle)
        if self._passing is not None:
            source = self._passing.drop(handle) or source
            if source is not None:
                self._passing.note_closed(source)

    def source(self, node: Node) -> FileSource:
        """Open a file. May wait for the store. FileSystemError(ESTALE): it was replaced.

        The kernel then looks up the name once more, and opens what has it by then.
        """
        info = node.info
        # The name is part of it, for a source asks for its bytes by name, and files are renamed.
        stamp = (
            info.name,
            info.version,
            info.entry,
            info.size_bytes,
            info.mtime_s,
            info.stamp,
        )
        with limited(self._deadline_s):
            source = self.files.source(node.inode, stamp, lambda: self._open_source(info))
        if is_source_of(info, source) and node.key in ("", source.identity):
            return source
        parent = self.nodes.get(node.parent)
        self.nodes.outdate(parent)
        if parent is not None:
            parent.cached.clear()
        raise FileSystemError(errno.ESTALE)

    def _open_source(self, info: PathInfo) -> FileSource:
        (root, source), self._opened_root = self._opened_root, (info, None)
        if source is not None and root == info:  # unless it was replaced since
            return source
        return open_file(self.store, info)

    # --- nodes --------------------------------------------------------------------------------

    def node(self, inode: Inode) -> Node:
        """The node of an inode; one that only an earlier process knew is searched for.

        Raises FileSystemError(ESTALE) when there is none, StoreUnavailableError when some folder
        that may hold it could not be read.
        """
        node = self.nodes.get(inode)
        if node is None and not self.nodes.was_removed(inode):
            node = self._survey(inode)
        if node is None:
            raise FileSystemError(errno.ESTALE)
        return readable(node)

    def child(self, parent: Node, name: bytes) -> Node:
        """A folder's entry. Raises FileSystemError(ENOENT); EIO or EACCES for an unreadable one."""
        for _ in range(MOST_ASKED):
            inode = self.listing(parent).get(name)
            node = self.nodes.get(inode)
            if node is not None:
                return readable(node)
            if inode is None:
                break
            # Else it was replaced or removed just now, and is listed again.
        raise FileSystemError(errno.ENOENT)

    def listing(self, node: Node) -> Mapping[bytes, Inode]:
        """A folder's entries; when they are old, one caller at a time reads them from the store.

        Meanwhile other callers get the old entries at once, or wait where there are none yet.
        """
        single = node.inode == ROOT and self._single
        if not node.info.is_folder and not single:
            raise FileSystemError(errno.ENOTDIR)
        with self.nodes.lock:
            known = node.children
            if known is not None and self._is_fresh(node):
                return known
            asked = node.asked
            if asked is None:
                mine = node.asked = AskedListing()
        if asked is not None:
            return known if known is not None else asked.wait()
        try:
            with limited(self._deadline_s):
                listed = self._ask_store(node, known)
            mine.answer(listed)
            return listed
        except BaseException as error:  # other callers wait for this answer, too
            mine.fail(error)
            raise
        finally:
            node.asked = None

    def _is_fresh(self, node: Node) -> bool:
        """Whether the listing is recent enough to be used."""
        now_s = time.monotonic()
        recent = now_s - node.listed_s <= REFRESH_S or now_s < self._away_until_s
        return bool(node.listed_s) and (node.is_fixed or recent)

    def _ask_store(self, node: Node, known: dict[bytes, Inode] | None) -> dict[bytes, Inode]:
        for left in reversed(range(MOST_ASKED)):
            with self.nodes.lock:
                began_s, changes = node.listed_s, node.changes
                node.touched.clear()
            try:
                infos = self._list_infos(node)
            except BootseerError as error:
                if node.changes != changes and left:
                    continue  # it was asked for under its former name
                if (
                    error.retryable
                ):  # else other folders would each wait as long for their known names
                    self._away_until_s = time.monotonic() + AGAIN_S
                if known is None:
                    raise
                if node.listed_s == began_s:
                    node.listed_s = time.monotonic() - REFRESH_S + AGAIN_S
                break  # an old listing is better than none
            best = [self._choose_info(node, each) for each in infos]
            with self.nodes.lock:
                if node.changes == changes or not left:
                    return self._fill_listing(node, best, outdated=node.changes != changes)
        return known or {}

    def _list_infos(self, node: Node) -> list[PathInfo]:
        if node.inode == ROOT and self._single:
            return [namespace.look_up(self.store, self._name_of_root)]
        before = info = node.info
        if info.version is not None:
            info = namespace.load_tree(self.store, info)
            with self.nodes.lock:
                if node.info is before:  # else it was renamed or replaced meanwhile
                    node.info = info
        return namespace.list_folder(self.store, info, node.cached)

    def _fill_listing(
        self, node: Node, infos: Sequence[PathInfo], *, outdated: bool
    ) -> dict[bytes, Inode]:
        """Make a folder's entries of a listing, but for names that this mount changed meanwhile.

        An outdated listing is used once, for lack of a newer one.
        """
        here = {each.name: each for each in self.nodes.children(node, node.children or {})}
        kept = {name: each for name, each in here.items() if name in node.touched}
        said = [each for each in infos if base_of(each) not in node.touched]
        listed = self.nodes.fill(node, said, {**kept, **self._entries_to_keep(node, said)})
        if outdated:
            self.nodes.outdate(node)
        return listed

    def _choose_info(self, folder: Node, info: PathInfo) -> PathInfo:
        """A listed entry; the earlier one of its name where the store cannot read it just now."""
        if info.problem is None:
            return info
        self.complaints.number(info.problem, info.name, reading=True)
        earlier = self.nodes.get((folder.children or {}).get(base_of(info)))
        if earlier is None or not info.problem.retryable:
            return info
        return earlier.info

    def _entries_to_keep(self, node: Node, infos: Sequence[PathInfo]) -> Mapping[bytes, Node]:
        """Entries that stay whatever the store says."""
        return {}

    def _survey(self, wanted: Inode) -> Node | None:
        """Search folder after folder for an inode; one caller at a time does so."""
        end_s = time.monotonic() + self._deadline_s
        if not self._surveying.acquire(timeout=self._deadline_s):
            return None
        try:
            node = self.nodes.get(wanted)
            if node is not None or time.monotonic() < self._absent.get(wanted, 0.0):
                return node
            with limited(end_s - time.monotonic()):
                node = self._search(wanted, end_s)
            if node is not None:
                self.nodes.refer(wanted)  # the caller has it from the kernel
                return node
            if len(self._absent) >= MOST_SURVEYED:
                self._absent.clear()
            self._absent[wanted] = time.monotonic() + REFRESH_S
            return None
        finally:
            self._surveying.release()

    def _search(self, wanted: Inode, end_s: float) -> Node | None:
        waiting, fault = deque([self.nodes.root]), None
        for _ in range(MOST_SURVEYED):
            if not waiting or time.monotonic() > end_s:
                break
            node = waiting.popleft()
            try:
                listed = self.listing(node)
            except NotFoundError:
                continue
            except BootseerError as error:  # it may be in another one
                fault = error
                continue
            wanted_node = self.nodes.get(wanted)
            if wanted_node is not None:
                return wanted_node
            waiting += [n for n in self.nodes.children(node, listed) if n.info.is_folder]
        if fault is not None:
            raise StoreUnavailableError(
                f"an inode of before is in no folder that could be read: {fault}"
            ) from fault
        return None

    def _attr(self, node: Node) -> Attr:
        info, entry = node.info, node.info.entry
        if info.problem is not None:
            return Attr(node.inode, 0, 0)  # of no kind: a listing shows its name alone
        folder = info.is_folder or node.inode == ROOT
        mode = 0o755 if folder else 0o644
        if isinstance(entry, (TreeFile, TreeFolder)):
            mode = entry.mode
        set_to = info.attributes or Attributes()
        if set_to.mode is not None:
            mode = set_to.mode
        mtime_ns = int(info.mtime_s * 1e9) if set_to.mtime_ns is None else set_to.mtime_ns
        kind = stat.S_IFDIR if folder else stat.S_IFREG
        size = 0 if folder else info.size_bytes
        if isinstance(entry, TreeLink):
            kind, mode, size = stat.S_IFLNK, 0o777, len(os.fsencode(entry.target))
        elif info.link:
            kind, mode, size = stat.S_IFLNK, 0o777, len(os.fsencode(info.link))
        elif self._read_only:
            mode &= ~0o7222
        return Attr(
            inode=node.inode,
            mode=kind | mode,
            size_bytes=size,
            mtime_ns=mtime_ns or self._began_ns,
            nlink=2 if folder else 1,
            uid=self._owner[0],
            gid=self._owner[1],
        )

    _read_only = True

    def _where(self, node: Node) -> str:
        return node.path or node.info.name

    def _answer(self, what: str) -> Answered:
        return Answered(self.complaints, what)
