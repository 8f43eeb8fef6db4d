"""The files that an install command reads: which paths its words name, and what they hold."""

from __future__ import annotations

import codecs
import errno
import os
import re

from bootseer.errors import UsageError, from_os_error
from bootseer.events.redaction import redact_for_key
from bootseer.system import sha256
from bootseer.system.regular_files import opener

FILE_LIMIT_BYTES = 64 << 20
NOT_FOUND = "not found"
_UNREADABLE = "unreadable"
_REFUSED = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP))
_BOMS = (
    *((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)


def join(folder: str, path: str) -> str:
    """The path of a file that is named in a directory. A `..` follows the links before it."""
    full = os.path.join(folder, path)
    return os.path.realpath(full) if ".." in path.split("/") else os.path.normpath(full)


def local_path(name: str) -> str | None:
    """The path that a name, or a `file:` URL, stands for; None for a file elsewhere."""
    if name[:5].lower() != "file:":
        return None if "://" in name or "\0" in name else name
    path = re.split("[?#]", name[5:])[0]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            return None
        path = slash + rest
    if "%" in path:
        from urllib.parse import unquote  # few names are quoted

        path = unquote(path)
    return None if "\0" in path else path  # which names no file


def find_upwards(folder: str, name: str) -> str | None:
    """The nearest directory from `folder` up that holds `name`."""
    here = folder
    while True:
        if os.path.exists(os.path.join(here, name)):
            return here
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above


def label(path: str, cwd: str) -> str:
    """A path for a key: relative below the working directory, alike in two checkouts."""
    relative = os.path.relpath(path, cwd)
    return path if relative.startswith("..") else relative


def digest_text(text: str) -> str:
    """sha256 of a text without its credentials."""
    return sha256.of_text(redact_for_key(text))


def read_text(path: str) -> str:
    """A small text file; NotFoundError or AccessDeniedError when it cannot be read."""
    try:
        return _read(path)
    except OSError as error:
        raise from_os_error(error, f"read the key file {path}") from error


def try_to_read(path: str) -> tuple[str, str]:
    """The text of a file that a tool reads if it can, else "" and why it cannot.

    Raises for a FIFO, whose text cannot be known ahead, and for faults that may pass.
    """
    try:
        return _read(path), ""
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "", NOT_FOUND
        if error.errno in _REFUSED:
            return "", _UNREADABLE
        raise from_os_error(error, f"read the key file {path}") from error


def read_settings(path: str) -> str:
    """A settings file's text, "" for one that cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", opener=opener) as file:
            return file.read()
    except OSError:
        return ""


def _read(path: str) -> str:
    """A file's text, in whichever encoding pip reads it."""
    if path == os.devnull:
        return ""
    if os.path.getsize(path) > FILE_LIMIT_BYTES:
        raise UsageError(f"key file {path} is larger than 64 MiB; name a lock file instead")
    with open(path, "rb", opener=opener) as file:
        data = file.read()
    mark, encoding = next((m for m in _BOMS if data.startswith(m[0])), (b"", "utf-8"))
    wide = encoding != "utf-8"  # whose decoder removes the mark
    text = data[0 if wide else len(mark) :].decode(
        encoding, "replace" if wide else "surrogateescape"
    )
    return text.replace("\r\n", "\n").replace("\r", "\n")
