"""One file being saved from start to end: striped, or one plain object when it is small.

`SavedFile` takes its bytes; `Saving` is a file that a mount has open for writing.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from typing import TYPE_CHECKING

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, CorruptDataError, UsageError
from bootseer.fuse.operations import FileSystemError, Inode
from bootseer.storage.store import Store
from bootseer.stripedfs.format.manifest import Attributes
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import Found
from bootseer.stripedfs.read.open import is_source_of, open_file
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.write_settings import WriteSettings

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.stripedfs.mount.inodes import Node
    from bootseer.stripedfs.write.dcp_files import StagedFile
    from bootseer.stripedfs.write.stripe_stream import StripedWriter

COPY_BYTES = 8 << 20


class SavedFile(Committing):
    """Takes a file's bytes in order; a context manager. Nothing is visible before `close`.

    Up to one chunk is kept in memory and becomes a plain object; more goes to the stripes as it
    comes. `close` replaces whatever file has the name: readers see the old one or the new one.
    """

    def __init__(self, store: Store, name: str, settings: WriteSettings) -> None:
        self._store, self._name, self._settings = store, name, settings
        self._head = bytearray()
        self._writer: StripedWriter | None = None
        self._open = True
        self.size_bytes = 0

    @property
    def striped(self) -> bool:
        """Whether there were too many bytes for a plain object."""
        return self._writer is not None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`; an error ends the file."""
        if not self._open:
            raise UsageError(f"{self._name} is closed; write it anew")
        view = memoryview(data).cast("B")
        try:
            if self._writer is None and len(self._head) + len(view) < self._settings.chunk_bytes:
                self._head += view
            else:
                self._spill().write(view)
        except BaseException:  # a gap in the file cannot be filled later
            self.abort()
            raise
        self.size_bytes += len(view)

    def move(self, name: str) -> None:
        """Publish under another name."""
        self._name = name
        if self._writer is not None:
            self._writer.move(name)

    def close(self) -> None:
        """Publish; twice is safe."""
        if not self._open:
            return
        self._open = False
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(BootseerError):  # published: what it hides may stay
                if rename_remove.exists(self._store, self._name):
                    self._store.delete(self._name)
            return
        self._store.replace(self._name, bytes(self._head))
        rename_remove.withdraw(self._store, self._name)  # it would hide what was written
        with contextlib.suppress(BootseerError):  # published: gc finds what is left
            rename_remove.remove_versions(self._store, self._name)

    def abort(self) -> None:
        """Give up; nothing becomes visible."""
        self._open = False
        self._head = bytearray()
        if self._writer is not None:
            self._writer.leave_nothing()

    def _spill(self) -> StripedWriter:
        if self._writer is None:
            from bootseer.stripedfs.write.stripe_stream import StripedWriter

            self._writer = StripedWriter(self._store, self._name, self._settings)
            head, self._head = self._head, bytearray()
            self._writer.write(head)
        return self._writer


