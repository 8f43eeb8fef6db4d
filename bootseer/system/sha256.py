"""Digests of short texts without OpenSSL: its library is 5 MB for a cold start to read."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hashlib import sha256 as _sha256
    from typing import BinaryIO
else:
    try:
        from _sha2 import sha256 as _sha256  # Python's own, since 3.12
    except ImportError:
        try:
            from _sha256 import sha256 as _sha256  # before
        except ImportError:
            from hashlib import sha256 as _sha256

_LONG_BYTES = 1 << 20
"""From here on OpenSSL, several times as fast, makes up for being loaded."""


def of_text(text: str) -> str:
    """The digest of a text in UTF-8, in lower-case hex; undecodable bytes in it count as such."""
    return of_bytes(text.encode("utf-8", "surrogateescape"))


def of_bytes(data: bytes) -> str:
    """The digest of some bytes, in lower-case hex."""
    if len(data) < _LONG_BYTES:
        return _sha256(data).hexdigest()
    import hashlib

    return hashlib.sha256(data).hexdigest()


def of_file(file: BinaryIO) -> str:
    """The digest of what is left of a file, in lower-case hex. Raises OSError."""
    import hashlib

    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
