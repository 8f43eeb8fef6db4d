"""A mounted folder of a store that files can be saved into: written once, from start to end.

A file becomes visible to others when its descriptor is closed, whole: that is when `close` tells
of errors, too. Until then it is in this mount alone. Writing elsewhere than at the end of what
was written gives ESPIPE, and then nothing of it is published. What comes after a close, by
another descriptor of the same opening (a shell's `(a; b) > file`), makes the file anew with the
bytes before. Only the process that wrote publishes by a close: one that it forked closes what it
inherited at any time. A file whose server died while it was written is not published, and its
`close` fails with EIO.

A file may be renamed while it is written, as safetensors does: it is published under its last
name. One that is removed is not published, and who writes it has ESTALE. `ftruncate` before the
first byte says how many there will be; with fewer, `close` fails. A folder in which a file is
being written cannot be renamed (EBUSY).

Created files get inode numbers by chance, for nobody knows their bytes yet. A file that is
written anew keeps its inode, and so its pages: who read what was before has ESTALE from then on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.operations import (
    ROOT,
    Attr,
    Data,
    FileSystemError,
    Handle,
    Inode,
    Later,
    Opened,
    WritableOperations,
)
from bootseer.fuse.serve.requesters import closes_because_killed
from bootseer.storage.retry import limited
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import BadFieldError
from bootseer.stripedfs.format.manifest import Attributes, Link, inside
from bootseer.stripedfs.format.pointer import SUFFIX
from bootseer.stripedfs.mount.inodes import Node, base_of, below, stamp_of
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.mount.settings import DEADLINE_S
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import Found
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.dcp_files import StagedFile, is_staged
from bootseer.stripedfs.write.saved_file import Saving
from bootseer.stripedfs.write.write_settings import WriteSettings

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher

WRITE_HANDLE = 0x5A5A5 << 44
WRITE_MASK = 0xFFFFF << 44
FREE_BYTES = 1 << 50
"""What `statfs` calls free: a store does not say, and programs ask before they save."""
METADATA_BYTES = namespace.METADATA.encode()
RENAME_NOREPLACE = 1
FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""What is shown where nothing was set."""
FALLOC_FL_KEEP_SIZE = 1
FOLDER_NAME_BYTES = 255
FILE_NAME_BYTES = FOLDER_NAME_BYTES - len(SUFFIX)
"""Of a file's name, as its stripes lie in a folder of that name and the suffix."""
LINK_TARGET_BYTES = 1024
"""Of a symbolic link; the object that says it has 4 KiB, six for a byte at the worst."""
WRITING = WriteSettings()


class SavedSet:
    """A distributed checkpoint that is being saved over the one in its folder; see `dcpsets`."""

    def __init__(self) -> None:
        self.staged: dict[bytes, tuple[Node, StagedFile]] = {}
        """Files of it that were begun here, by their names; no folder lists them."""
        self.metadata_removed = False
        """Its saver has removed the `.metadata` of before, which stays until there is a new one."""


