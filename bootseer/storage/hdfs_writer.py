"""Writing one object to HDFS through hdfs-native."""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import TYPE_CHECKING

from bootseer.errors import StoreUnavailableError
from bootseer.storage.base import WriteHints
from bootseer.storage.errand import within
from bootseer.storage.hdfs_errors import from_native_error
from bootseer.storage.local import TEMPORARY

if TYPE_CHECKING:
    from collections.abc import Callable

    from hdfs_native import FileWriter

    from bootseer.storage.hdfs import HdfsStore

WRITE_DEADLINE_S = 300.0
"""The longest wait for one piece: a pipeline may be rebuilt twice meanwhile."""


class HdfsWriter:
    """`ObjectWriter` under a temporary name; `close` checks the length and renames."""

    def __init__(
        self, store: HdfsStore, name: str, hints: WriteHints, *, keep_existing: bool = False
    ) -> None:
        self._store, self._name, self._keep_existing = store, name, keep_existing
        self._final = store.path(name)
        folder = self._final.rpartition("/")[0]
        self._temporary = f"{folder}/{TEMPORARY}{uuid.uuid4().hex}"
        self._what = f"write {store.told(name)}"
        self._size_bytes = 0
        self._open = True
        self.created = False
        """Whether `close` gave the object its name; false when that was taken meanwhile."""
        self._file: FileWriter = store.call(self._what, lambda: self._create(hints))

    def _create(self, hints: WriteHints) -> FileWriter:
        from hdfs_native import WriteOptions

        options = WriteOptions(
            block_size=hints.block_bytes or None,
            replication=hints.replication or None,
            overwrite=True,  # a repeated try meets what its first one made
            create_parent=True,
        )
        return self._store.metadata().create(self._temporary, options)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._do(lambda: self._file.write(view))
        self._size_bytes += len(view)

    def close(self) -> None:
        if not self._open:
            return
        try:
            self._do(self._file.close)
            found = self._store.call(
                self._what, lambda: self._store.metadata().get_file_info(self._temporary)
            )
            if found.length != self._size_bytes:
                raise StoreUnavailableError(
                    f"cannot {self._what}: {found.length} of {self._size_bytes} bytes arrived"
                )
            self.created = self._store.move(
                self._temporary, self._final, self._what, overwrite=not self._keep_existing
            )
        except BaseException:
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
        client = self._store.metadata
        try:
            within(lambda: client().delete(self._temporary), self._store.stall_s, self._what)
        except Exception:
            pass  # the cluster is away: the temporary stays for `gc`, hidden from readers

    def _do(self, call: Callable[[], object]) -> None:
        """One step of the pipeline; never tried again, for its bytes may have been taken."""
        try:
            within(call, WRITE_DEADLINE_S, self._what)
        except Exception as error:
            raise from_native_error(error, self._what) from error

    def __enter__(self) -> HdfsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
