"""Tokens in files: their own text, or Hadoop's token file (written by `hdfs fetchdt`).

Hadoop's file, version 0: "HDTS", a byte 0, the count of tokens as a variable-length integer, and
for each its alias and its four fields (identifier, password, kind, service), each after its length.
A URL has the four fields in this form, in base64 without padding.
"""

from __future__ import annotations

import base64
from typing import NamedTuple

from bootseer.errors import AccessDeniedError, NotSupportedError, UsageError, from_os_error

MAGIC = b"HDTS"
FILE_LIMIT_BYTES = 1 << 20
HDFS_KINDS = (b"HDFS_DELEGATION_TOKEN", b"WEBHDFS delegation", b"SWEBHDFS delegation")


class HadoopToken(NamedTuple):
    """One token; `identifier` and `password` are secret."""

    alias: bytes
    identifier: bytes
    password: bytes
    kind: bytes
    service: bytes

    def __repr__(self) -> str:
        return f"HadoopToken(kind={self.kind!r}, service={self.service!r})"

    def url_text(self) -> str:
        """The spelling of a URL's `delegation` parameter."""
        fields = (self.identifier, self.password, self.kind, self.service)
        raw = b"".join(_encode_vint(len(f)) + f for f in fields)
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def read_token(path: str) -> str:
    """The token in a file, in its URL spelling; read each time, since tokens are renewed.

    Raises NotFoundError or AccessDeniedError for the file, UsageError when it holds no token.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(FILE_LIMIT_BYTES)
    except OSError as error:
        raise from_os_error(error, f"read the token file {path}") from error
    if raw.startswith(MAGIC):
        tokens = parse_tokens(raw, path)
        chosen = next((t for t in tokens if t.kind in HDFS_KINDS), None)
        if chosen is None:
            raise AccessDeniedError(f"the token file {path} holds no HDFS token; fetch one")
        return chosen.url_text()
    try:
        text = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    if not text or any(c <= " " or c == "\x7f" for c in text):
        raise UsageError(f"the token file {path} holds no token; write one line of text into it")
    return text


def parse_tokens(raw: bytes, path: str) -> list[HadoopToken]:
    """Take Hadoop's token file apart; `path` is for messages."""
    if raw[4:5] != b"\0":
        raise NotSupportedError(
            f"the token file {path} is of a newer format than 0; write it with"
            " `hdfs dtutil … -format java`"
        )
    try:
        count, at = _parse_vint(raw, 5)
        tokens = []
        for _ in range(count):
            fields = []
            for _ in range(5):
                length, at = _parse_vint(raw, at)
                if length < 0 or at + length > len(raw):
                    raise IndexError
                fields.append(raw[at : at + length])
                at += length
            tokens.append(HadoopToken(*fields))
    except IndexError:
        raise UsageError(f"the token file {path} is cut off; fetch the token again") from None
    return tokens


def _parse_vint(raw: bytes, at: int) -> tuple[int, int]:
    """Hadoop's variable-length integer (VInt); returns it with the offset after it."""
    first = raw[at] - 256 if raw[at] > 127 else raw[at]
    if first >= -112:
        return first, at + 1
    size = -112 - first if first >= -120 else -120 - first
    if at + 1 + size > len(raw):
        raise IndexError
    value = int.from_bytes(raw[at + 1 : at + 1 + size], "big")
    return (value if first >= -120 else ~value), at + 1 + size


def _encode_vint(value: int) -> bytes:
    if value <= 127:
        return bytes([value])
    body = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([256 - 112 - len(body)]) + body
