"""Files that a mount has open for writing: the bytes and the state of each, and their publication.

The bytes go to a `SavedFile`, which is striped or one plain object, or to a `StagedFile`, which is
published with the whole distributed checkpoint that it belongs to.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import BootseerError, CorruptDataError
from bootseer.fuse.operations import FileSystemError, Handle, Inode
from bootseer.storage.store import Store
from bootseer.stripedfs.format.manifest import Attributes
from bootseer.stripedfs.mount.inodes import Node, Nodes, base_of
from bootseer.stripedfs.mount.open_files import OpenFiles
from bootseer.stripedfs.mount.staged_sets import StagedSets
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo
from bootseer.stripedfs.read.open import is_source_of, open_file
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.dcp_files import StagedFile
from bootseer.stripedfs.write.saved_file import SavedFile
from bootseer.stripedfs.write.write_settings import WriteSettings

COPY_BYTES = 8 << 20
WRITE_HANDLE = 0x5A5A5 << 44
WRITE_MASK = 0xFFFFF << 44


def is_write_handle(handle: Handle) -> bool:
    """Whether a handle is of a file that was opened for writing, by this process or another."""
    return handle & WRITE_MASK == WRITE_HANDLE


def new_write_handle() -> Handle:
    """A handle for a file that is being opened for writing."""
    return Handle(WRITE_HANDLE | secrets.randbits(43))


class SaveState(enum.Enum):
    """What is to become of a file that is open for writing."""

    UNCHANGED = enum.auto()
    """There is nothing to publish: nothing was written since it was opened or published."""
    WRITTEN = enum.auto()
    """There is something to publish: bytes were written, or the file is new."""
    CLOSED = enum.auto()
    """As WRITTEN, and a descriptor was closed after the last byte."""
    ORPHANED = enum.auto()
    """As WRITTEN, but its writer was killed: the file may lack its end."""
    REMOVED = enum.auto()
    """As UNCHANGED, but another file has its name, or none: a write gets ESTALE."""
    FAILED = enum.auto()
    """Writing met an error: nothing will be published."""


_UNPUBLISHED = frozenset({SaveState.WRITTEN, SaveState.CLOSED, SaveState.ORPHANED})


class WritableFile:
    """One file that is open for writing. Everything but reading its fields needs `lock`."""

    def __init__(
        self,
        store: Store,
        node: Node,
        settings: WriteSettings,
        fetcher: Fetcher,
        staged: StagedFile | None = None,
    ) -> None:
        """`staged` takes the bytes of a file that its own close does not publish."""
        self._store, self._settings, self._fetcher = store, settings, fetcher
        self.staged = staged
        self.node = node
        self.lock = threading.Lock()
        self.state = SaveState.UNCHANGED
        self.size_bytes = 0
        self.attributes = Attributes(node.info.attributes.mode if node.info.attributes else None)
        """What is set on the file once it is published."""
        self.promised_bytes = 0
        """The length that was announced before the first byte; 0 = none."""
        self.left: list[tuple[Inode, PathInfo]] = []
        """What the store holds under names that it was renamed away from, with their folders."""
        self.problem: Exception | None = None
        """Why it could not be read, or its attributes not set, after it was last published."""
        self.writer = 0
        """Which process wrote last; see `WritableOperations.write`."""
        self._saved: SavedFile | None = None
        self._error: BaseException | None = None

    @property
    def unpublished(self) -> bool:
        """Whether there is something to publish."""
        return self.state in _UNPUBLISHED

    def begin(self) -> None:
        """Make the file empty; it will be published, whether or not bytes follow."""
        if self.staged is not None and self.size_bytes:
            raise FileSystemError(errno.ESPIPE)  # it is written once
        if self.staged is None:
            self.abort()
        self.size_bytes = self.promised_bytes = 0
        self.state = SaveState.WRITTEN
        self.writer = 0

    def is_writer(self, owner: int) -> bool:
        """Whether a process wrote last what is not published; True when none did.

        `owner` as in `WritableOperations.write`.
        """
        return not (self.unpublished and self.writer) or owner == self.writer

    def write(self, offset: int, data: memoryview, owner: int = 0) -> int:
        """Append `data`. Raises FileSystemError(ESPIPE) for any other offset.

        After an error nothing is published: the bytes that were refused are missing.
        """
        self.check()
        try:
            self._check_named()
            if offset != self.size_bytes:
                raise FileSystemError(errno.ESPIPE)
            if self.staged is not None:
                if not self.unpublished:
                    raise FileSystemError(errno.EBUSY)  # it was closed, and waits for the others
                self.staged.write(data)
            else:
                if self._saved is None:
                    self._saved = self._copy_published(self.size_bytes)
                self._saved.write(data)
        except BaseException as error:  # whatever it is, `close` must report it as well
            self.fail(error)
            raise
        if self.attributes.mtime_ns is not None:
            self.attributes = Attributes(self.attributes.mode)  # it is changed later than that
        self.writer = owner
        self.state = SaveState.WRITTEN
        self.size_bytes += len(data)
        return len(data)

    def truncate(self, size_bytes: int) -> None:
        """Make the file empty (0), shorten it, or announce its length before the first byte.

        Setting the length that it has is allowed. Anything else is refused as in `write`.
        """
        self.check()
        self._check_named()
        if not size_bytes:
            self.begin()
        elif not self.unpublished and size_bytes < self.size_bytes:
            self.cut(size_bytes)
        elif self.unpublished and self.size_bytes in (0, size_bytes):
            self.promised_bytes = size_bytes
        else:
            error = FileSystemError(errno.ESPIPE)
            self.fail(error)
            raise error

    def cut(self, size_bytes: int) -> None:
        """Begin again with the first bytes of what was published."""
        self.begin()
        if size_bytes:
            self._saved = self._copy_published(size_bytes)
            self.size_bytes = size_bytes

    def check(self) -> None:
        """Raise the error that writing has met, if any."""
        if self._error is not None:
            raise self._error

    def check_whole(self) -> None:
        """Raise CorruptDataError when there are fewer bytes than were announced."""
        if self.unpublished and self.size_bytes < self.promised_bytes:
            raise CorruptDataError(
                f"{self.node.info.name} is not published: {self.size_bytes} bytes of the "
                f"{self.promised_bytes} that ftruncate announced were written; save it again"
            )

    def _check_named(self) -> None:
        if self.state is SaveState.REMOVED:
            raise FileSystemError(errno.ESTALE)

    def note_writer(self, *, killed: bool) -> None:
        """A descriptor is being closed: by a living process, or because its process was killed."""
        if killed:
            self.state = SaveState.ORPHANED
        elif self.state is SaveState.ORPHANED:
            self.state = SaveState.WRITTEN

    def note_closed(self) -> None:
        """A descriptor was closed after the last byte."""
        if self.unpublished:
            self.state = SaveState.CLOSED

    def move(self, name: str, left: tuple[Inode, PathInfo] | None) -> None:
        """Publish under another name. `left` under the previous one is removed after that."""
        if self._saved is not None:
            self._saved.move(name)
        if left is not None:
            self.left.append(left)

    def publish(self) -> PathInfo | None:
        """Publish what was written on the store; None when there was nothing to publish.

        Pass the result to `settle`. Once the file is published no error is raised any more, since
        its writer would save it again; `problem` then has the error.
        """
        self.check()
        if not self.unpublished:
            return None
        self.check_whole()
        saved, self._saved = self._saved, None
        try:
            if self.staged is not None:
                self.staged.close()
                return self.node.info._replace(size_bytes=self.size_bytes)
            if saved is None:
                saved = SavedFile(self._store, self.node.info.name, self._settings)
            saved.close()
        except BaseException as error:  # whatever it is, the next `close` must report it as well
            if saved is not None:
                saved.abort()
            self.fail(error)
            raise
        return self._set_attributes()

    def _set_attributes(self) -> PathInfo:
        """Give what was published its attributes; returns what lies on the store now."""
        name = self.node.info.name
        info = PathInfo(
            name, self.size_bytes, time.time(), False
        )  # used where the store says nothing newer
        self.problem = None
        try:
            info = namespace.look_up(self._store, name, follow=False)
            if self.attributes != Attributes():
                info = rename_remove.set_attributes(self._store, info, self.attributes)
        except Exception as error:  # whatever it is, the file is published
            self.problem = error
        return info

    def settle(self, info: PathInfo) -> None:
        """Note that `info` lies on the store, so that there is nothing left to publish."""
        self.state = SaveState.UNCHANGED
        self.promised_bytes = 0
        self.node.info = info

    def abort(self) -> None:
        """Discard what was not published."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.abort()
        if self.staged is not None and self.unpublished:
            self.staged.abort()

    def fail(self, error: BaseException) -> None:
        """Publish nothing, now or later; further calls raise the first such error."""
        self.abort()
        self.state = SaveState.FAILED
        if self._error is None:
            self._error = error

    def remove_left(self) -> None:
        """Remove what lies under the names it was renamed away from, unless it was replaced."""
        for _, each in self.left:
            try:
                if namespace.look_up(self._store, each.name, follow=False) == each:
                    rename_remove.remove(self._store, each)
            except BootseerError:
                continue  # the file is published, and that is what `close` reports

    def _copy_published(self, size_bytes: int) -> SavedFile:
        """A new file that begins with the first `size_bytes` of what was published."""
        saved = SavedFile(self._store, self.node.info.name, self._settings)
        if not size_bytes:
            return saved
        info = self.node.info
        try:
            source = open_file(self._store, info)
            if source.size_bytes != info.size_bytes or not is_source_of(info, source):
                raise FileSystemError(errno.ESTALE)  # another writer replaced it meanwhile
            buffer = memoryview(bytearray(min(COPY_BYTES, size_bytes)))
            for offset in range(0, size_bytes, len(buffer)):
                count = self._fetcher.read_into(source, offset, buffer[: size_bytes - offset])
                saved.write(buffer[:count])
            source.confirm()
        except BaseException:  # what was copied so far is of no use
            saved.abort()
            raise
        return saved


