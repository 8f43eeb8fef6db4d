"""A file that is saved from start to end: striped, or one plain object when it is small."""

from __future__ import annotations

import contextlib

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, UsageError
from bootseer.storage.store import Store
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.stripe_stream import StripedWriter
from bootseer.stripedfs.write.write_settings import WriteSettings


class SavedFile(Committing):
    """Takes a file's bytes in order; a context manager. Nothing is visible before `close`.

    Up to one chunk is kept in memory and becomes a plain object; more is striped as it comes.
    `close` replaces the file of the same name: readers see the previous one or this one.
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
                self._begin_striping().write(view)
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
            with contextlib.suppress(BootseerError):  # published: the plain object is hidden
                if rename_remove.exists(self._store, self._name):
                    self._store.delete(self._name)
            return
        self._store.replace(self._name, bytes(self._head))
        rename_remove.withdraw(self._store, self._name)  # it would hide what was written
        with contextlib.suppress(BootseerError):  # published: gc finds what is left
            rename_remove.remove_versions(self._store, self._name)

    def abort(self) -> None:
        """Discard the file; nothing becomes visible."""
        self._open = False
        self._head = bytearray()
        if self._writer is not None:
            self._writer.leave_nothing()

    def _begin_striping(self) -> StripedWriter:
        if self._writer is None:
            self._writer = StripedWriter.begin(self._store, self._name, self._settings)
            head, self._head = self._head, bytearray()
            self._writer.write(head)
        return self._writer
