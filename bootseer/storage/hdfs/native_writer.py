"""Writing one object to HDFS through hdfs-native."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hdfs_native import Client, WriteOptions

from bootseer.storage.hdfs.library_store import LibraryStore
from bootseer.storage.hdfs.library_writer import LibraryWriter
from bootseer.storage.store import WriteHints

if TYPE_CHECKING:
    from hdfs_native import FileWriter


class NativeWriter(LibraryWriter):
    """`ObjectWriter` through hdfs-native; `client` gives the client for metadata."""

    def __init__(
        self,
        store: LibraryStore,
        client: Callable[[], Client],
        name: str,
        hints: WriteHints,
        *,
        keep_existing: bool,
        stall_s: float,
    ) -> None:
        super().__init__(store, name, keep_existing=keep_existing, stall_s=stall_s)
        self._client, self._hints = client, hints

    def _create_file(self) -> _UnclosedFile:
        options = WriteOptions(
            block_size=self._hints.block_bytes or None,
            replication=self._hints.replication or None,
            overwrite=True,  # a repeated call meets what the first one made
            create_parent=True,
        )
        return _UnclosedFile(self._client().create(self._temporary, options))

    def _stored_bytes(self) -> int:
        return self._client().get_file_info(self._temporary).length

    def _remove(self) -> None:
        self._client().delete(self._temporary)


class _UnclosedFile:
    """The library's file, which its own finalizer does not close.

    Its own class is one of `io`, whose finalizer calls `close`: for a file that was given up, that
    would ask the NameNode for a quarter of a minute, or for as long as the NameNode hangs, in
    whichever thread happens to collect garbage.
    """

    def __init__(self, file: FileWriter) -> None:
        self.write, self.close = file.write, file.close
        file.close = _stay_open  # type: ignore[method-assign]


def _stay_open() -> None:
    """Close nothing."""
