"""Writing through pyarrow: one object under a temporary name, renamed when it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, NotFoundError, StoreUnavailableError, from_os_error
from bootseer.events.redaction import redact_message
from bootseer.storage.options import DEFAULTS
from bootseer.storage.temporary_name_store import RenamingWriter

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem

    from bootseer.storage.hdfs.libhdfs_store import ArrowStore


class ArrowWriter(RenamingWriter):
    """`ObjectWriter` through a pyarrow file system."""

    def __init__(
        self, store: ArrowStore, files: FileSystem, name: str, *, keep_existing: bool = False
    ) -> None:
        self._files = files
        super().__init__(store, name, keep_existing=keep_existing, stall_s=DEFAULTS.stall_s)

    def _begin(self) -> NativeFile:
        self._files.create_dir(self._folder, recursive=True)
        return self._files.open_output_stream(self._temporary)

    def _arrived_bytes(self) -> int:
        return int(self._files.get_file_info(self._temporary).size)

    def _remove(self) -> None:
        self._file.close()
        self._files.delete_file(self._temporary)

    def _mapped(self, error: Exception) -> BootseerError:
        return mapped(error, self._what)


def mapped(error: Exception, what: str) -> BootseerError:
    """Our error for what pyarrow raised while doing `what`."""
    if isinstance(error, BootseerError):
        return error
    said = redact_message(str(error)).partition("\n")[0]
    if isinstance(error, OSError) and error.errno:
        return from_os_error(OSError(error.errno, said), what)
    if "AccessControlException" in said or "Permission denied" in said:
        return from_os_error(PermissionError(13, said), what)
    if "QuotaExceeded" in said:
        return from_os_error(OSError(28, said), what)
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"cannot {what}: {said}; check the path")
    return StoreUnavailableError(f"cannot {what}: {said}")
