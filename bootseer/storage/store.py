"""The contract that every store keeps.

Names are relative, `/`-separated, without empty, `.` or `..` parts. Objects become visible whole
or not at all. Every method maps the foreign errors of its medium to ours:

* `NotFoundError`: the object (or listed folder) does not exist;
* `AccessDeniedError`: the medium refused us, a read-only one included;
* `NoSpaceError`: the medium is full; nothing of the object became visible;
* `StoreUnavailableError`: the medium failed; `retryable` is true;
* `CorruptDataError`: an object is shorter than the range asked of it;
* `UsageError`: a name that cannot be used.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import CorruptDataError, UsageError
from bootseer.storage.request_control import Attempt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, Self
else:
    Protocol = ABC  # plain classes when they run, which must have all that is abstract

HIDDEN = "."
"""What the names begin with that `Store.list` leaves out."""
TEMPORARY = ".tmp-"
"""What the names of unfinished objects begin with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """One object or folder. `mtime_s` is by the store's own clock: compare it with itself only.

    `version` is opaque and changes whenever the bytes may have changed (an ETag, a file id with
    its time); it is empty where the store cannot tell, and then no data of the object may be
    reused from one opening to the next.
    """

    name: str
    size_bytes: int
    mtime_s: float
    is_folder: bool
    version: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PreferredReads:
    """How a store is read fastest: the most bytes of one request, and requests at a time."""

    range_bytes: int
    streams: int


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLocation:
    """Where the bytes `[offset, offset + length)` of an object are: an HDFS block, for example.

    `replicas` name the servers that hold them, in the spelling of `Attempt.prefer` and `avoid`;
    empty where there is no choice. A request should not cross from one location into the next.
    """

    offset: int
    length: int
    replicas: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class WriteHints:
    """Wishes for a new object, which a store may ignore. 0 and "" mean the store's default."""

    replication: int = 0
    block_bytes: int = 0
    node: str = ""
    """The server that should take the data; one of `Store.write_nodes`."""


NO_HINTS = WriteHints()


class ObjectWriter(Protocol):
    """A new object being written from its start to its end; a context manager.

    Leaving the block normally closes, leaving it by an exception aborts. Until `close` has
    returned, the object may be missing, empty or incomplete.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`."""

    def close(self) -> None:
        """Finish the object and check its length; twice is safe."""

    def abort(self) -> None:
        """Give up and remove what was written, as far as the store can be reached."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Store(Protocol):
    """A collection of named objects; see the module's text for names and errors.

    Stores inherit from this class, for the answers of a store that has nothing special to say.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """What `open_store` was given, without credentials; safe to print."""

    @property
    @abstractmethod
    def preferred(self) -> PreferredReads:
        """Range size and number of streams by which this store is read fastest."""

    @abstractmethod
    def stat(self, name: str) -> Stat:
        """Describe one object or folder."""

    def locations(self, name: str) -> list[BlockLocation]:
        """Where an object's bytes are: at least one location, in order and without gaps."""
        return [BlockLocation(0, self.stat(name).size_bytes)]

    def write_nodes(self) -> list[str]:
        """Values of `WriteHints.node` among which writers can be spread; often none."""
        return []

    @abstractmethod
    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill the whole `buffer` with the object's bytes from `offset` on, or raise."""

    @abstractmethod
    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill all `buffers` (writable, flat) from one contiguous range, in one request.

        `filled(i)` is called as soon as buffer i is complete, in order. This is one attempt: it is
        not repeated inside, and no buffer is written to after it has returned or raised.
        """

    @abstractmethod
    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """The whole of a small object; CorruptDataError when it is larger than the limit."""

    @abstractmethod
    def create(self, name: str, data: bytes, *, durable: bool = True) -> bool:
        """Write a new object; False, and nothing changed, when the name is taken.

        Of any number of racing callers on any number of hosts exactly one gets True. An object
        that is not `durable` may be empty or missing after a power cut.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write an object, whether or not the name is taken; readers see the old or the new.

        `durable` is as for `create`.
        """

    @abstractmethod
    def create_from_file(self, name: str, path: str) -> bool:
        """As `create`, with the bytes of a local file."""

    @abstractmethod
    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> ObjectWriter:
        """Write a new object of any size piece by piece, replacing one of that name."""

    @abstractmethod
    def list(self, folder: str) -> Iterator[Stat]:
        """Direct children of a folder ("" is the root) in no order, without unfinished objects."""

    @abstractmethod
    def temporaries(self, folder: str) -> Iterator[Stat]:
        """Unfinished objects directly in a folder, of writers at work and of killed ones."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Move an object atomically, replacing an object of the new name.

        A folder can be moved too, to a name that is not taken (BusyError when it is).
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object or an empty folder; a missing one is no error."""

    @abstractmethod
    def delete_tree(self, folder: str) -> None:
        """Remove a folder and all below it, or an object; a missing one is no error."""

    @abstractmethod
    def mkdir(self, folder: str) -> None:
        """Make a folder and its parents; an existing one is no error."""

    def temporary_name(self, folder: str) -> str:
        """A fresh name in a folder that `list` leaves out; `rename` makes the object visible."""
        return f"{check_name(folder)}/{TEMPORARY}{os.urandom(16).hex()}"

    def local_path(self, name: str) -> str | None:
        """The object's path where it can be opened as a local file, else None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close idle connections; twice is safe, and using the store again opens new ones."""


@functools.lru_cache(maxsize=1024)  # each read asks, of few names
def check_name(name: str) -> str:
    """Return the name, or raise UsageError when it could leave the store or is ambiguous."""
    parts = name.split("/")
    if any(p in ("", ".", "..") for p in parts) or "\0" in name:
        raise UsageError(f"{name!r} is not a store name; use relative parts without '..'")
    return name


def check_limit(shown: str, size_bytes: int, limit_bytes: int) -> None:
    """Raise CorruptDataError for an object, named by `shown`, that is larger than a limit."""
    if size_bytes > limit_bytes:
        raise CorruptDataError(
            f"{shown} has {size_bytes} bytes, more than the {limit_bytes} it may have"
        )


def truncated_error(shown: str, size_bytes: int, end: int) -> CorruptDataError:
    """The error for an object, named by `shown`, that ends before a range of it, at `end`."""
    return CorruptDataError(f"{shown} ends at byte {size_bytes}, before {end}; it is truncated")