class WritableTree(StripedTree, WritableOperations):
    """A folder of a store that files can be saved into; see the module text."""

    _read_only = False
    max_name_bytes = FILE_NAME_BYTES

    def __init__(
        self,
        store: Store,
        name: str,
        root: Found,
        fetcher: Fetcher,
        *,
        writing: WriteSettings = WRITING,
        deadline_s: float = DEADLINE_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            # Through the page cache, or nothing but what is mapped privately could be mapped.
            store,
            name,
            root,
            fetcher,
            direct_bytes=sys.maxsize,
            deadline_s=deadline_s,
            say=say,
        )
        self._writing = writing
        self._fetcher = fetcher
        self._say = say
        self._lock = threading.Lock()
        self._saving: dict[Handle, Saving] = {}
        self._sets: dict[Inode, SavedSet] = {}
        self._hidden: dict[Inode, set[bytes]] = {}
        """Files of whole directories that were removed here: others see them until all go."""

    # --- one file -----------------------------------------------------------------------------

    def create(self, parent: Inode, name: bytes, mode: int, flags: int) -> tuple[Attr, Opened]:
        with self._answered("create"):
            folder = self._changeable(self.node(parent))
            known = self.listing(folder).get(name)
            if known is not None and flags & os.O_EXCL:
                raise FileSystemError(errno.EEXIST)
            if self._begins_staged(folder, name):
                before = self.nodes.get(self.listing(folder).get(name))
                node, opened = self._stage(folder, name, before)
                self.nodes.refer(node.inode)
                return self._attr(node), opened
            if known is not None:
                node = self._changeable(self.node(known))
                if node.found.link:  # made by others a moment ago: the kernel shall follow it
                    raise FileSystemError(errno.ESTALE)
                opened = self._write_handle(node, flags | os.O_TRUNC)
            else:
                with self.nodes.lock:  # no store knows it: a listing must find it being written
                    node = self._new(folder, name)
                    if mode != FILE_MODE:
                        node.found = node.found._replace(attributes=Attributes(mode))
                    opened = self._write_handle(node, flags | os.O_TRUNC)
            self.nodes.refer(node.inode)
            return self._attr(node), opened

    def open(self, inode: Inode, flags: int) -> Opened:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            with self._answered("open"):
                node = self.node(inode)
                self._settle(node)
                if self._staged_as(node) is not None:
                    raise FileSystemError(errno.EBUSY)
            return super().open(inode, flags)
        with self._answered("open"):
            node = self.node(inode)
            parent = self.nodes.get(node.parent)
            if flags & os.O_TRUNC and parent is not None and self._begins_staged(parent, node.name):
                return self._stage(parent, node.name, node)[1]
            self._changeable(node)
            if node.found.is_folder:
                raise FileSystemError(errno.EISDIR)
            if node.found.link:
                raise FileSystemError(errno.ELOOP)
            return self._write_handle(node, flags)

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | memoryview | None:
        writing = handle & WRITE_MASK == WRITE_HANDLE
        if writing and (self.files.get(handle) is None or self._saving_of(handle).touched):
            # Opened for both: only what was there before can be read, until something is written.
            raise FileSystemError(errno.EBADF)
        return super().read(inode, handle, offset, size, later)

    def write(
        self, inode: Inode, handle: Handle, offset: int, data: memoryview, *, owner: int = 0
    ) -> int:
        saving = self._saving_of(handle)
        with self._answered("write"), saving.lock:
            try:
                return saving.write(offset, data, owner)
            except BaseException:  # whatever it is: the name is what it was before
                self._give_up(saving)
                raise

    def flush(self, inode: Inode, handle: Handle, *, owner: int = 0, thread: int = 0) -> None:
        if handle & WRITE_MASK != WRITE_HANDLE:
            return
        saving = self._saving_of(handle)
        with self._answered("close"), saving.lock:
            saving.check()
            if not saving.written_by(owner):
                return  # a child closes what it inherited; the writer goes on
            if saving.touched and self._is_orphaned(saving, thread):
                return
            saving.check_whole()
            saving.flushed = True
            if saving.size_bytes:
                # An empty file waits for its last descriptor: a shell closes one before it writes.
                self._publish(saving)

    def _is_orphaned(self, saving: Saving, thread: int) -> bool:
        """Whether its writer was killed; FileSystemError(EIO) where that could not be told."""
        why = "its writer was killed"
        unknown: OSError | None = None
        try:
            saving.orphaned = closes_because_killed(thread)
        except OSError as error:  # what is there is whole for certain, and who lives is told
            why = f"whether its writer was killed could not be told ({error}); save it again"
            unknown, saving.orphaned = error, True
        if saving.orphaned and self._say is not None:
            self._say(f"{saving.node.found.name} is not published: {why}")
        if unknown is not None:
            raise FileSystemError(errno.EIO) from unknown
        return saving.orphaned

    def fallocate(self, handle: Handle, offset: int, length: int, mode: int) -> None:
        """Before the first byte it announces how many there will be, as `ftruncate` does."""
        saving = self._saving_of(handle)
        with self._answered("fallocate"), saving.lock:
            saving.check()
            if mode & ~FALLOC_FL_KEEP_SIZE:
                raise FileSystemError(errno.EOPNOTSUPP)
            if mode or offset + length <= max(saving.size_bytes, saving.promised_bytes):
                return
            if not saving.touched or saving.size_bytes:
                raise FileSystemError(errno.ESPIPE)  # and nothing is lost of what was written
            saving.truncate(offset + length)

    def fsync(self, inode: Inode, handle: Handle) -> None:
        """Only a closed file is durable; this tells of errors met so far."""
        if handle & WRITE_MASK == WRITE_HANDLE:
            saving = self._saving_of(handle)
            with self._answered("fsync"), saving.lock:
                saving.check()

    def release(self, inode: Inode, handle: Handle) -> None:
        saving = self._saving.get(handle)
        if saving is None:
            super().release(inode, handle)
            return
        try:
            with self._answered("close"), saving.lock:
                if saving.orphaned:
                    self._give_up(saving)
                else:
                    self._publish(saving)
        except BaseException:  # whatever it is: nothing of it becomes visible any more
            self._give_up(saving)
            raise
        finally:
            # Last, so that who opens it meanwhile waits for this one's end.
            self._saving.pop(handle, None)
            self.files.drop(handle)

    def truncate(self, inode: Inode, size: int) -> Attr:
        with self._answered("truncate"):
            node = self._changeable(self.node(inode))
            if size == self._attr(node).size_bytes:
                return self._attr(node)
            writers = [s for s in list(self._saving.values()) if s.node.inode == node.inode]
            for saving in writers:
                with saving.lock:
                    try:
                        saving.truncate(size)
                    except BaseException:  # as in `write`
                        self._give_up(saving)
                        raise
            if size > self._attr(node).size_bytes and not writers:
                raise FileSystemError(errno.ESPIPE)
            if not writers:
                saving = Saving(self.store, node, self._writing, self._fetcher)
                saving.cut(size)
                self._publish(saving)
            return self._attr(node)

    def setattr(self, inode: Inode, *, mode: int | None, mtime_ns: int | None) -> Attr:
        with self._answered("setattr"):
            node = self.node(inode)
            if self._staged_as(node) is not None:
                raise FileSystemError(errno.EPERM)  # they belong to what is published whole
            self._changeable(node)
            if len(node.name) > FILE_NAME_BYTES:  # a folder: nothing can lie beside it
                raise FileSystemError(errno.ENAMETOOLONG)
            given = Attributes(mode, mtime_ns)
            writing = self._written(node)
            if writing is not None:
                before = writing.attributes
                writing.attributes = Attributes(
                    before.mode if mode is None else mode,
                    before.mtime_ns if mtime_ns is None else mtime_ns,
                )
                node.found = node.found._replace(attributes=writing.attributes)
            elif node.inode == ROOT:  # nothing of the store stands for it
                before = node.found.attributes or Attributes()
                mode = before.mode if mode is None else mode
                mtime_ns = before.mtime_ns if mtime_ns is None else mtime_ns
                node.found = node.found._replace(attributes=Attributes(mode, mtime_ns))
            else:
                found = self._look(node.found.name)._replace(attributes=node.found.attributes)
                node.found = rename_remove.set_attributes(self.store, found, given)
                with self.nodes.lock:
                    self.nodes.touch(node.parent, node.name)
            return self._attr(node)

    # --- names --------------------------------------------------------------------------------

    def mkdir(self, parent: Inode, name: bytes, mode: int) -> Attr:
        with self._answered("mkdir"):
            folder = self._changeable(self.node(parent))
            if name in self.listing(folder):
                raise FileSystemError(errno.EEXIST)
            # A mode of its own is kept in a file beside the folder, whose name is longer.
            has_mode = mode & 0o7777 != FOLDER_MODE
            target = self._name(folder, name, is_alone=not has_mode)
            self.store.mkdir(target)
            node = self.nodes.add(folder, name, Found(target, 0, time.time(), True))
            if has_mode:
                given = Attributes(mode & 0o7777)
                node.found = rename_remove.set_attributes(
                    self.store, self._look(node.found.name), given
                )
            self.nodes.refer(node.inode)
            return self._attr(node)

    def symlink(self, parent: Inode, name: bytes, target: bytes) -> Attr:
        with self._answered("symlink"):
            folder = self._changeable(self.node(parent))
            if name in self.listing(folder):
                raise FileSystemError(errno.EEXIST)
            found = self._name(folder, name)
            self._check_target(folder, name, os.fsdecode(target))
            link = Link(os.fsdecode(target), time.time_ns())
            if len(target) > LINK_TARGET_BYTES:
                raise FileSystemError(errno.ENAMETOOLONG)
            rename_remove.link(self.store, found, link)
            node = self.nodes.add(folder, name, self._look(found))
            self.nodes.refer(node.inode)
            return self._attr(node)

    @staticmethod
    def _check_target(folder: Node, name: bytes, target: str) -> None:
        """Raise FileSystemError(EXDEV) for a target that is absolute or not in this mount."""
        try:
            inside(below(folder, os.fsdecode(name)), target)
        except BadFieldError as error:
            raise FileSystemError(errno.EXDEV) from error

    def unlink(self, parent: Inode, name: bytes) -> None:
        with self._answered("unlink"):
            folder = self._changeable(self.node(parent))
            node = self.child(folder, name)
            if self._unlink_member(folder, node):
                return
            self._changeable(node)
            if node.found.is_folder:
                raise FileSystemError(errno.EISDIR)
            self._written(node)
            with self._forsaken(node):
                try:
                    rename_remove.remove(self.store, self._look(node.found.name))
                except NotFoundError:
                    pass  # somebody else was quicker
            self.nodes.remove(node)

    def rmdir(self, parent: Inode, name: bytes) -> None:
        with self._answered("rmdir"):
            node = self.child(self._changeable(self.node(parent)), name)
            if not node.found.is_folder:
                raise FileSystemError(errno.ENOTDIR)
            self.nodes.outdate(node)
            saved_set = self._sets.get(node.inode)
            left = dict(self.listing(node))
            if saved_set is not None and saved_set.metadata_removed:
                left.pop(os.fsencode(namespace.METADATA), None)
            if left:
                raise FileSystemError(errno.ENOTEMPTY)
            self._changeable(node)
            self._drop_set(node)
            if namespace.METADATA.encode() in self.listing(node):
                metadata = self.child(node, namespace.METADATA.encode())
                if metadata.found.tree is None:
                    rename_remove.remove(self.store, self._look(metadata.found.name))
            self._remove_folder(node)
            self._hidden.pop(node.inode, None)
            self.nodes.remove(node)

    def rename(
        self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int
    ) -> None:
        with self._answered("rename"):
            if flags & ~RENAME_NOREPLACE:
                raise FileSystemError(errno.EINVAL)
            node = self._changeable(self.child(self._changeable(self.node(parent)), name))
            writing = self._written(node)
            staged = self._staged_as(node)
            if staged is not None:
                if writing is not None or (parent, METADATA_BYTES) != (new_parent, new_name):
                    raise FileSystemError(errno.EBUSY)
                self._publish_set(self.node(parent), staged)
                return
            self._settle_below(node)
            folder = self._changeable(self.node(new_parent))
            inode = self.listing(folder).get(new_name)
            if inode == node.inode:
                return
            over = None if inode is None else self.node(inode)
            if over is not None:
                self._check_over(node, over, flags)
            is_alone = node.found.is_folder and node.found.attributes is None
            target = self._name(folder, new_name, is_alone=is_alone)
            self._drop_set(node)
            if node.found.link:
                self._check_target(folder, new_name, node.found.link)
            with contextlib.ExitStack() as stack:
                if over is not None:
                    stack.enter_context(self._forsaken(over))
                if writing is not None:
                    stack.enter_context(writing.lock)
                stack.enter_context(self.files.moves())
                found = self._moved(node, target, writing)
                if over is not None:
                    self.nodes.remove(over)
                self.nodes.move(node, folder, new_name, found)
                self._follow(node)
                if found.version is not None:  # the version lies elsewhere: so do its files
                    self.nodes.outdate(node)

    def _follow(self, moved: Node) -> None:
        """Whoever reads a file that was moved, or that lies below what was, goes on with it."""
        with limited(self._deadline_s):  # all of them together: others wait for this rename
            for place in self.files.places():
                node = self.nodes.get(Inode(place)) if isinstance(place, int) else None
                if node is None or not (node is moved or node.path.startswith(f"{moved.path}/")):
                    continue
                if not node.listed:  # it was removed or replaced: others have its name
                    continue
                # A version keeps its own name, in whichever folder it lies by now.
                version = node.found.version
                of_it = "" if version is None else version.folder.rpartition("/")[2]
                with contextlib.suppress(BootseerError):
                    source = namespace.source_of(self.store, node.found)
                    if source.size_bytes == node.found.size_bytes and source.key.endswith(of_it):
                        self.files.move(place, source, self._where(node))

    def _settle_below(self, folder: Node) -> None:
        """As `_settle`, of all that is written below a folder, as drafts have its present name."""
        for saving in self._unpublished():
            taken = (saving.node.found, *(each for _, each in saving.left))
            if any(each.name.startswith(f"{folder.found.name}/") for each in taken):
                self._settle(saving.node)

    def _look(self, name: str) -> Found:
        """What the store holds under a name; a link is what it is, for the kernel follows it."""
        return namespace.look(self.store, name, follow=False)

    def _moved(self, node: Node, target: str, writing: Saving | None) -> Found:
        """On the store; what is being written only later, when it is published."""
        if writing is None or not writing.touched:  # or no more
            found = self._look(node.found.name)._replace(attributes=node.found.attributes)
            rename_remove.move(self.store, found, target)
            return self._look(target)._replace(attributes=node.found.attributes)
        try:
            before = self._look(node.found.name)
        except NotFoundError:
            before = None  # nothing was there before it
        writing.move(target, None if before is None else (node.parent, before))
        return node.found._replace(name=target)

    def _check_over(self, node: Node, over: Node, flags: int) -> None:
        if flags & RENAME_NOREPLACE:
            raise FileSystemError(errno.EEXIST)
        self._settle(over)
        if over.found.is_folder and not node.found.is_folder:
            raise FileSystemError(errno.EISDIR)
        if node.found.is_folder and not over.found.is_folder:
            raise FileSystemError(errno.ENOTDIR)
        if over.found.is_folder:
            if over.found.version is not None or self.listing(over):
                raise FileSystemError(errno.ENOTEMPTY)
            self._remove_folder(over)

    def _remove_folder(self, node: Node) -> None:
        try:
            rename_remove.remove(self.store, node.found)
        except BootseerError as error:
            hidden = rename_remove.held(self.store, node.found.name)
            if not hidden:
                raise
            if self._say is not None:
                self._say(f"{node.found.name} stays: it holds {', '.join(hidden)}")
            raise FileSystemError(errno.ENOTEMPTY) from error

    # --- distributed checkpoints, which are published whole ------------------------------------

    def child(self, parent: Node, name: bytes) -> Node:
        try:
            return super().child(parent, name)
        except FileSystemError:
            saved_set = self._sets.get(parent.inode)
            if saved_set is None or name not in saved_set.staged:
                raise
            return saved_set.staged[name][0]

    def _begins_staged(self, folder: Node, name: bytes) -> bool:
        """Whether a file that is written from its start is part of a checkpoint over another."""
        if not is_staged(os.fsdecode(name)) or folder.inode == ROOT or folder.path == "":
            return False
        parent = self.nodes.get(folder.parent)
        if parent is not None and folder.found.version is None:
            # Who else saves into it may have published it a moment ago.
            self.nodes.outdate(folder)
            self.nodes.outdate(parent)
            self.listing(parent)
        if folder.found.version is not None:
            return folder.found.beside
        there = [os.fsdecode(each) for each in self.listing(folder)]
        shards = (each != namespace.METADATA and namespace.is_member(each) for each in there)
        return namespace.METADATA in there and any(shards)

    def _stage(self, folder: Node, name: bytes, before: Node | None) -> tuple[Node, Opened]:
        """Begin a file of a set. The one of before stays where it is, under another inode."""
        if before is not None:
            self._settle(before)
        saved_set = self._sets.setdefault(folder.inode, SavedSet())
        earlier = saved_set.staged.get(name)
        if earlier is not None:
            if self._written(earlier[0]) is not None:
                raise FileSystemError(errno.EBUSY)
            earlier[1].abort()
        base = os.fsdecode(name)
        found = Found(f"{folder.found.name}/{base}", 0, time.time(), False)
        if before is None:
            node = self.nodes.add_unlisted(folder, name, found)
        elif earlier is not None and earlier[0] is before:
            node = before
            node.found = found
        else:
            node = before
            if self.listing(folder).get(name) == node.inode:  # else it was replaced by others
                self.nodes.supersede(node)
            self.files.outdate(node.inode)
            node.found, node.key = found, ""
        staged = StagedFile(self.store, folder.found.name, base, self._writing)
        saved_set.staged[name] = (node, staged)
        self._hidden.pop(folder.inode, None)
        saving = Saving(self.store, node, self._writing, self._fetcher, staged)
        saving.begin()
        handle = Handle(WRITE_HANDLE | secrets.randbits(43))
        with self._lock:
            self._saving[handle] = saving
        return node, Opened(handle, direct=True, keep_cache=False)

    def _staged_as(self, node: Node) -> StagedFile | None:
        """What a node's bytes wait in until its set is published; None for any other."""
        saved_set = self._sets.get(node.parent)
        found = None if saved_set is None else saved_set.staged.get(node.name)
        return found[1] if found is not None and found[0] is node else None

    def _publish_copied(self, inode: Inode) -> None:
        """Publish a set whose `.metadata` was written under its own name, once all is there.

        All by one process: a copy that was cut short has nothing to do with a save after it.
        """
        folder, saved_set = self.nodes.get(inode), self._sets.get(inode)
        if folder is None or saved_set is None or METADATA_BYTES not in saved_set.staged:
            return
        metadata = saved_set.staged[METADATA_BYTES][1]
        copied = {
            os.fsdecode(name)
            for name, (_, staged) in saved_set.staged.items()
            if not staged.open and staged.owner == metadata.owner
        }
        if not metadata.open and metadata.named() <= copied and not metadata.missing():
            self._publish_set(folder, metadata)

    def _publish_set(self, folder: Node, metadata: StagedFile) -> None:
        missing = metadata.missing()
        if missing:
            if self._say is not None:
                self._say(
                    f"{folder.found.name} is not published: its .metadata names "
                    f"{', '.join(missing[:5])}, which nobody has saved; save it again"
                )
            raise FileSystemError(errno.EIO)
        metadata.publish()
        self._drop_set(folder)
        found = self._look(folder.found.name)
        with self.nodes.lock:
            folder.found = found
            self.nodes.outdate(folder)
            self.nodes.touch(folder.parent, folder.name)

    def _drop_set(self, folder: Node) -> None:
        """What was saved for it and not published will not be."""
        saved_set = self._sets.pop(folder.inode, None)
        for _, staged in () if saved_set is None else saved_set.staged.values():
            staged.abort()

    def _unlink_member(self, folder: Node, node: Node) -> bool:
        """Take a file of a set away as far as this mount shows it; False for any other file."""
        saved_set = self._sets.get(folder.inode)
        staged = self._staged_as(node)
        if saved_set is not None and staged is not None:
            if self._written(node) is not None:
                raise FileSystemError(errno.EBUSY)
            del saved_set.staged[node.name]
            staged.abort()
            return True
        if saved_set is not None and saved_set.staged and node.name == METADATA_BYTES:
            saved_set.metadata_removed = True
            return True
        if not folder.found.beside or node.found.tree is None:
            return False
        self._hidden.setdefault(folder.inode, set()).add(node.name)
        self.nodes.outdate(folder)
        return True

    # --- inside -------------------------------------------------------------------------------

    def statfs(self) -> tuple[int, int, int, int]:
        total, _, files, _ = super().statfs()
        return total + FREE_BYTES, FREE_BYTES, files + (1 << 30), 1 << 30

    def destroy(self) -> None:
        for saving in list(self._saving.values()):
            with saving.lock:
                saving.abort()
        for inode, saved_set in list(self._sets.items()):
            folder = self.nodes.get(inode)
            if saved_set.staged and self._say is not None:
                shown = b", ".join(saved_set.staged).decode(errors="replace")
                where = "" if folder is None else folder.found.name
                self._say(f"{shown} of {where} is not published: no .metadata came after it")
            for _, staged in saved_set.staged.values():
                staged.abort()
        super().destroy()

    def _filled(self, node: Node, found: Sequence[Found], *, outdated: bool) -> dict[bytes, Inode]:
        """Less what goes as soon as that is published which was moved away from it."""
        leaving = {
            (each.name, stamp_of(each))
            for saving in list(self._saving.values())
            for _, each in saving.left
        }
        said = [each for each in found if (each.name, stamp_of(each)) not in leaving]
        hidden = self._hidden.get(node.inode)
        if hidden:
            said = [each for each in said if base_of(each) not in hidden]
        return super()._filled(node, said, outdated=outdated)

    def _kept(self, node: Node, found: Sequence[Found]) -> dict[bytes, Node]:
        """Files that are being written may be on no store yet, but are in their folder."""
        there = {base_of(each) for each in found}
        return {
            saving.node.name: saving.node
            for saving in list(self._saving.values())
            if saving.node.parent == node.inode
            and saving.staged is None
            and (saving.touched or (saving.node.name in there and not saving.failed))
        }

    def _attr(self, node: Node) -> Attr:
        attr = super()._attr(node)
        for saving in self._unpublished():
            if saving.node.inode == node.inode:
                return attr._replace(size_bytes=max(saving.size_bytes, saving.promised_bytes))
        return attr

    def _unpublished(self) -> list[Saving]:
        return [saving for saving in list(self._saving.values()) if saving.touched]

    def _saving_of(self, handle: Handle) -> Saving:
        found = self._saving.get(handle)
        if found is None:
            raise FileSystemError(errno.EIO)  # it was being written when the server died
        return found

    def _settle(self, node: Node) -> None:
        """Publish what waits for its last descriptor alone; refuse what is being written."""
        if self._written(node) is not None:
            raise FileSystemError(errno.EBUSY)

    def _written(self, node: Node) -> Saving | None:
        """Publish what waits for its last descriptor alone; what is being written, if anything."""
        for saving in self._unpublished():
            if saving.node.inode == node.inode:
                with saving.lock:
                    if saving.orphaned:
                        self._give_up(saving)
                    elif saving.flushed:
                        self._publish(saving)
                    elif saving.touched:
                        return saving
        return None

    def _give_up(self, saving: Saving, number: int = errno.EIO) -> None:
        """Nothing of it becomes visible; what was before may still be there."""
        saving.fail(FileSystemError(number))
        saved_set = self._sets.get(saving.node.parent)
        if saved_set is not None and self._staged_as(saving.node) is not None:
            del saved_set.staged[saving.node.name]
        for folder in (saving.node.parent, *(each for each, _ in saving.left)):
            self.nodes.outdate(self.nodes.get(folder))
        saving.left.clear()

    def _publish(self, saving: Saving) -> None:
        found = saving.publish()
        if found is None:
            return
        with self.nodes.lock:  # from here on the store tells of it, and no listing of before may
            saving.settle(found)
            self.nodes.touch(saving.node.parent, saving.node.name)
        if saving.problem is not None:
            self.nodes.outdate(self.nodes.get(saving.node.parent))  # what is there is asked anew
            if self._say is not None:
                self._say(
                    f"{saving.node.found.name} is published, but what was set of it (its mode, its "
                    f"time) may be lost: {saving.problem}"
                )
        saving.node.key = ""
        self.files.outdate(saving.node.inode)
        self._remove_left(saving)
        if saving.staged is not None:
            saving.staged.owner = saving.writer
            self._publish_copied(saving.node.parent)

    def _remove_left(self, saving: Saving) -> None:
        saving.remove_left()
        with self.nodes.lock:
            for folder, each in saving.left:
                self.nodes.touch(folder, base_of(each))
            saving.left.clear()

    @contextlib.contextmanager
    def _forsaken(self, node: Node) -> Iterator[None]:
        """Who has a file open for writing that goes now cannot write any more, unless it stays."""
        savings = [each for each in list(self._saving.values()) if each.node.inode == node.inode]
        for saving in savings:
            with saving.lock:  # published until then, or never
                saving.removed = True
                if saving.touched:
                    self._remove_left(saving)
                    self._give_up(saving, errno.ESTALE)
        try:
            yield
        except BaseException:
            for saving in savings:
                saving.removed = False
            raise

    def _changeable(self, node: Node) -> Node:
        """Refuse what lies in a directory checkpoint."""
        if node.found.tree is not None and node.found.entry is not None:
            raise FileSystemError(errno.EROFS)
        if node.found.is_folder and node.found.version is not None and node.parent == node.inode:
            raise FileSystemError(errno.EROFS)
        return node

    @staticmethod
    def _name(folder: Node, name: bytes, *, is_alone: bool = False) -> str:
        """A new name on the store; nobody knows yet whether the file will be striped.

        `is_alone`: nothing will ever lie beside it under a longer name.
        """
        if len(name) > (FOLDER_NAME_BYTES if is_alone else FILE_NAME_BYTES):
            raise FileSystemError(errno.ENAMETOOLONG)
        base = os.fsdecode(name)
        whole = folder.found.version is not None
        if whole and (not folder.found.beside or namespace.is_member(base)):
            raise FileSystemError(errno.EROFS)
        if namespace.is_reserved(base):
            raise FileSystemError(errno.EINVAL)  # names of stripes, and of what is being written
        return f"{folder.found.name}/{base}" if folder.found.name else base

    def _write_handle(self, node: Node, flags: int) -> Opened:
        self._settle(node)
        saving = Saving(self.store, node, self._writing, self._fetcher)
        handle = Handle(WRITE_HANDLE | secrets.randbits(43))
        if flags & os.O_TRUNC:
            saving.begin()
        else:
            saving.size_bytes = node.found.size_bytes
            if flags & os.O_ACCMODE == os.O_RDWR:
                self.files.adopt(handle, self.source(node), self._where(node), handle)
        with self._lock:
            self._saving[handle] = saving
        return Opened(handle, direct=True, keep_cache=False)

    def _new(self, folder: Node, name: bytes) -> Node:
        return self.nodes.add(folder, name, Found(self._name(folder, name), 0, time.time(), False))
