"""What fsspec gives its users to write into, and the exceptions they expect."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsspec.utils import stringify_path

from bootseer.errors import AccessDeniedError, BootseerError, NotFoundError, NotSupportedError
from bootseer.events.redaction import safe_url
from bootseer.stripedfs.file_errors import file_error

if TYPE_CHECKING:
    from bootseer.stripedfs.write.saved_file import SavedFile


class UnsupportedModeError(NotSupportedError, ValueError):
    """A file cannot be opened in this mode; what Python raises for one that is none."""


class WriteFile(io.RawIOBase):
    """A file being written; `close` publishes, an exception in its `with` block gives it up."""

    mode = "wb"

    def __init__(self, saved: SavedFile, path: str, *, autocommit: bool) -> None:
        super().__init__()
        self.path = shown(path)
        self._saved = saved
        self._autocommit = autocommit

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        raise TypeError(f"{self.path} is being written and cannot be pickled; close it first")

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Refused as by any file that is open for writing."""
        raise io.UnsupportedOperation("not readable")

    def tell(self) -> int:
        return self._saved.size_bytes

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError(f"{self.path} is closed; open it anew to write it again")
        view = memoryview(data).cast("B")
        with python_errors(self.path):
            self._saved.write(view)
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Publish (fsspec's transactions call it)."""
        with python_errors(self.path):
            self._saved.close()

    def discard(self) -> None:
        """Give up; nothing becomes visible."""
        self._autocommit = False
        self._saved.abort()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self.discard()
        super().__exit__(kind, error, traceback)


def shown(path: Any) -> str:
    """A path as users may see it: a URL without its user, password and signature."""
    text: str = stringify_path(path)
    return safe_url(text) if "://" in text else text


@contextlib.contextmanager
def python_errors(path: Any) -> Iterator[None]:
    """What Python has an exception for becomes that, with ours as its cause.

    All others stay ours, and become an OSError as well.
    """
    try:
        yield
    except OSError:
        raise
    except NotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, str(error), shown(path)) from error
    except AccessDeniedError as error:
        raise PermissionError(errno.EACCES, str(error), shown(path)) from error
    except BootseerError as error:
        raise file_error(error) from error


def made_place(lpath: Any) -> str:
    """A local path whose folder is there."""
    path: str = os.fspath(lpath)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    return path
