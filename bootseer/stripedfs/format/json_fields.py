"""Reading JSON that may be truncated, damaged or hostile: every field by its name and type."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import xxhash

from bootseer.errors import CorruptDataError, NotSupportedError

FORMAT = "bootseer.stripes"
VERSION = 1
NEWEST = {"pointer": 2}
"""The highest version of each kind of document that is understood; others: `VERSION`."""
MAX_INTEGER = (1 << 63) - 1
DIGEST_BYTES = 16
T = TypeVar("T")


class BadFieldError(ValueError):
    """A document is not of our format; the message says which field and why."""


def compute_digest(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 in its canonical (big-endian) form; releases the GIL."""
    return xxhash.xxh3_128_digest(data)


def encode(kind: str, body: dict[str, Any], version: int = VERSION) -> bytes:
    """A document of this kind as one line of ASCII JSON, always the same bytes for one body."""
    document = {"format": FORMAT, "version": version, "kind": kind, **body}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode("ascii") + b"\n"


def decode(data: bytes, kind: str, where: str) -> dict[str, Any]:
    """The document's fields.

    Raises CorruptDataError for anything that is no document of this kind, NotSupportedError for a
    newer version. `where` names the object in messages.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(
            f"{where} is truncated or damaged ({error}); write it anew"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptDataError(f"{where} is no document of a striped file; check the name")
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise CorruptDataError(f"{where} has no valid version; write it anew")
    newest = NEWEST.get(kind, VERSION)
    if version > newest:
        raise NotSupportedError(
            f"{where} is of version {version} and this bootseer reads up to version {newest}; "
            "use a newer bootseer"
        )
    if document.get("kind") != kind:
        raise CorruptDataError(f"{where} is not a {kind} document; write it anew")
    return document


def read_integer(document: dict[str, Any], name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """A whole number within bounds."""
    value = document.get(name)
    if type(value) is not int:
        raise BadFieldError(f"{name} is missing or no whole number")
    if not low <= value <= high:
        raise BadFieldError(f"{name} is {value}, not within {low} to {high}")
    return value


def read_field(document: dict[str, Any], name: str, kind: type[T]) -> T:
    """A field of exactly this JSON type."""
    value = document.get(name)
    if type(value) is not kind:
        raise BadFieldError(f"{name} is missing or of the wrong type")
    return value


def read_digest(document: dict[str, Any], name: str) -> bytes:
    """An xxh3-128 digest, written as 32 hexadecimal digits."""
    text = read_field(document, name, str)
    if len(text) != 2 * DIGEST_BYTES or not text.isascii():
        raise BadFieldError(f"{name} is no digest")
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise BadFieldError(f"{name} is no digest") from error


def check_path(text: object, what: str) -> str:
    """A relative path without empty, `.` or `..` parts, that a file system can hold."""
    if type(text) is not str:
        raise BadFieldError(f"{what} is missing or no text")
    parts = text.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in text:
        raise BadFieldError(f"{what} {text!r} is no relative path")
    try:
        sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    except UnicodeEncodeError as error:
        raise BadFieldError(f"{what} {text!r} cannot be a file's name") from error
    if max(sizes) > 255 or sum(sizes) + len(sizes) > 4096:
        raise BadFieldError(f"{what} {text[:80]!r}… is too long")
    return text
