"""What HDFS stores have in common: they write under a temporary name and rename on the server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from io import FileIO
from typing import TYPE_CHECKING

from bootseer.errors import NotFoundError, from_os_error
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import (
    HIDDEN,
    NO_HINTS,
    ObjectWriter,
    PreferredReads,
    Stat,
    Store,
    WriteHints,
    check_name,
)
from bootseer.storage.urls import StoreUrl

if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object  # as in `store`, whose protocols are plain classes when they run

RANGE_BYTES = 32 << 20
STREAMS = 8
COPY_BYTES = 8 << 20


class NewObjectWriter(ObjectWriter, Protocol):
    """A writer that can be made to leave an existing object alone."""

    created: bool
    """Whether `close` gave the object its name; false when the name was taken."""


class TemporaryNameStore(Store):
    """The part of `Store` that knows temporary names; subclasses do what the medium can."""

    def __init__(self, at: StoreUrl, options: StoreOptions) -> None:
        self._at, self._options = at, options

    @property
    def url(self) -> str:
        return self._at.shown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def preferred(self) -> PreferredReads:
        options = self._options
        return PreferredReads(options.range_bytes or RANGE_BYTES, options.streams or STREAMS)

    def create(self, name: str, data: bytes, *, durable: bool = True) -> bool:
        return self._create(name, [data])

    def create_from_file(self, name: str, path: str) -> bool:
        check_name(name)
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error
        with file:
            return self._create(name, _pieces(file, path))

    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        with self._new_writer(name, NO_HINTS, keep_existing=False) as writer:
            writer.write(data)

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> ObjectWriter:
        return self._new_writer(name, hints, keep_existing=False)

    def list(self, folder: str) -> Iterator[Stat]:
        return (child for child in self._children(folder) if not _is_hidden(child))

    def temporaries(self, folder: str) -> Iterator[Stat]:
        return (child for child in self._children(folder) if _is_hidden(child))

    @abstractmethod
    def _new_writer(self, name: str, hints: WriteHints, *, keep_existing: bool) -> NewObjectWriter:
        """A writer under a temporary name that `close` renames: exclusively, or replacing."""

    @abstractmethod
    def _children(self, folder: str) -> Iterable[Stat]:
        """All that lies directly in a folder, temporaries too."""

    def _exists(self, name: str) -> bool:
        try:
            self.stat(name)
        except NotFoundError:
            return False
        return True

    def _create(self, name: str, pieces: Iterable[bytes]) -> bool:
        if self._exists(name):
            return False
        with self._new_writer(name, NO_HINTS, keep_existing=True) as writer:
            for piece in pieces:
                writer.write(piece)
        return writer.created


def _pieces(file: FileIO, path: str) -> Iterator[bytes]:
    try:
        while piece := file.read(COPY_BYTES):
            yield piece
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error


def _is_hidden(stat: Stat) -> bool:
    return stat.name.rpartition("/")[2].startswith(HIDDEN)
