"""Our errors as Python programs expect them from files: each is an OSError as well."""

from __future__ import annotations

import errno
from typing import ClassVar

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    BusyError,
    CorruptDataError,
    DeadlineError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)


class _FileError(OSError):
    code: ClassVar[int] = errno.EIO

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.errno = self.code


class FileUnavailableError(_FileError, StoreUnavailableError):
    """The store of a file cannot be reached, or answers with faults of its own."""


class FileCorruptError(_FileError, CorruptDataError):
    """A file's bytes are not what they should be."""


class FileDeadlineError(_FileError, DeadlineError, TimeoutError):
    """A file was not read or written in time."""

    code = errno.ETIMEDOUT


class FileSpaceError(_FileError, NoSpaceError):
    """There is no room for a file."""

    code = errno.ENOSPC


class FileBusyError(_FileError, BusyError):
    """A file is in use elsewhere."""

    code = errno.EBUSY


class FileUnsupportedError(_FileError, NotSupportedError):
    """A file's store cannot do this."""

    code = errno.EOPNOTSUPP


class FileUsageError(_FileError, UsageError):
    """A file's name, or the operation that was asked for, is not valid."""

    code = errno.EINVAL


class FileMissingError(_FileError, NotFoundError, FileNotFoundError):
    """A file does not exist (any more)."""

    code = errno.ENOENT


class FileRefusedError(_FileError, AccessDeniedError, PermissionError):
    """A file's store denies access."""

    code = errno.EACCES


_KINDS: tuple[tuple[type[BootseerError], type[BootseerError]], ...] = (
    (StoreUnavailableError, FileUnavailableError),
    (CorruptDataError, FileCorruptError),
    (DeadlineError, FileDeadlineError),
    (NoSpaceError, FileSpaceError),
    (BusyError, FileBusyError),
    (NotSupportedError, FileUnsupportedError),
    (UsageError, FileUsageError),
    (NotFoundError, FileMissingError),
    (AccessDeniedError, FileRefusedError),
)


def file_error(error: BootseerError) -> BootseerError:
    """Convert an error of ours to its class here; one that is Python's already stays itself."""
    if isinstance(error, OSError | ValueError):
        return error
    for ours, both in _KINDS:
        if isinstance(error, ours):
            made = both(str(error))
            made.__dict__.update(error.__dict__)
            return made
    return error
