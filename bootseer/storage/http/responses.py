"""What HTTP responses mean: addresses, redirects, ranges and error classes. Pure."""

from __future__ import annotations

import email.utils
import re
import socket
import time
from typing import NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UselessAnswerError,
)
from bootseer.storage.store import truncated_error
from bootseer.storage.urls import split_authority

REDIRECTS = frozenset((301, 302, 303, 307, 308))
DENIED = frozenset((401, 403, 407))
MISSING = frozenset((404, 410))
TRANSIENT = frozenset((408, 421, 425, 429, 500, 502, 503, 504, 507, 509))
EXPIRED = REDIRECTS | {400, 401, 403, 404, 410}
"""How a server answers a signed address that has expired."""
LONGEST_RETRY_AFTER_S = 300.0
_METADATA_V6 = bytes.fromhex("fd000ec2000000000000000000000254")
_NUMBER = r"[0-9]{1,19}"  # longer ones are no lengths, and int() refuses those of 4,301 digits
# Compiled at its first use, since starts wait for this module.
_CONTENT_RANGE = rf"bytes\s+(?:({_NUMBER})-({_NUMBER})|\*)/({_NUMBER}|\*)"


class Headers(Protocol):
    """Header fields by name, in any case."""

    def get(self, name: str, /) -> str | None: ...


class Origin(NamedTuple):
    """One server, as scheme, host and port; connections are kept per origin."""

    tls: bool
    host: str
    port: int

    @property
    def authority(self) -> str:
        """The "host:port" by which messages and `Attempt.replica` name it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Target(NamedTuple):
    """An absolute address. `request` (path and query) may hold a token: never print it."""

    origin: Origin
    request: str

    def __repr__(self) -> str:
        return f"Target({self.origin.authority!r})"


class ContentRange(NamedTuple):
    """A parsed Content-Range: bytes `[start, end)` of `size`; -1 where the server said `*`."""

    start: int
    end: int
    size: int


def origin_of(tls: bool, authority: str) -> Origin:
    """The origin of a "host:port"."""
    host, port = split_authority(authority)
    return Origin(tls, host, port)


def resolve_location(base: Target, location: str | None, what: str) -> Target:
    """The address that a Location or Link header names, relative to `base`.

    Raises UselessAnswerError when it is none, and AccessDeniedError for one that is not followed.
    """
    scheme = "https" if base.origin.tls else "http"
    try:
        parts = urlsplit(urljoin(f"{scheme}://{base.origin.authority}{base.request}", location))
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if not location or not host or parts.scheme not in ("http", "https"):
        raise UselessAnswerError(
            f"cannot {what}: {base.origin.authority} redirects to no address that can be used; "
            "let it redirect to one of http or https"
        )
    tls = parts.scheme == "https"
    if base.origin.tls and not tls:
        raise AccessDeniedError(
            f"cannot {what}: {base.origin.authority} redirects from https to http, which is not"
            " followed; let it redirect to https"
        )
    if _is_link_local(host) and not _is_link_local(base.origin.host):
        raise AccessDeniedError(
            f"cannot {what}: {base.origin.authority} redirects to {host}, where machines have "
            "services for themselves alone; name that address in the store's URL if it is meant"
        )
    request = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not _is_sendable(request) or not _is_sendable(host):
        raise UselessAnswerError(
            f"cannot {what}: {base.origin.authority} redirects to an address with characters that "
            "none may have"
        )
    return Target(Origin(tls, host, port or (443 if tls else 80)), request)


def _is_link_local(host: str) -> bool:
    """Whether a host is a link-local address, in any spelling: clouds' metadata services are."""
    try:
        packed = socket.inet_aton(host)
    except (OSError, ValueError):
        try:
            packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        except (OSError, ValueError):
            return False
    if len(packed) == 16:
        if packed[:12] != bytes(10) + b"\xff\xff":
            return (packed[0] == 0xFE and packed[1] & 0xC0 == 0x80) or packed == _METADATA_V6
        packed = packed[12:]
    return packed[:2] == b"\xa9\xfe"


def _is_sendable(text: str) -> bool:
    return text.isascii() and not any(c <= " " or c == "\x7f" for c in text)


def parse_content_range(text: str | None) -> ContentRange | None:
    """Parse a Content-Range; None when there is none or it makes no sense."""
    match = re.fullmatch(_CONTENT_RANGE, (text or "").strip(), re.IGNORECASE)
    if match is None:
        return None
    first, last, size = match.groups()
    total = -1 if size == "*" else int(size)
    if first is None:
        return ContentRange(-1, -1, total)
    start, end = int(first), int(last) + 1
    return ContentRange(start, end, total) if start < end and (total < 0 or end <= total) else None


def check_content_range(
    headers: Headers, length: int | None, offset: int, total: int, shown: str, what: str
) -> int:
    """Check that a 206 response holds exactly the bytes `[offset, offset + total)`.

    Returns the object's whole size, -1 where the server does not say; `shown` names the object.
    """
    span = parse_content_range(headers.get("Content-Range"))
    if span is None or span.start != offset:
        raise StoreUnavailableError(
            f"cannot {what}: the server sends another range than bytes"
            f" {offset}-{offset + total - 1}"
        )
    if span.end < offset + total:
        raise truncated_error(shown, span.end, offset + total)
    if span.end > offset + total or length not in (None, total):
        raise StoreUnavailableError(
            f"cannot {what}: the server's length is not the length of the range"
        )
    return span.size


def parse_content_length(headers: Headers) -> int | None:
    """The Content-Length; None when it is missing or makes no sense."""
    text = (headers.get("Content-Length") or "").strip()
    return int(text) if re.fullmatch(_NUMBER, text) else None


def parse_retry_after(headers: Headers) -> float:
    """Seconds that a Retry-After header asks for, given in seconds or as a date; 0 without one."""
    text = (headers.get("Retry-After") or "").strip()
    if not text:
        return 0.0
    if text.isascii() and text.isdigit():
        wait_s = float(text)
    else:
        try:
            wait_s = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(wait_s, 0.0), LONGEST_RETRY_AFTER_S)


def parse_last_modified(headers: Headers) -> float:
    """Last-Modified in seconds since the epoch; 0 when it is missing or makes no sense."""
    try:
        return email.utils.parsedate_to_datetime(headers.get("Last-Modified") or "").timestamp()
    except (ValueError, OverflowError):
        return 0.0


def response_error(
    status: int, reason: str, headers: Headers, authority: str, what: str
) -> BootseerError:
    """Our error for a response whose status is not one that the request allows."""
    said = f"cannot {what}: {authority} answers {status} {reason[:60]}".rstrip()
    if status in DENIED:
        return AccessDeniedError(f"{said}; check the user, the token or the signature")
    if status in MISSING:
        return NotFoundError(f"{said}; check the name")
    if status == 416:
        return CorruptDataError(f"{said}: the object ends before this range; it is truncated")
    if status in TRANSIENT:
        return StoreUnavailableError(said, retry_after_s=parse_retry_after(headers))
    if status in REDIRECTS:
        return UselessAnswerError(f"{said} too often; its redirects lead in a circle")
    return NotSupportedError(f"{said}; it does not do what is needed of it")
