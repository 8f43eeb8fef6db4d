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
    """A file is held by somebody else."""

    code = errno.EBUSY


class FileUnsupportedError(_FileError, NotSupportedError):
    """A file's store cannot do this."""

    code = errno.EOPNOTSUPP


class FileUsageError(_FileError, UsageError):
    """A file's name, or what is asked of it, cannot be used."""

    code = errno.EINVAL


class FileMissingError(_FileError, NotFoundError, FileNotFoundError):
    """A file is not there (any more)."""

    code = errno.ENOENT


class FileRefusedError(_FileError, AccessDeniedError, PermissionError):
    """A file's store refuses us."""

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
    """The same error as one that is an OSError too; itself where it is one of Python's already."""
    if isinstance(error, OSError | ValueError):
        return error
    for ours, both in _KINDS:
        if isinstance(error, ours):
            made = both(str(error))
            made.__dict__.update(error.__dict__)
            return made
    return error