class WritableFiles:
    """The files of a mount that are open for writing, by handle; from any thread."""

    def __init__(
        self, nodes: Nodes, open_files: OpenFiles, sets: StagedSets, say: Callable[[str], None]
    ) -> None:
        """`open_files` are those that are read."""
        self._nodes, self._open_files, self._sets, self._say = nodes, open_files, sets, say
        self.by_handle: dict[Handle, WritableFile] = {}

    def all(self) -> list[WritableFile]:
        """All files."""
        return list(self.by_handle.values())

    def of(self, node: Node) -> list[WritableFile]:
        """The openings of one node."""
        return [file for file in self.all() if file.node.inode == node.inode]

    def check_not_written(self, node: Node) -> None:
        """As `finish_closed`; raises FileSystemError(EBUSY) for a file that is being written."""
        if self.finish_closed(node) is not None:
            raise FileSystemError(errno.EBUSY)

    def finish_closed(self, node: Node) -> WritableFile | None:
        """Publish a file that waits for nothing but its last descriptor, or discard an orphan.

        Returns the file if it is still being written.
        """
        for file in self.of(node):
            if file.unpublished:
                with file.lock:
                    if file.state is SaveState.ORPHANED:
                        self.give_up(file)
                    elif file.state is SaveState.CLOSED:
                        self.publish(file)
                    elif file.state is SaveState.WRITTEN:
                        return file
        return None

    def publish(self, file: WritableFile) -> None:
        """Publish what was written of a file, and let the mount show it; holds its lock."""
        node = file.node
        info = file.publish()
        if info is None:
            return
        with self._nodes.lock:  # from here on the store has it: an earlier listing does not count
            file.settle(info)
            self._nodes.touch(node.parent, node.name)
        if file.problem is not None:
            self._nodes.outdate(self._nodes.get(node.parent))  # so that the store is asked again
            self._say(
                f"{node.info.name} is published, but what was set of it (its mode, its "
                f"time) may be lost: {file.problem}"
            )
        node.key = ""
        self._open_files.outdate(node.inode)
        self._remove_left(file)
        if file.staged is not None:
            file.staged.owner = file.writer
            self._sets.publish_copy(node.parent)

    def give_up(self, file: WritableFile, number: int = errno.EIO) -> None:
        """Publish nothing of a file; the previous one may still be there."""
        file.fail(FileSystemError(number))
        self._sets.remove(file.node)
        for folder in (file.node.parent, *(each for each, _ in file.left)):
            self._nodes.outdate(self._nodes.get(folder))
        file.left.clear()

    @contextlib.contextmanager
    def removing(self, node: Node) -> Iterator[None]:
        """Hold it while a node is removed or replaced: its writers get ESTALE."""
        files = self.of(node)
        for file in files:
            with file.lock:  # published until then, or never
                if file.unpublished:
                    self._remove_left(file)
                    self.give_up(file, errno.ESTALE)
                elif file.state is SaveState.UNCHANGED:
                    file.state = SaveState.REMOVED
        try:
            yield
        except BaseException:
            for file in files:
                with file.lock:  # a write that failed meanwhile stays failed
                    if file.state is SaveState.REMOVED:
                        file.state = SaveState.UNCHANGED
            raise

    def _remove_left(self, file: WritableFile) -> None:
        file.remove_left()
        with self._nodes.lock:
            for folder, each in file.left:
                self._nodes.touch(folder, base_of(each))
            file.left.clear()
