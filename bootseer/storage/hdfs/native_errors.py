"""What hdfs-native raises, as our errors. Pure."""

from __future__ import annotations

import re

from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.hdfs.remote_exceptions import RemoteException, from_remote_exception
from bootseer.storage.urls import redact

# It shows a server's exception as RPCError("its.java.Class", "message\n\tat its.stack ...").
_REMOTE = re.compile(r'RPCError\("([\w.$]+)", "(.*)', re.DOTALL)
_END = re.compile(r'\\n|\n|"\)$')
MESSAGE_LENGTH = 300


def from_native_error(error: Exception, action: str) -> BootseerError:
    """Map an error of hdfs-native; `action` completes "cannot …" and names the object."""
    if isinstance(error, BootseerError):
        return error
    said = str(error)
    if remote := _REMOTE.match(said):
        java_class, message = remote.groups()
        message = _END.split(message, maxsplit=1)[0].replace('\\"', '"')
        if "is not a directory" in message:  # an IllegalStateException, of all things
            return UsageError(f"cannot {action}: {message}; choose another name")
        kind = java_class.rpartition(".")[2].rpartition("$")[2]
        return from_remote_exception(RemoteException(kind, message), action)
    text = f"cannot {action}: {redact(_END.split(said, maxsplit=1)[0])[:MESSAGE_LENGTH]}"
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{text}; check the path")
    if isinstance(error, FileExistsError):
        return BusyError(f"{text}; choose another name")
    if isinstance(error, IsADirectoryError):
        return UsageError(f"{text}; name a file")
    if said.startswith("ChecksumError"):
        return CorruptDataError(f"{text}; a DataNode sent bytes that fail its checksum")
    return StoreUnavailableError(text)
