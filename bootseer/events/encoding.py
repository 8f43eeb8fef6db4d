"""How an event becomes a line: JSON within bounds, without the secrets of URLs, never raising."""

from __future__ import annotations

from .redaction import redact_url

try:  # the C function alone: importing `json` costs 2 ms of a 9 ms interpreter
    from _json import encode_basestring_ascii as _quote
except ImportError:  # an interpreter without the accelerator
    from json import dumps as _quote  # the same for text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Attributes = Mapping[str, Any]

quote = _quote

MAX_TEXT_CHARS = 1024  # of one attribute value; what is cut ends in "..."
MAX_NAME_CHARS = 256
MAX_ITEMS = 128  # of one list, or of one object
MAX_LINE_BYTES = 32768


def encode_text(value: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return a text as JSON, cut at `limit`, and without the secrets of URLs in it."""
    if len(value) <= limit and value.isascii() and "://" not in value:
        return quote(value)
    if len(value) > limit:
        value = value[:limit] + "..."
    # Names from the operating system may hold lone surrogates, which strict parsers refuse.
    value = value.encode("utf-8", "replace").decode("utf-8")
    return quote(redact_url(value))


def _encode_value(value: Any, depth: int = 0) -> str:
    kind = type(value)
    if kind is str:
        return encode_text(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return repr(value) if -(2**63) <= value < 2**63 else encode_text(hex(value))
    if kind is float:
        return repr(value) if value - value == 0.0 else "null"  # JSON knows no nan, no inf
    if value is None:
        return "null"
    if depth < 4 and isinstance(value, dict):
        return encode_object(value, depth + 1)
    if depth < 4 and isinstance(value, (list, tuple)):
        return "[" + ",".join([_encode_value(v, depth + 1) for v in value[:MAX_ITEMS]]) + "]"
    if isinstance(value, (bytes, bytearray)):
        return encode_text(bytes(value[:MAX_TEXT_CHARS]).decode("utf-8", "replace"))
    return encode_text(str(value))


def encode_object(attributes: Attributes, depth: int = 0) -> str:
    """Return attributes as a JSON object; one that has no text leaves the others alone."""
    parts: list[str] = []
    for key, value in attributes.items():
        try:
            if type(value) is str:
                shown = encode_text(value)
            elif type(value) is int and -(2**63) <= value < 2**63:
                shown = repr(value)
            else:
                shown = _encode_value(value, depth)
            parts.append(f"{encode_text(str(key), MAX_NAME_CHARS)}:{shown}")
        except Exception:  # a foreign __str__ may raise anything; the other attributes still count
            continue
        if len(parts) == MAX_ITEMS:
            break
    return f"{{{','.join(parts)}}}"
