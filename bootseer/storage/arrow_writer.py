"""Writing through pyarrow: one object under a temporary name, renamed when it is whole."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, NotFoundError, StoreUnavailableError, from_os_error
from bootseer.storage.errand import within
from bootseer.storage.local import TEMPORARY
from bootseer.storage.options import DEFAULTS
from bootseer.storage.urls import redact

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem

    from bootseer.storage.arrow import ArrowStore

WRITE_DEADLINE_S = 300.0


class ArrowWriter:
    """`ObjectWriter` under a temporary name; `close` checks the length and renames."""

    def __init__(
        self, store: ArrowStore, files: FileSystem, name: str, *, keep_existing: bool = False
    ) -> None:
        self._store, self._files, self._keep_existing = store, files, keep_existing
        self._final = store.path(name)
        folder = self._final.rpartition("/")[0]
        self._temporary = f"{folder}/{TEMPORARY}{uuid.uuid4().hex}"
        self._what = f"write {store.told(name)}"
        self._size_bytes = 0
        self._open = True
        self.created = False
        """Whether `close` gave the object its name; false when that was taken meanwhile."""

        def begin() -> NativeFile:
            files.create_dir(folder, recursive=True)
            return files.open_output_stream(self._temporary)

        self._file = store.call(self._what, begin)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._do(lambda: self._file.write(view))
        self._size_bytes += len(view)

    def close(self) -> None:
        if not self._open:
            return
        try:
            self._do(self._file.close)
            found = self._store.call(self._what, lambda: self._files.get_file_info(self._temporary))
            if found.size != self._size_bytes:
                raise StoreUnavailableError(
                    f"cannot {self._what}: {found.size} of {self._size_bytes} bytes arrived"
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
        try:
            within(self._remove, DEFAULTS.stall_s, self._what)
        except Exception:
            pass  # the cluster is away: the temporary stays, hidden from readers

    def _remove(self) -> None:
        self._file.close()
        self._files.delete_file(self._temporary)

    def _do(self, call: Callable[[], object]) -> None:
        try:
            within(call, WRITE_DEADLINE_S, self._what)
        except Exception as error:
            raise mapped(error, self._what) from error

    def __enter__(self) -> ArrowWriter:
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


def mapped(error: Exception, what: str) -> BootseerError:
    """Our error for what pyarrow raised while doing `what`."""
    if isinstance(error, BootseerError):
        return error
    said = redact(str(error)).partition("\n")[0]
    if isinstance(error, OSError) and error.errno:
        return from_os_error(OSError(error.errno, said), what)
    if "AccessControlException" in said or "Permission denied" in said:
        return from_os_error(PermissionError(13, said), what)
    if "QuotaExceeded" in said:
        return from_os_error(OSError(28, said), what)
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"cannot {what}: {said}; check the path")
    return StoreUnavailableError(f"cannot {what}: {said}")
