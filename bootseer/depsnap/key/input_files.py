"""The text of a file that an install command reads, in whatever encoding pip reads it."""

from __future__ import annotations

import codecs
import errno
import os

from bootseer.errors import UsageError, from_os_error
from bootseer.system.regular_files import opener

FILE_LIMIT_BYTES = 64 << 20
NOT_FOUND = "not found"
_UNREADABLE = "unreadable"
_REFUSED = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP))
_BOMS = (
    *((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)


def read_text(path: str) -> str:
    """A small text file; NotFoundError or AccessDeniedError when it cannot be read."""
    try:
        return _text(path)
    except OSError as error:
        raise from_os_error(error, f"read the key file {path}") from error


def look(path: str) -> tuple[str, str]:
    """The text of a file that a tool reads if it can, else "" and why it cannot.

    Raises for a FIFO, whose text nobody knows ahead, and for faults that may pass.
    """
    try:
        return _text(path), ""
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "", NOT_FOUND
        if error.errno in _REFUSED:
            return "", _UNREADABLE
        raise from_os_error(error, f"read the key file {path}") from error


def _text(path: str) -> str:
    if path == os.devnull:
        return ""
    if os.path.getsize(path) > FILE_LIMIT_BYTES:
        raise UsageError(f"key file {path} is larger than 64 MiB; name a lock file instead")
    with open(path, "rb", opener=opener) as file:
        data = file.read()
    mark, encoding = next((m for m in _BOMS if data.startswith(m[0])), (b"", "utf-8"))
    wide = encoding != "utf-8"  # whose decoder takes the mark off
    text = data[0 if wide else len(mark) :].decode(
        encoding, "replace" if wide else "surrogateescape"
    )
    return text.replace("\r\n", "\n").replace("\r", "\n")
