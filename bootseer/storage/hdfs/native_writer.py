"""Writing one object to HDFS through hdfs-native."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.storage.hdfs.native_errors import from_native_error
from bootseer.storage.store import WriteHints
from bootseer.storage.temporary_name_store import RenamingWriter

if TYPE_CHECKING:
    from hdfs_native import FileWriter

    from bootseer.storage.hdfs.native_store import HdfsStore


class HdfsWriter(RenamingWriter):
    """`ObjectWriter` through hdfs-native."""

    def __init__(
        self, store: HdfsStore, name: str, hints: WriteHints, *, keep_existing: bool = False
    ) -> None:
        self._metadata, self._hints = store.metadata, hints
        super().__init__(store, name, keep_existing=keep_existing, stall_s=store.stall_s)

    def _begin(self) -> _Opened:
        from hdfs_native import WriteOptions

        options = WriteOptions(
            block_size=self._hints.block_bytes or None,
            replication=self._hints.replication or None,
            overwrite=True,  # a repeated try meets what its first one made
            create_parent=True,
        )
        return _Opened(self._metadata().create(self._temporary, options))

    def _arrived_bytes(self) -> int:
        return self._metadata().get_file_info(self._temporary).length

    def _remove(self) -> None:
        self._metadata().delete(self._temporary)

    def _mapped(self, error: Exception) -> BootseerError:
        return from_native_error(error, self._what)


class _Opened:
    """The library's file, which nothing but `close` closes.

    Its own class is one of `io`, whose finalizer closes it: of a file that was given up it would
    ask the NameNode for a quarter of a minute, or for as long as that hangs, in whatever thread
    happens to collect garbage.
    """

    def __init__(self, file: FileWriter) -> None:
        self.write, self.close = file.write, file.close
        file.close = _stay_open  # type: ignore[method-assign]


def _stay_open() -> None:
    """Close nothing."""
