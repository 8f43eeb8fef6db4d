"""Writing one object through pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.storage.hdfs.libhdfs_errors import from_libhdfs_error
from bootseer.storage.hdfs.library_writer import LibraryStore, LibraryWriter

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem


class LibhdfsWriter(LibraryWriter):
    """`ObjectWriter` through a pyarrow file system."""

    def __init__(
        self,
        store: LibraryStore,
        files: FileSystem,
        name: str,
        *,
        keep_existing: bool,
        stall_s: float,
    ) -> None:
        super().__init__(store, name, keep_existing=keep_existing, stall_s=stall_s)
        self._files = files

    def _create_file(self) -> NativeFile:
        self._files.create_dir(self._folder, recursive=True)
        return self._files.open_output_stream(self._temporary)

    def _stored_bytes(self) -> int:
        return int(self._files.get_file_info(self._temporary).size)

    def _remove(self) -> None:
        self._file.close()
        self._files.delete_file(self._temporary)

    def _mapped(self, error: Exception) -> BootseerError:
        return from_libhdfs_error(error, self._what)
