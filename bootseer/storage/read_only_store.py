"""What every store answers that can only be read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from bootseer.errors import NotSupportedError
from bootseer.storage.store import NO_HINTS, ObjectWriter, Stat, Store, WriteHints


class ReadOnlyStore(Store):
    """A `Store` that refuses to write and to list; subclasses read."""

    kind: ClassVar[str] = "these stores"
    """How messages name stores of this kind, in the plural."""
    unlisted: ClassVar[str] = "it has no folders; name objects"
    """Why such a store cannot be listed, and what to do instead."""

    @property
    @abstractmethod
    def url(self) -> str:
        """As `Store.url`."""

    def create(self, name: str, data: bytes, *, durable: bool = True) -> bool:
        raise self._read_only(f"write {name}")

    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        raise self._read_only(f"write {name}")

    def create_from_file(self, name: str, path: str) -> bool:
        raise self._read_only(f"write {name}")

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> ObjectWriter:
        raise self._read_only(f"write {name}")

    def rename(self, old: str, new: str) -> None:
        raise self._read_only(f"rename {old}")

    def delete(self, name: str) -> None:
        raise self._read_only(f"delete {name}")

    def delete_tree(self, folder: str) -> None:
        raise self._read_only(f"delete {folder}")

    def mkdir(self, folder: str) -> None:
        raise self._read_only(f"make the folder {folder}")

    def temporary_name(self, folder: str) -> str:
        raise self._read_only(f"write in {folder}")

    def list(self, folder: str) -> Iterator[Stat]:
        raise NotSupportedError(f"{self.url} cannot be listed: {self.unlisted}")

    def temporaries(self, folder: str) -> Iterator[Stat]:
        return iter(())

    def _read_only(self, action: str) -> NotSupportedError:
        return NotSupportedError(
            f"cannot {action} in {self.url}: {self.kind} are read-only; use another store"
        )
