"""The contract every store keeps, and `open_store`.

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

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from bootseer.errors import NotSupportedError, UsageError

SCHEMES_TODAY = "file:// and plain directory paths"


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """One object or folder. `mtime_s` is the store's own clock: compare it with itself only."""

    name: str
    size_bytes: int
    mtime_s: float
    is_folder: bool


class Store(Protocol):
    """A place of named objects. See the module text for names and errors."""

    @property
    def url(self) -> str:
        """What `open_store` was given, without credentials; safe to print."""

    def stat(self, name: str) -> Stat:
        """Describe one object or folder."""

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill the whole `buffer` with the object's bytes from `offset` on, or raise."""

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """The whole of a small object; CorruptDataError when it is larger than the limit."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object; False, and nothing changed, when the name is taken.

        Of any number of racing callers on any number of hosts exactly one gets True.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write an object, whether or not the name is taken; readers see the old or the new."""

    def create_from_file(self, name: str, path: str) -> bool:
        """As `create`, with the bytes of a local file."""

    def list(self, folder: str) -> Iterator[Stat]:
        """Direct children of a folder ("" is the root), in no order; half-written ones left out."""

    def temporaries(self, folder: str) -> Iterator[Stat]:
        """What unfinished writers hold, or killed ones left, directly in a folder."""

    def rename(self, old: str, new: str) -> None:
        """Move an object atomically over whatever the new name holds."""

    def delete(self, name: str) -> None:
        """Remove an object or an empty folder; a missing one is no error."""

    def mkdir(self, folder: str) -> None:
        """Make a folder and its parents; an existing one is no error."""

    def temporary(self, folder: str) -> str:
        """A fresh name in a folder that `list` hides; `rename` makes the object visible."""

    def local_path(self, name: str) -> str | None:
        """The object's path where it can be opened as a local file, else None."""


def check_name(name: str) -> str:
    """Return the name, or raise UsageError when it could leave the store or is ambiguous."""
    parts = name.split("/")
    if any(p in ("", ".", "..") for p in parts) or "\0" in name:
        raise UsageError(f"{name!r} is not a store name; use relative parts without '..'")
    return name


def open_store(url: str) -> Store:
    """Open the store at `file:///dir`, or at a plain directory path.

    Nothing is created or contacted yet. Raises NotSupportedError for another scheme and
    UsageError for a URL without a directory.
    """
    from bootseer.storage.local import LocalStore

    scheme, mark, rest = url.partition("://")
    if not mark:
        if not url:
            raise UsageError("the store is an empty string; give a directory or file:///directory")
        return LocalStore(url)
    if scheme.lower() != "file":
        raise NotSupportedError(
            f"store scheme {scheme}:// is not supported; today there are {SCHEMES_TODAY}"
        )
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError("a file:// store needs an absolute path, as in file:///mnt/share")
    from urllib.parse import unquote

    return LocalStore("/" + unquote(path))
