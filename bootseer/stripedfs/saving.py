"""One file being saved from start to end: striped, or one plain object when it is small."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from bootseer.errors import UsageError
from bootseer.storage.base import Store
from bootseer.stripedfs import changing
from bootseer.stripedfs.settings import WriteSettings

if TYPE_CHECKING:
    from bootseer.stripedfs.stream import StripedWriter


class SavedFile:
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
        except BaseException:
            self.abort()
            raise
        self.size_bytes += len(view)

    def close(self) -> None:
        """Publish; twice is safe."""
        if not self._open:
            return
        self._open = False
        if self._writer is not None:
            self._writer.close()
            if changing.exists(self._store, self._name):
                self._store.delete(self._name)  # hidden by the striped one from now on
            return
        self._store.replace(self._name, bytes(self._head))
        changing.unpublish(self._store, self._name)

    def abort(self) -> None:
        """Give up; nothing becomes visible."""
        self._open = False
        self._head = bytearray()
        if self._writer is not None:
            self._writer.abort()

    def _spill(self) -> StripedWriter:
        if self._writer is None:
            from bootseer.stripedfs.stream import StripedWriter

            self._writer = StripedWriter(self._store, self._name, self._settings)
            head, self._head = self._head, bytearray()
            self._writer.write(head)
        return self._writer

    def __enter__(self) -> SavedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
