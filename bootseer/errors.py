"""Every exception bootseer raises on purpose, each with the exit code of its class.

A message says what happened, to which object, and what to do next, on one line.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import ClassVar


class BootseerError(Exception):
    """Base of all our errors. `retryable` tells whether trying again can help."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class UsageError(BootseerError):
    """A command line, configuration file, rule file or argument that cannot be used as given."""

    exit_code = 2


class NotFoundError(BootseerError):
    """A named file, key, snapshot or object does not exist."""

    exit_code = 3


class AccessDeniedError(BootseerError):
    """The store, file system or server refused us."""

    exit_code = 4


class StoreUnavailableError(BootseerError):
    """A store cannot be reached or answers with faults of its own.

    `retry_after_s` is the wait that the server asked for before another try; 0 where it did not.
    """

    exit_code = 5
    retryable = True

    def __init__(self, message: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UselessAnswerError(StoreUnavailableError):
    """A store's answer cannot be used, nor will the next: asking once more changes nothing."""

    retryable = False


class CorruptDataError(BootseerError):
    """Bytes do not match their digest, length or format; or an archive is hostile."""

    exit_code = 6


class NotSupportedError(BootseerError):
    """This machine, privilege or Python lacks something; the message names it."""

    exit_code = 7


class NoSpaceError(BootseerError):
    """A file system or quota is full."""

    exit_code = 8


class BusyError(BootseerError):
    """Another process holds a lease or lock."""

    exit_code = 9
    retryable = True


class DeadlineError(BootseerError):
    """A deadline passed before the work was done."""

    exit_code = 10
    retryable = True


def describe(error: BaseException) -> str:
    """An error in one line, never empty: our own by its message, others by their class as well."""
    text = " ".join(str(error).split())
    if isinstance(error, BootseerError) and text:
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def from_os_error(error: OSError, action: str) -> BootseerError:
    """Map an operating-system error to our hierarchy, keeping its cause.

    `action` completes "cannot ..." and names the object, e.g. "write the archive /x/y".
    """
    import errno

    text = f"cannot {action}: {error.strerror or error}"
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return NotFoundError(f"{text}; check the path")
        case errno.EISDIR | errno.ENAMETOOLONG:
            return UsageError(f"{text}; name a file, by a path that can be one")
        case errno.EACCES | errno.EPERM:
            return AccessDeniedError(f"{text}; check owner and mode, or run with more privilege")
        case errno.EROFS:
            return AccessDeniedError(f"{text}; choose a writable directory")
        case errno.ENOSPC | errno.EDQUOT:
            return NoSpaceError(f"{text}; free space or choose another file system")
        case errno.ENXIO:  # a FIFO, a socket or a device where a file belongs
            return CorruptDataError(f"{text}; remove it, or name a file")
        case errno.ETIMEDOUT:
            return DeadlineError(text)
        case errno.EBUSY:
            return BusyError(text)
        case _:
            return StoreUnavailableError(text)


class OsAction:
    """A step that the operating system may refuse: its OSError becomes an error of ours.

    `action` as in `from_os_error`.
    """

    __slots__ = ("_action",)

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            raise from_os_error(error, self._action) from error
