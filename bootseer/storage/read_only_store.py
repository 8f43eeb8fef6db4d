"""What every store answers that can only be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from bootseer.errors import NotSupportedError
from bootseer.storage.store import NO_HINTS, ObjectWriter, Placed, Stat, WriteHints


class ReadOnlyStore(ABC):
    """The part of `Store` that needs writing, listing or places; subclasses read."""

    kind: ClassVar[str] = "these stores"
    unlisted: ClassVar[str] = "it has no folders; name objects"

    @property
    @abstractmethod
    def url(self) -> str:
        """As `Store` says."""

    @abstractmethod
    def stat(self, name: str) -> Stat:
        """As `Store` says."""

    def places(self, name: str) -> list[Placed]:
        return [Placed(0, self.stat(name).size_bytes)]

    def write_places(self) -> list[str]:
        return []

    def local_path(self, name: str) -> str | None:
        return None

    def create(self, name: str, data: bytes, *, lasting: bool = True) -> bool:
        raise self._read_only(f"write {name}")

    def replace(self, name: str, data: bytes, *, lasting: bool = True) -> None:
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

    def temporary(self, folder: str) -> str:
        raise self._read_only(f"write in {folder}")

    def list(self, folder: str) -> Iterator[Stat]:
        raise NotSupportedError(f"{self.url} cannot be listed: {self.unlisted}")

    def temporaries(self, folder: str) -> Iterator[Stat]:
        return iter(())

    def _read_only(self, action: str) -> NotSupportedError:
        return NotSupportedError(
            f"cannot {action} in {self.url}: {self.kind} are read-only; use another store"
        )
