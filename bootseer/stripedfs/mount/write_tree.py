"""A mounted folder of a store that files can be saved into: written once, from start to end.

A file becomes visible to others when its descriptor is closed, as a whole; `close` reports errors,
too. Until then it is in this mount alone. A write at any offset but the end of what was written
gives ESPIPE, and then nothing of the file is published. Bytes that follow a close, through another
descriptor of the same opening (a shell's `(a; b) > file`), publish the file once more, with the
earlier bytes in front. Only a close by the process that wrote publishes: a process that it forked
closes inherited descriptors at any time. A file whose server died while it was written is not
published, and its `close` fails with EIO.

A file may be renamed while it is written, as safetensors does: it is published under its last
name. A file that is removed is not published, and further writes get ESTALE. `ftruncate` before the
first byte announces the length; with fewer bytes, `close` fails. A folder in which a file is being
written cannot be renamed (EBUSY).

New files get random inode numbers, as their bytes are not known yet. A file that is written again
keeps its inode, and so its pages: readers of the previous bytes get ESTALE from then on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Sequence

from bootseer.blocks.fetch.fetcher import Fetcher
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
from bootseer.stripedfs.format.manifest import Attributes, Link, check_target
from bootseer.stripedfs.format.pointer import SUFFIX
from bootseer.stripedfs.mount.inodes import Node, base_of, below, stamp_of
from bootseer.stripedfs.mount.open_for_writing import (
    SaveState,
    WritableFile,
    WritableFiles,
    is_write_handle,
    new_write_handle,
)
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.mount.settings import DEADLINE_S
from bootseer.stripedfs.mount.staged_sets import METADATA_NAME, StagedSets
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo
from bootseer.stripedfs.read.open import open_file
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.dcp_files import StagedFile, is_staged
from bootseer.stripedfs.write.write_settings import WriteSettings

FREE_BYTES = 1 << 50
"""What `statfs` reports as free: stores do not say, and programs ask before they save."""
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


class WritableTree(StripedTree, WritableOperations):
    """A folder of a store that files can be saved into; see the module text."""

    _read_only = False
    max_name_bytes = FILE_NAME_BYTES

    def __init__(
        self,
        store: Store,
        name: str,
        root: PathInfo,
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
        self._say = say or _ignore
        self._sets = StagedSets(store, self.nodes, self._say)
        self._writable = WritableFiles(self.nodes, self.files, self._sets, self._say)

    # --- one file -----------------------------------------------------------------------------

    def create(self, parent: Inode, name: bytes, mode: int, flags: int) -> tuple[Attr, Opened]:
        with self._answer("create"):
            folder = self._check_changeable(self.node(parent))
            known = self.listing(folder).get(name)
            if known is not None and flags & os.O_EXCL:
                raise FileSystemError(errno.EEXIST)
            if self._begins_staged(folder, name):
                before = self.nodes.get(self.listing(folder).get(name))
                node, opened = self._stage(folder, name, before)
                self.nodes.refer(node.inode)
                return self._attr(node), opened
            if known is not None:
                node = self._check_changeable(self.node(known))
                if node.info.link:  # made by others a moment ago: the kernel must follow it
                    raise FileSystemError(errno.ESTALE)
                opened = self._open_for_writing(node, flags | os.O_TRUNC)
            else:
                with self.nodes.lock:  # no store knows it: a listing must find it being written
                    node = self._new(folder, name)
                    if mode != FILE_MODE:
                        node.info = node.info._replace(attributes=Attributes(mode))
                    opened = self._open_for_writing(node, flags | os.O_TRUNC)
            self.nodes.refer(node.inode)
            return self._attr(node), opened

    def open(self, inode: Inode, flags: int) -> Opened:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            with self._answer("open"):
                node = self.node(inode)
                self._writable.check_not_written(node)
                if self._sets.staged_file(node) is not None:
                    raise FileSystemError(errno.EBUSY)
            return super().open(inode, flags)
        with self._answer("open"):
            node = self.node(inode)
            parent = self.nodes.get(node.parent)
            if flags & os.O_TRUNC and parent is not None and self._begins_staged(parent, node.name):
                return self._stage(parent, node.name, node)[1]
            self._check_changeable(node)
            if node.info.is_folder:
                raise FileSystemError(errno.EISDIR)
            if node.info.link:
                raise FileSystemError(errno.ELOOP)
            return self._open_for_writing(node, flags)

    def read(
        self, inode: Inode, handle: Handle, offset: int, size: int, later: Later
    ) -> Data | memoryview | None:
        if is_write_handle(handle) and (
            self.files.get(handle) is None or self._file(handle).unpublished
        ):
            # Opened for both: only what was there before can be read, until something is written.
            raise FileSystemError(errno.EBADF)
        return super().read(inode, handle, offset, size, later)

    def write(
        self, inode: Inode, handle: Handle, offset: int, data: memoryview, *, owner: int = 0
    ) -> int:
        file = self._file(handle)
        with self._answer("write"), file.lock:
            try:
                return file.write(offset, data, owner)
            except BaseException:  # whatever it is: the name is what it was before
                self._writable.give_up(file)
                raise

    def flush(self, inode: Inode, handle: Handle, *, owner: int = 0, thread: int = 0) -> None:
        if not is_write_handle(handle):
            return
        file = self._file(handle)
        with self._answer("close"), file.lock:
            file.check()
            if not file.is_writer(owner):
                return  # a child closes what it inherited; the writer goes on
            if file.unpublished and self._is_orphaned(file, thread):
                return
            file.check_whole()
            file.note_closed()
            if file.size_bytes:
                # An empty file waits for its last descriptor: a shell closes one before it writes.
                self._writable.publish(file)

    def _is_orphaned(self, file: WritableFile, thread: int) -> bool:
        """Whether its writer was killed. FileSystemError(EIO): that cannot be determined."""
        name = file.node.info.name
        try:
            killed = closes_because_killed(thread)
        except OSError as error:  # only what is certainly whole is published
            file.note_writer(killed=True)
            self._say(
                f"{name} is not published: it could not be determined whether its writer was "
                f"killed ({error}); save it again"
            )
            raise FileSystemError(errno.EIO) from error
        file.note_writer(killed=killed)
        if killed:
            self._say(f"{name} is not published: its writer was killed")
        return killed

    def fallocate(self, handle: Handle, offset: int, length: int, mode: int) -> None:
        """Announce the length before the first byte, as `ftruncate` does."""
        file = self._file(handle)
        with self._answer("fallocate"), file.lock:
            file.check()
            if mode & ~FALLOC_FL_KEEP_SIZE:
                raise FileSystemError(errno.EOPNOTSUPP)
            if mode or offset + length <= max(file.size_bytes, file.promised_bytes):
                return
            if not file.unpublished or file.size_bytes:
                raise FileSystemError(errno.ESPIPE)  # and nothing is lost of what was written
            file.truncate(offset + length)

    def fsync(self, inode: Inode, handle: Handle) -> None:
        """Report the errors met so far; only a closed file is durable."""
        if is_write_handle(handle):
            file = self._file(handle)
            with self._answer("fsync"), file.lock:
                file.check()

    def release(self, inode: Inode, handle: Handle) -> None:
        file = self._writable.by_handle.get(handle)
        if file is None:
            super().release(inode, handle)
            return
        try:
            with self._answer("close"), file.lock:
                if file.state is SaveState.ORPHANED:
                    self._writable.give_up(file)
                else:
                    self._writable.publish(file)
        except BaseException:  # whatever it is: nothing of it becomes visible any more
            self._writable.give_up(file)
            raise
        finally:
            # Last, so that an opening in the meantime waits for the end of this one.
            self._writable.by_handle.pop(handle, None)
            self.files.drop(handle)

    def truncate(self, inode: Inode, size: int) -> Attr:
        with self._answer("truncate"):
            node = self._check_changeable(self.node(inode))
            if size == self._attr(node).size_bytes:
                return self._attr(node)
            files = self._writable.of(node)
            for file in files:
                with file.lock:
                    try:
                        file.truncate(size)
                    except BaseException:  # as in `write`
                        self._writable.give_up(file)
                        raise
            if size > self._attr(node).size_bytes and not files:
                raise FileSystemError(errno.ESPIPE)
            if not files:
                file = WritableFile(self.store, node, self._writing, self._fetcher)
                file.cut(size)
                self._writable.publish(file)
            return self._attr(node)

    def setattr(self, inode: Inode, *, mode: int | None, mtime_ns: int | None) -> Attr:
        with self._answer("setattr"):
            node = self.node(inode)
            if self._sets.staged_file(node) is not None:
                raise FileSystemError(
                    errno.EPERM
                )  # they belong to a checkpoint that is published whole
            self._check_changeable(node)
            if len(node.name) > FILE_NAME_BYTES:  # a folder: no name has room for the suffix
                raise FileSystemError(errno.ENAMETOOLONG)
            given = Attributes(mode, mtime_ns)
            file = self._writable.finish_closed(node)
            if file is not None:
                file.attributes = file.attributes.update(given)
                node.info = node.info._replace(attributes=file.attributes)
            elif node.inode == ROOT:  # it has no name on the store
                before = node.info.attributes or Attributes()
                node.info = node.info._replace(attributes=before.update(given))
            else:
                info = self._look(node.info.name)._replace(attributes=node.info.attributes)
                node.info = rename_remove.set_attributes(self.store, info, given)
                with self.nodes.lock:
                    self.nodes.touch(node.parent, node.name)
            return self._attr(node)

    # --- names --------------------------------------------------------------------------------

    def mkdir(self, parent: Inode, name: bytes, mode: int) -> Attr:
        with self._answer("mkdir"):
            folder = self._check_changeable(self.node(parent))
            if name in self.listing(folder):
                raise FileSystemError(errno.EEXIST)
            # A mode of its own is kept in an object of a longer name.
            has_mode = mode & 0o7777 != FOLDER_MODE
            target = self._name(folder, name, has_suffix=has_mode)
            self.store.mkdir(target)
            node = self.nodes.add(folder, name, PathInfo(target, 0, time.time(), True))
            if has_mode:
                given = Attributes(mode & 0o7777)
                node.info = rename_remove.set_attributes(
                    self.store, self._look(node.info.name), given
                )
            self.nodes.refer(node.inode)
            return self._attr(node)

    def symlink(self, parent: Inode, name: bytes, target: bytes) -> Attr:
        with self._answer("symlink"):
            folder = self._check_changeable(self.node(parent))
            if name in self.listing(folder):
                raise FileSystemError(errno.EEXIST)
            path = self._name(folder, name)
            self._check_target(folder, name, os.fsdecode(target))
            link = Link(os.fsdecode(target), time.time_ns())
            if len(target) > LINK_TARGET_BYTES:
                raise FileSystemError(errno.ENAMETOOLONG)
            rename_remove.make_link(self.store, path, link)
            node = self.nodes.add(folder, name, self._look(path))
            self.nodes.refer(node.inode)
            return self._attr(node)

    @staticmethod
    def _check_target(folder: Node, name: bytes, target: str) -> None:
        """Raise FileSystemError(EXDEV) for a target that is absolute or not in this mount."""
        try:
            check_target(below(folder, os.fsdecode(name)), target)
        except BadFieldError as error:
            raise FileSystemError(errno.EXDEV) from error

    def unlink(self, parent: Inode, name: bytes) -> None:
        with self._answer("unlink"):
            folder = self._check_changeable(self.node(parent))
            node = self.child(folder, name)
            if self._unlink_member(folder, node):
                return
            self._check_changeable(node)
            if node.info.is_folder:
                raise FileSystemError(errno.EISDIR)
            self._writable.finish_closed(node)
            with self._writable.removing(node):
                try:
                    rename_remove.remove(self.store, self._look(node.info.name))
                except NotFoundError:
                    pass  # another one was quicker
            self.nodes.remove(node)

    def rmdir(self, parent: Inode, name: bytes) -> None:
        with self._answer("rmdir"):
            node = self.child(self._check_changeable(self.node(parent)), name)
            if not node.info.is_folder:
                raise FileSystemError(errno.ENOTDIR)
            self.nodes.outdate(node)
            staged_set = self._sets.get(node.inode)
            left = dict(self.listing(node))
            if staged_set is not None and staged_set.metadata_removed:
                left.pop(METADATA_NAME, None)
            if left:
                raise FileSystemError(errno.ENOTEMPTY)
            self._check_changeable(node)
            self._sets.drop(node.inode)
            if METADATA_NAME in self.listing(node):
                metadata = self.child(node, METADATA_NAME)
                if metadata.info.tree is None:
                    rename_remove.remove(self.store, self._look(metadata.info.name))
            self._remove_folder(node)
            node.hidden.clear()
            self.nodes.remove(node)

    def rename(
        self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int
    ) -> None:
        with self._answer("rename"):
            if flags & ~RENAME_NOREPLACE:
                raise FileSystemError(errno.EINVAL)
            node = self._check_changeable(
                self.child(self._check_changeable(self.node(parent)), name)
            )
            file = self._writable.finish_closed(node)
            staged = self._sets.staged_file(node)
            if staged is not None:
                if file is not None or (parent, METADATA_NAME) != (new_parent, new_name):
                    raise FileSystemError(errno.EBUSY)
                self._sets.publish(self.node(parent), staged)
                return
            self._check_nothing_written_below(node)
            folder = self._check_changeable(self.node(new_parent))
            inode = self.listing(folder).get(new_name)
            if inode == node.inode:
                return
            over = None if inode is None else self.node(inode)
            if over is not None:
                self._check_over(node, over, flags)
            has_suffix = not node.info.is_folder or node.info.attributes is not None
            target = self._name(folder, new_name, has_suffix=has_suffix)
            self._sets.drop(node.inode)
            if node.info.link:
                self._check_target(folder, new_name, node.info.link)
            with contextlib.ExitStack() as stack:
                if over is not None:
                    stack.enter_context(self._writable.removing(over))
                if file is not None:
                    stack.enter_context(file.lock)
                stack.enter_context(self.files.moves())
                info = self._move(node, target, file)
                if over is not None:
                    self.nodes.remove(over)
                self.nodes.move(node, folder, new_name, info)
                self._follow(node)
                if info.version is not None:  # the version lies elsewhere: so do its files
                    self.nodes.outdate(node)

    def _follow(self, moved: Node) -> None:
        """Let readers of a file that was moved, or lies in a moved folder, go on with its bytes."""
        with limited(self._deadline_s):  # all of them together: others wait for this rename
            for place in self.files.places():
                node = self.nodes.get(Inode(place)) if isinstance(place, int) else None
                if node is None or not (node is moved or node.path.startswith(f"{moved.path}/")):
                    continue
                if not node.listed:  # it was removed or replaced: another file has its name
                    continue
                # A version keeps its own name, in whichever folder it lies by now.
                version = node.info.version
                of_it = "" if version is None else version.folder.rpartition("/")[2]
                with contextlib.suppress(BootseerError):
                    source = open_file(self.store, node.info)
                    if source.size_bytes == node.info.size_bytes and source.key.endswith(of_it):
                        self.files.move(place, source, self._where(node))

    def _check_nothing_written_below(self, folder: Node) -> None:
        """As `check_not_written`, of all files below a folder: drafts have its present name."""
        for file in self._writable.all():
            held = (file.node.info, *(each for _, each in file.left))
            below_it = any(each.name.startswith(f"{folder.info.name}/") for each in held)
            if below_it and file.unpublished:
                self._writable.check_not_written(file.node)

    def _look(self, name: str) -> PathInfo:
        """What the store holds under a name; links are not followed, as the kernel does that."""
        return namespace.look_up(self.store, name, follow=False)

    def _move(self, node: Node, target: str, file: WritableFile | None) -> PathInfo:
        """Rename on the store; what is being written gets its new name when it is published."""
        if file is None or not file.unpublished:  # any more
            info = self._look(node.info.name)._replace(attributes=node.info.attributes)
            rename_remove.move(self.store, info, target)
            return self._look(target)._replace(attributes=node.info.attributes)
        try:
            before = self._look(node.info.name)
        except NotFoundError:
            before = None  # the file is new
        file.move(target, None if before is None else (node.parent, before))
        return node.info._replace(name=target)

    def _check_over(self, node: Node, over: Node, flags: int) -> None:
        """Raise what keeps `node` from replacing `over`; removes an empty folder there."""
        if flags & RENAME_NOREPLACE:
            raise FileSystemError(errno.EEXIST)
        self._writable.check_not_written(over)
        if over.info.is_folder and not node.info.is_folder:
            raise FileSystemError(errno.EISDIR)
        if node.info.is_folder and not over.info.is_folder:
            raise FileSystemError(errno.ENOTDIR)
        if over.info.is_folder:
            if over.info.version is not None or self.listing(over):
                raise FileSystemError(errno.ENOTEMPTY)
            self._remove_folder(over)

    def _remove_folder(self, node: Node) -> None:
        try:
            rename_remove.remove(self.store, node.info)
        except BootseerError as error:
            hidden = rename_remove.list_held(self.store, node.info.name)
            if not hidden:
                raise
            self._say(f"{node.info.name} stays: it holds {', '.join(hidden)}")
            raise FileSystemError(errno.ENOTEMPTY) from error

    # --- distributed checkpoints, which are published whole ------------------------------------

    def child(self, parent: Node, name: bytes) -> Node:
        try:
            return super().child(parent, name)
        except FileSystemError:
            entry = self._sets.find(parent.inode, name)
            if entry is None:
                raise
            return entry[0]

    def _begins_staged(self, folder: Node, name: bytes) -> bool:
        """Whether a file that is written from its start is part of a checkpoint over another."""
        if not is_staged(os.fsdecode(name)) or folder.inode == ROOT or folder.path == "":
            return False
        parent = self.nodes.get(folder.parent)
        if parent is not None and folder.info.version is None:
            # Another mount that saves into it may have published it a moment ago.
            self.nodes.outdate(folder)
            self.nodes.outdate(parent)
            self.listing(parent)
        if folder.info.version is not None:
            return folder.info.shares_folder
        names = [os.fsdecode(each) for each in self.listing(folder)]
        shards = (each != namespace.DCP_METADATA and namespace.is_dcp_file(each) for each in names)
        return namespace.DCP_METADATA in names and any(shards)

    def _stage(self, folder: Node, name: bytes, before: Node | None) -> tuple[Node, Opened]:
        """Begin a file of a set. The previous file stays where it is, under another inode."""
        if before is not None:
            self._writable.check_not_written(before)
        earlier = self._sets.find(folder.inode, name)
        if earlier is not None:
            if self._writable.finish_closed(earlier[0]) is not None:
                raise FileSystemError(errno.EBUSY)
            earlier[1].abort()
        base = os.fsdecode(name)
        info = PathInfo(f"{folder.info.name}/{base}", 0, time.time(), False)
        if before is None:
            node = self.nodes.add_unlisted(folder, name, info)
        elif earlier is not None and earlier[0] is before:
            node = before
            node.info = info
        else:
            node = before
            if self.listing(folder).get(name) == node.inode:  # else it was replaced by others
                self.nodes.supersede(node)
            self.files.outdate(node.inode)
            node.info, node.key = info, ""
        staged = StagedFile.begin(self.store, folder.info.name, base, self._writing)
        self._sets.add(folder.inode, name, node, staged)
        folder.hidden.clear()
        file = WritableFile(self.store, node, self._writing, self._fetcher, staged)
        file.begin()
        handle = new_write_handle()
        self._writable.by_handle[handle] = file
        return node, Opened(handle, direct=True, keep_cache=False)

    def _unlink_member(self, folder: Node, node: Node) -> bool:
        """Remove a file of a set from what this mount shows; False for any other file."""
        staged = self._sets.staged_file(node)
        if staged is not None:
            if self._writable.finish_closed(node) is not None:
                raise FileSystemError(errno.EBUSY)
            self._sets.remove(node)
            staged.abort()
            return True
        staged_set = self._sets.get(folder.inode)
        if staged_set is not None and staged_set.files and node.name == METADATA_NAME:
            staged_set.metadata_removed = True
            return True
        if not folder.info.shares_folder or node.info.tree is None:
            return False
        folder.hidden.add(node.name)
        self.nodes.outdate(folder)
        return True

    # --- inside -------------------------------------------------------------------------------

    def statfs(self) -> tuple[int, int, int, int]:
        total, _, files, _ = super().statfs()
        return total + FREE_BYTES, FREE_BYTES, files + (1 << 30), 1 << 30

    def destroy(self) -> None:
        for file in self._writable.all():
            with file.lock:
                file.abort()
        self._sets.close()
        super().destroy()

    def _fill_listing(
        self, node: Node, infos: Sequence[PathInfo], *, outdated: bool
    ) -> dict[bytes, Inode]:
        """As listed by the store, less names that files were moved away from and hidden ones."""
        leaving = {
            (each.name, stamp_of(each)) for file in self._writable.all() for _, each in file.left
        }
        shown = [
            each
            for each in infos
            if (each.name, stamp_of(each)) not in leaving and base_of(each) not in node.hidden
        ]
        return super()._fill_listing(node, shown, outdated=outdated)

    def _entries_to_keep(self, node: Node, infos: Sequence[PathInfo]) -> dict[bytes, Node]:
        """Keep files that are being written, which may not be on the store yet."""
        listed = {base_of(each) for each in infos}
        return {
            file.node.name: file.node
            for file in self._writable.all()
            if file.node.parent == node.inode
            and file.staged is None
            and (
                file.unpublished
                or (file.node.name in listed and file.state is not SaveState.FAILED)
            )
        }

    def _attr(self, node: Node) -> Attr:
        attr = super()._attr(node)
        for file in self._writable.of(node):
            if file.unpublished:
                return attr._replace(size_bytes=max(file.size_bytes, file.promised_bytes))
        return attr

    def _file(self, handle: Handle) -> WritableFile:
        file = self._writable.by_handle.get(handle)
        if file is None:
            raise FileSystemError(errno.EIO)  # it was being written when the server died
        return file

    def _check_changeable(self, node: Node) -> Node:
        """Refuse what lies in a directory checkpoint."""
        if node.info.tree is not None and node.info.entry is not None:
            raise FileSystemError(errno.EROFS)
        if node.info.is_folder and node.info.version is not None and node.parent == node.inode:
            raise FileSystemError(errno.EROFS)
        return node

    @staticmethod
    def _name(folder: Node, name: bytes, *, has_suffix: bool = True) -> str:
        """The store's name of something new.

        `has_suffix`: the name must leave room for the suffix, as a file may become striped.
        """
        if len(name) > (FILE_NAME_BYTES if has_suffix else FOLDER_NAME_BYTES):
            raise FileSystemError(errno.ENAMETOOLONG)
        base = os.fsdecode(name)
        in_version = folder.info.version is not None
        if in_version and (not folder.info.shares_folder or namespace.is_dcp_file(base)):
            raise FileSystemError(errno.EROFS)
        if namespace.is_reserved(base):
            raise FileSystemError(errno.EINVAL)  # names of stripes, and of what is being written
        return f"{folder.info.name}/{base}" if folder.info.name else base

    def _open_for_writing(self, node: Node, flags: int) -> Opened:
        self._writable.check_not_written(node)
        file = WritableFile(self.store, node, self._writing, self._fetcher)
        handle = new_write_handle()
        if flags & os.O_TRUNC:
            file.begin()
        else:
            file.size_bytes = node.info.size_bytes
            if flags & os.O_ACCMODE == os.O_RDWR:
                self.files.adopt(handle, self.source(node), self._where(node), handle)
        self._writable.by_handle[handle] = file
        return Opened(handle, direct=True, keep_cache=False)

    def _new(self, folder: Node, name: bytes) -> Node:
        return self.nodes.add(
            folder, name, PathInfo(self._name(folder, name), 0, time.time(), False)
        )


def _ignore(message: str) -> None: ...
