"""The contract every store keeps.

Names are relative, `/`-separated, without empty, `.` or `..` parts. Objects become visible whole
or not at all. Every method maps the foreign errors of its medium to ours:

* `NotFoundError`: the object (or listed folder) does not exist;
* `AccessDeniedError`: the medium refused us, a read-only one included;
* `NoSpaceError`: the medium is full; nothing of the object became visible;
* `StoreUnavailableError`: the medium failed; `retryable` is true;
* `CorruptDataError`: an object is shorter than the range asked of it;
* `UsageError`: a name that is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import UsageError
from bootseer.storage.request_control import Attempt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, Self
else:
    Protocol = object


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """One object or folder. `mtime_s` is the store's own clock: compare it with itself only.

    `version` is opaque and changes whenever the bytes may have changed (an ETag, a file id with
    its time); it is empty where the store can tell nothing, and then nothing may be kept of the
    object from one opening to the next.
    """

    name: str
    size_bytes: int
    mtime_s: float
    is_folder: bool
    version: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Preferred:
    """How a store is read fastest: bytes of one request at most, and requests at a time."""

    range_bytes: int
    streams: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A stretch `[offset, offset + length)` of an object that lies in one place.

    `replicas` name the servers that hold it, in the spelling of `Attempt.prefer` and `avoid`;
    empty where there is no choice. A request should not cross from one stretch into the next.
    """

    offset: int
    length: int
    replicas: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class WriteHints:
    """Wishes for a new object; a store ignores what it cannot grant. 0 and "" mean its default."""

    replication: int = 0
    block_bytes: int = 0
    place: str = ""


NO_HINTS = WriteHints()


class ObjectWriter(Protocol):
    """A new object being written from its start to its end; a context manager.

    Leaving the block normally closes, leaving it by an exception aborts. Nothing may be believed
    of the object before `close` has returned: it may be missing, empty or partly there.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`."""

    def close(self) -> None:
        """End the object and check its length; twice is safe."""

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
    """A place of named objects. See the module text for names and errors."""

    @property
    def url(self) -> str:
        """What `open_store` was given, without credentials; safe to print."""

    def stat(self, name: str) -> Stat:
        """Describe one object or folder."""

    @property
    def preferred(self) -> Preferred:
        """Range size and stream count that this store is read fastest with."""

    def places(self, name: str) -> list[Placed]:
        """Where an object's stretches lie, in order and without gaps; one stretch at least."""

    def write_places(self) -> list[str]:
        """Values for `WriteHints.place` among which writers can be spread; often none."""

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill the whole `buffer` with the object's bytes from `offset` on, or raise."""

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill all `buffers` (writable, flat) from one contiguous range, in one request.

        `filled(i)` is called as soon as buffer i is complete, in order. One try: no retries
        inside, none of its buffers is written to after it returned or raised.
        """

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """The whole of a small object; CorruptDataError when it is larger than the limit."""

    def create(self, name: str, data: bytes, *, lasting: bool = True) -> bool:
        """Write a new object; False, and nothing changed, when the name is taken.

        Of any number of racing callers on any number of hosts exactly one gets True. What is not
        `lasting` need not outlive a power cut, and may be empty or gone after one.
        """

    def replace(self, name: str, data: bytes, *, lasting: bool = True) -> None:
        """Write an object, whether or not the name is taken; readers see the old or the new.

        `lasting`: as for `create`.
        """

    def create_from_file(self, name: str, path: str) -> bool:
        """As `create`, with the bytes of a local file."""

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> ObjectWriter:
        """Write a new object of any size piece by piece, replacing one of that name."""

    def list(self, folder: str) -> Iterator[Stat]:
        """Direct children of a folder ("" is the root), in no order; half-written ones left out."""

    def temporaries(self, folder: str) -> Iterator[Stat]:
        """What unfinished writers hold, or killed ones left, directly in a folder."""

    def rename(self, old: str, new: str) -> None:
        """Move an object atomically over whatever object the new name holds.

        A folder can be moved too, to a name that is not taken (BusyError when it is).
        """

    def delete(self, name: str) -> None:
        """Remove an object or an empty folder; a missing one is no error."""

    def delete_tree(self, folder: str) -> None:
        """Remove a folder and all below it, or an object; a missing one is no error."""

    def mkdir(self, folder: str) -> None:
        """Make a folder and its parents; an existing one is no error."""

    def temporary(self, folder: str) -> str:
        """A fresh name in a folder that `list` hides; `rename` makes the object visible."""

    def local_path(self, name: str) -> str | None:
        """The object's path where it can be opened as a local file, else None."""

    def close(self) -> None:
        """Close idle connections; twice is safe, and using the store again opens new ones."""


def check_name(name: str) -> str:
    """Return the name, or raise UsageError when it could leave the store or is ambiguous."""
    parts = name.split("/")
    if any(p in ("", ".", "..") for p in parts) or "\0" in name:
        raise UsageError(f"{name!r} is not a store name; use relative parts without '..'")
    return name
