"""What pyarrow raises for libhdfs, as our errors. Pure."""

from __future__ import annotations

import errno

from bootseer.errors import BootseerError, NotFoundError, StoreUnavailableError, from_os_error
from bootseer.storage.urls import redact


def from_libhdfs_error(error: Exception, action: str) -> BootseerError:
    """Map an error of pyarrow; `action` completes "cannot …" and names the object."""
    if isinstance(error, BootseerError):
        return error
    text = redact(str(error)).partition("\n")[0]
    if isinstance(error, OSError) and error.errno:
        return from_os_error(OSError(error.errno, text), action)
    if "AccessControlException" in text or "Permission denied" in text:
        return from_os_error(OSError(errno.EACCES, text), action)
    if "QuotaExceeded" in text:
        return from_os_error(OSError(errno.ENOSPC, text), action)
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"cannot {action}: {text}; check the path")
    return StoreUnavailableError(f"cannot {action}: {text}")
