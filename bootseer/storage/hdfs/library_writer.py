"""Writing an object through a client library: under a temporary name, renamed when it is whole."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol, Self

from bootseer.context_managers import Committing
from bootseer.errors import StoreUnavailableError
from bootseer.storage.bounded_calls import call_with_limit
from bootseer.storage.hdfs.library_store import LibraryStore
from bootseer.storage.store import TEMPORARY

WRITE_LIMIT_S = 300.0
"""The longest wait for one piece: a pipeline of DataNodes may be rebuilt twice meanwhile."""


class LibraryFile(Protocol):
    """A library's own file that is being written."""

    def write(self, data: memoryview, /) -> object:
        """Append all of `data`."""

    def close(self) -> object:
        """Complete the file."""


class LibraryWriter(Committing):
    """`ObjectWriter` under a temporary name; `close` checks the length and renames.

    `open` comes first: it creates the temporary file.
    """

    _file: LibraryFile

    def __init__(
        self, store: LibraryStore, name: str, *, keep_existing: bool, stall_s: float
    ) -> None:
        self._store, self._keep_existing, self._stall_s = store, keep_existing, stall_s
        self._final = store.path(name)
        self._folder = self._final.rpartition("/")[0]
        self._temporary = f"{self._folder}/{TEMPORARY}{uuid.uuid4().hex}"
        self._what = f"write {store.describe(name)}"
        self._size_bytes = 0
        self._open = True
        self.created = False
        """Whether `close` gave the object its name; false when that was taken meanwhile."""

    def open(self) -> Self:
        """Create the temporary file."""
        self._file = self._store.call(self._what, self._create_file)
        return self

    @abstractmethod
    def _create_file(self) -> LibraryFile:
        """Open the temporary file; may be called again after a failure."""

    @abstractmethod
    def _stored_bytes(self) -> int:
        """The temporary file's size, as the server has it."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove the temporary file."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._call_once(lambda: self._file.write(view))
        self._size_bytes += len(view)

    def close(self) -> None:
        if not self._open:
            return
        try:
            self._call_once(self._file.close)
            stored_bytes = self._store.call(self._what, self._stored_bytes)
            if stored_bytes != self._size_bytes:
                raise StoreUnavailableError(
                    f"cannot {self._what}: {stored_bytes} of {self._size_bytes} bytes arrived"
                )
            self.created = self._store.move(
                self._temporary, self._final, self._what, overwrite=not self._keep_existing
            )
        except BaseException:  # an interrupt too: nothing unpublished stays
            self.abort()
            raise
        if self.created:
            self._open = False
        else:
            self.abort()

    def abort(self) -> None:
        """As `ObjectWriter.abort`, for `stall_s` at most, which is the store's own."""
        if not self._open:
            return
        self._open = False
        try:
            call_with_limit(self._remove, self._stall_s, self._what)
        except Exception:  # the cluster is away: the temporary stays for `gc`, hidden from readers
            pass

    def _call_once(self, call: Callable[[], object]) -> None:
        """One step of the writing; never retried, for its bytes may have been taken."""
        try:
            call_with_limit(call, WRITE_LIMIT_S, self._what)
        except Exception as error:  # libraries raise kinds of their own
            raise self._store.map_error(error, self._what) from error
