"""Exceptions of HDFS servers, by their Java classes, as our errors. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    BusyError,
    CorruptDataError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.urls import redact

MESSAGE_LENGTH = 200

MISSING = {"FileNotFoundException", "NoSuchFileException"}
DENIED = {
    "AccessControlException", "SecurityException", "AuthenticationException", "InvalidToken",
    "AuthorizationException",
}  # fmt: skip
FULL = {
    "DSQuotaExceededException", "NSQuotaExceededException", "QuotaExceededException",
    "QuotaByStorageTypeExceededException", "DiskOutOfSpaceException", "MaxDirectoryItemsExceeded",
    "FSLimitException.MaxDirectoryItemsExceededException", "MaxDirectoryItemsExceededException",
}  # fmt: skip
TAKEN = {
    "FileAlreadyExistsException", "PathIsNotEmptyDirectoryException", "LeaseExpiredException",
    "AlreadyBeingCreatedException", "RecoveryInProgressException",
}  # fmt: skip
UNSUPPORTED = {"UnsupportedOperationException", "IllegalArgumentException", "ParamException"}
DAMAGED = {"ChecksumException", "CorruptFileException"}
UNUSABLE = {"InvalidPathException", "PathComponentTooLongException"}
# Hadoop 2 refuses a path below a plain file as one that may not be entered, with the file's mode,
# to all but the superuser; Hadoop 3 has ParentNotDirectoryException instead.
_BELOW_A_FILE = re.compile(r'access=EXECUTE, inode="[^"]*":[^:]*:[^:]*:-')


class RemoteException(NamedTuple):
    """A server's exception: its class without packages, and its message."""

    kind: str
    message: str


def from_remote_exception(
    remote: RemoteException, what: str, *, retry_after_s: float = 0.0
) -> BootseerError:
    """Our error for a server's exception; `retry_after_s` is the wait that it asked for, if any."""
    text = remote.message
    first_line = redact(text).strip().partition("\n")[0][:MESSAGE_LENGTH]
    said = f"cannot {what}: HDFS says {remote.kind}: {first_line}"
    if remote.kind == "ParentNotDirectoryException" or _BELOW_A_FILE.search(text):
        return NotFoundError(f"{said}; a part of the path is a file: check the path")
    if remote.kind in DENIED or "InvalidToken" in text or "token (" in text:
        return AccessDeniedError(f"{said}; check the user, the token and the permissions")
    if remote.kind in MISSING:
        return NotFoundError(f"{said}; check the path")
    if remote.kind in FULL or "No space left" in text or _lacks_room(text):
        return NoSpaceError(f"{said}; free space or raise the quota")
    if "out of the range" in text:
        return CorruptDataError(f"{said}; it is truncated")
    if remote.kind in DAMAGED:
        return CorruptDataError(f"{said}; restore it from another copy")
    if remote.kind in TAKEN:
        return BusyError(f"{said}; choose another name or wait for the other writer")
    if remote.kind in UNUSABLE or "must both be directories" in text:
        return UsageError(f"{said}; choose another name")
    if remote.kind in UNSUPPORTED:
        return NotSupportedError(f"{said}; this server does not do it")
    return StoreUnavailableError(said, retry_after_s=retry_after_s)


def is_standby(remote: RemoteException) -> bool:
    """Whether a NameNode refused because it is not the active one."""
    return remote.kind == "StandbyException" or "StandbyException" in remote.message


def _lacks_room(text: str) -> bool:
    """Whether no DataNode took a block although some are live: they are full then."""
    return "could only be" in text and "There are 0 datanode" not in text
