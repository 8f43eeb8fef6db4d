"""The file that fsspec's own caches (`blockcache::striped::…`) read through."""

from __future__ import annotations

from typing import Any

from fsspec.spec import AbstractBufferedFile

from bootseer.errors import CorruptDataError
from bootseer.stripedfs.file import StripedFile
from bootseer.stripedfs.fsspec_face.write_file import python_errors
from bootseer.stripedfs.new_bytes import fill_bytes


class CachedFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A checkpoint file that is read through a cache of fsspec's, which asks for its blocks.

    `size` is the length that the cache has on record. Raises CorruptDataError when the file has
    another one: the cache then holds other bytes.
    """

    def __init__(
        self, fs: Any, path: str, file: StripedFile, *, size: int | None = None, **given: Any
    ) -> None:
        self._file = file
        if size is not None and size != file.size:
            file.close()
            raise CorruptDataError(
                f"{file.name} has {file.size} bytes, and had {size} when it was cached; clear the "
                "cache, or give it check_files=True"
            )
        super().__init__(fs, path, "rb", size=file.size, **given)

    def _fetch_range(self, start: int, end: int) -> bytes:
        length = min(end, self.size) - start
        with python_errors(self._file.name):
            return fill_bytes(length, lambda view: self._file.read_at(start, view))

    def close(self) -> None:
        self._file.close()
        super().close()

    def __del__(self) -> None:
        """Does not close, as fsspec's does: `StripedFile` releases what was not closed."""
