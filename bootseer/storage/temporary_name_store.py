"""What stores have in common that write under a temporary name and rename on a server."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, Protocol, TypeVar

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, StoreUnavailableError, from_os_error
from bootseer.storage.bounded_calls import within
from bootseer.storage.local import HIDDEN, TEMPORARY
from bootseer.storage.store import Stat, check_name

COPY_BYTES = 8 << 20
WRITE_DEADLINE_S = 300.0
"""The longest wait for one piece: a pipeline of DataNodes may be rebuilt twice meanwhile."""

T = TypeVar("T")


class RenamingStore(ABC):
    """The part of `Store` that knows temporary names; subclasses do what the medium can."""

    def write_places(self) -> list[str]:
        return []

    def temporary(self, folder: str) -> str:
        return f"{check_name(folder)}/{TEMPORARY}{uuid.uuid4().hex}"

    def local_path(self, name: str) -> str | None:
        return None

    def create(self, name: str, data: bytes, *, lasting: bool = True) -> bool:
        return self._publish(name, [data], keep_existing=True)

    def replace(self, name: str, data: bytes, *, lasting: bool = True) -> None:
        self._publish(name, [data], keep_existing=False)

    def create_from_file(self, name: str, path: str) -> bool:
        check_name(name)
        try:
            source = open(path, "rb")  # noqa: SIM115 - closed below; only opening is mapped so
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error
        with source:
            return self._publish(name, _pieces(source, path), keep_existing=True)

    def list(self, folder: str) -> Iterator[Stat]:
        return (s for s in self._children(folder) if not _is_hidden(s))

    def temporaries(self, folder: str) -> Iterator[Stat]:
        return (s for s in self._children(folder) if _is_hidden(s))

    @abstractmethod
    def _publish(self, name: str, pieces: Iterable[bytes], *, keep_existing: bool) -> bool:
        """Write beside the final name, then rename: exclusively, or over what is there."""

    @abstractmethod
    def _children(self, folder: str) -> Sequence[Stat]:
        """All that lies directly in a folder, temporaries too."""


class Renames(Protocol):
    """What a `RenamingWriter` needs of its store."""

    def path(self, name: str) -> str:
        """An object's path on the server."""

    def told(self, name: str) -> str:
        """An object's name for a message."""

    def call(self, what: str, call: Callable[[], T]) -> T:
        """One short call: bounded, mapped, tried again while the server is away."""

    def move(self, source: str, target: str, what: str, *, overwrite: bool) -> bool:
        """Rename; False when the target is there and may not be overwritten."""


class ServerFile(Protocol):
    """A library's own file that is being written."""

    def write(self, data: memoryview, /) -> object:
        """Append all of `data`."""

    def close(self) -> object:
        """End the file."""


class RenamingWriter(Committing):
    """`ObjectWriter` under a temporary name; `close` checks the length and renames.

    `_begin` opens the file when this constructor calls it: what it uses must be there before.
    """

    def __init__(self, store: Renames, name: str, *, keep_existing: bool, stall_s: float) -> None:
        self._moves, self._keep_existing, self._stall_s = store, keep_existing, stall_s
        self._final = store.path(name)
        self._folder = self._final.rpartition("/")[0]
        self._temporary = f"{self._folder}/{TEMPORARY}{uuid.uuid4().hex}"
        self._what = f"write {store.told(name)}"
        self._size_bytes = 0
        self._open = True
        self.created = False
        """Whether `close` gave the object its name; false when that was taken meanwhile."""
        self._file = store.call(self._what, self._begin)

    @abstractmethod
    def _begin(self) -> ServerFile:
        """Open the temporary file; may be called again after a failure."""

    @abstractmethod
    def _arrived_bytes(self) -> int:
        """The temporary file's size, as the server has it."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove the temporary file."""

    @abstractmethod
    def _mapped(self, error: Exception) -> BootseerError:
        """Our error for one of the library's."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._do(lambda: self._file.write(view))
        self._size_bytes += len(view)

    def close(self) -> None:
        if not self._open:
            return
        try:
            self._do(self._file.close)
            found_bytes = self._moves.call(self._what, self._arrived_bytes)
            if found_bytes != self._size_bytes:
                raise StoreUnavailableError(
                    f"cannot {self._what}: {found_bytes} of {self._size_bytes} bytes arrived"
                )
            self.created = self._moves.move(
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
        if not self._open:
            return
        self._open = False
        try:
            within(self._remove, self._stall_s, self._what)
        except Exception:  # the cluster is away: the temporary stays for `gc`, hidden from readers
            pass

    def _do(self, call: Callable[[], object]) -> None:
        """One step of the writing; never tried again, for its bytes may have been taken."""
        try:
            within(call, WRITE_DEADLINE_S, self._what)
        except Exception as error:  # libraries raise kinds of their own
            raise self._mapped(error) from error


def _pieces(file: BinaryIO, path: str) -> Iterator[bytes]:
    try:
        while piece := file.read(COPY_BYTES):
            yield piece
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error


def _is_hidden(found: Stat) -> bool:
    return found.name.rpartition("/")[2].startswith(HIDDEN)