class Saving:
    """One file being written: by one opening at a time."""

    def __init__(
        self,
        store: Store,
        node: Node,
        settings: WriteSettings,
        fetcher: Fetcher,
        staged: StagedFile | None = None,
    ) -> None:
        self._store, self._settings, self._fetcher = store, settings, fetcher
        self.staged = staged
        """What takes its bytes when its close shall publish nothing."""
        self.node = node
        self.lock = threading.Lock()
        self.size_bytes = 0
        self.attributes = Attributes(node.found.attributes.mode if node.found.attributes else None)
        """What is set of the file once it is published."""
        self.promised_bytes = 0
        """How many bytes its writer said, before the first one, that there will be; 0 = none."""
        self.touched = False
        """Something was written, or the file is new: there is something to publish."""
        self.flushed = False
        """A descriptor was closed, and nothing was written since."""
        self.orphaned = False
        """Its writer was killed, and nobody wrote since: nobody said that it is whole."""
        self.removed = False
        """Its name was removed; who writes from then on has ESTALE."""
        self.left: list[tuple[Inode, Found]] = []
        """What the names hold that it was moved away from, and in which folders."""
        self._saved: SavedFile | None = None
        self._failed: BaseException | None = None
        self.problem: Exception | None = None
        """What could not be learned or set of it when it had been published the last time."""
        self.writer = 0
        """Which process wrote last; as in `WritableOperations.write`."""

    def begin(self) -> None:
        """From here on the file is empty, and will be published, whether or not bytes follow."""
        if self.staged is not None and self.size_bytes:
            raise FileSystemError(errno.ESPIPE)  # it is written once
        if self.staged is None:
            self.abort()
        self.size_bytes = self.promised_bytes = 0
        self.touched, self.flushed, self.orphaned = True, False, False
        self.writer = 0

    def written_by(self, owner: int) -> bool:
        """Whether a process wrote last what is not published; True when none did.

        `owner` as in `WritableOperations.write`.
        """
        return not (self.touched and self.writer) or owner == self.writer

    def write(self, offset: int, data: memoryview, owner: int = 0) -> int:
        """Take bytes at the end; FileSystemError(ESPIPE) anywhere else.

        After an error nothing is published: the bytes that were refused are missing.
        """
        self.check()
        try:
            self._check_named()
            if offset != self.size_bytes:
                raise FileSystemError(errno.ESPIPE)
            if self.staged is not None:
                if not self.touched:
                    raise FileSystemError(errno.EBUSY)  # it was closed, and waits for the others
                self.staged.write(data)
            else:
                if self._saved is None:
                    self._saved = self._copied(self.size_bytes)
                self._saved.write(data)
        except BaseException as error:  # whatever it is, `close` must tell of it as well
            self.fail(error)
            raise
        if self.attributes.mtime_ns is not None:
            self.attributes = Attributes(self.attributes.mode)  # it is changed later than that
        self.writer = owner
        self.touched, self.flushed, self.orphaned = True, False, False
        self.size_bytes += len(data)
        return len(data)

    def truncate(self, size_bytes: int) -> None:
        """Begin anew (0), or say before the first byte how many there will be.

        What was written is all there is, too. Anything else is refused as in `write`.
        """
        self.check()
        self._check_named()
        if not size_bytes:
            self.begin()
        elif not self.touched and size_bytes < self.size_bytes:
            self.cut(size_bytes)
        elif self.touched and self.size_bytes in (0, size_bytes):
            self.promised_bytes = size_bytes
        else:
            error = FileSystemError(errno.ESPIPE)
            self.fail(error)
            raise error

    def cut(self, size_bytes: int) -> None:
        """Begin with the first bytes of what was published."""
        self.begin()
        if size_bytes:
            self._saved = self._copied(size_bytes)
            self.size_bytes = size_bytes

    def check_whole(self) -> None:
        """Raise CorruptDataError when there are fewer bytes than its writer said."""
        if self.touched and self.size_bytes < self.promised_bytes:
            raise CorruptDataError(
                f"{self.node.found.name} is not published: {self.size_bytes} bytes of the "
                f"{self.promised_bytes} that ftruncate announced were written; save it again"
            )

    def _check_named(self) -> None:
        if self.removed:
            raise FileSystemError(errno.ESTALE)

    def move(self, name: str, left: tuple[Inode, Found] | None) -> None:
        """Publish under another name; what the name of before holds (`left`) goes with that."""
        if self._saved is not None:
            self._saved.move(name)
        if left is not None:
            self.left.append(left)

    def publish(self) -> Found | None:
        """Put what was written on the store; None when nothing was since the last time.

        Say `settle` with what is there now. Once it is published no error is raised any more, for
        its writer would save it again: `problem` is what could not be done then.
        """
        self.check()
        if not self.touched:
            return None
        self.check_whole()
        saved, self._saved = self._saved, None
        try:
            if self.staged is not None:
                self.staged.close()
                return self.node.found._replace(size_bytes=self.size_bytes)
            if saved is None:
                saved = SavedFile(self._store, self.node.found.name, self._settings)
            saved.close()
        except BaseException as error:  # whatever it is, the next `close` must tell of it as well
            if saved is not None:
                saved.abort()
            self.fail(error)
            raise
        return self._described()

    def _described(self) -> Found:
        """What lies on the store now, with the attributes that it shall have."""
        name = self.node.found.name
        found = Found(name, self.size_bytes, time.time(), False)  # unless we learn more
        self.problem = None
        try:
            found = namespace.look(self._store, name, follow=False)
            if self.attributes != Attributes():
                found = rename_remove.set_attributes(self._store, found, self.attributes)
        except Exception as error:  # whatever it is, it is no error of what is published
            self.problem = error
        return found

    def settle(self, found: Found) -> None:
        """There is nothing left to publish."""
        self.touched = False
        self.promised_bytes = 0
        self.node.found = found

    def abort(self) -> None:
        """Give up what was not published."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.abort()
        if self.staged is not None and self.touched:
            self.staged.abort()

    def fail(self, error: BaseException) -> None:
        """Publish nothing, now or later; who still writes hears of the first such error."""
        self.abort()
        self.touched = False
        if self._failed is None:
            self._failed = error

    @property
    def failed(self) -> bool:
        """Whether nothing will be published any more."""
        return self._failed is not None

    def remove_left(self) -> None:
        """Remove what it was moved away from, unless somebody else has these names by now."""
        for _, each in self.left:
            try:
                if namespace.look(self._store, each.name, follow=False) == each:
                    rename_remove.remove(self._store, each)
            except BootseerError:
                continue  # it is published, and that is what `close` tells

    def _copied(self, size_bytes: int) -> SavedFile:
        """A new file with so many of the bytes that were published before."""
        saved = SavedFile(self._store, self.node.found.name, self._settings)
        if not size_bytes:
            return saved
        found = self.node.found
        try:
            source = open_file(self._store, found)
            if source.size_bytes != found.size_bytes or not is_source_of(found, source):
                raise FileSystemError(errno.ESTALE)  # somebody else saved it meanwhile
            buffer = memoryview(bytearray(min(COPY_BYTES, size_bytes)))
            for offset in range(0, size_bytes, len(buffer)):
                count = self._fetcher.read_into(source, offset, buffer[: size_bytes - offset])
                saved.write(buffer[:count])
            source.confirm()
        except BaseException:  # what was copied so far is of no use
            saved.abort()
            raise
        return saved

    def check(self) -> None:
        """Raise the error that writing has met, if any."""
        if self._failed is not None:
            raise self._failed
