"""Our errors for connections that cannot be made, or that fail while in use."""

from __future__ import annotations

import http.client
import ssl

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    StoreUnavailableError,
    UselessAnswerError,
)
from bootseer.storage.http.responses import Origin
from bootseer.storage.request_control import Attempt


class ShortBodyError(StoreUnavailableError):
    """A body ended before the length that was announced or asked for."""


def transfer_error(
    error: Exception, origin: Origin, what: str, attempt: Attempt, done: int = 0, total: int = -1
) -> BootseerError:
    """Our error for a connection that failed while in use, after `done` bytes of `total`."""
    if attempt.cancelled:
        return StoreUnavailableError(f"cannot {what}: it was given up")
    place = f"after {done} of {total} bytes" if total >= 0 else f"after {done} bytes"
    where = f"{origin.authority} {place}" if done or total >= 0 else origin.authority
    if isinstance(error, TimeoutError):
        return StoreUnavailableError(
            f"cannot {what}: {where} sent nothing for {attempt.stall_s:g} s"
        )
    excess = header_excess(error)
    if excess:
        return UselessAnswerError(f"cannot {what}: {origin.authority} {excess}")
    if isinstance(error, http.client.IncompleteRead):
        return ShortBodyError(f"cannot {what}: {where} ended the answer early")
    reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
    return StoreUnavailableError(f"cannot {what}: the connection to {where} broke ({reason})")


def header_excess(error: BaseException) -> str:
    """Which limit on headers a response exceeds, as "sends …"; "" for other errors.

    The limits are the standard library's, which keep a server from filling our memory.
    """
    if isinstance(error, http.client.LineTooLong):
        return "sends a header of more than 64 KiB, which is read by nobody"
    if type(error) is http.client.HTTPException and "headers" in str(error):
        return "sends more than 100 headers, which are read by nobody"
    return ""


def connect_error(error: OSError, origin: Origin, what: str) -> BootseerError:
    """Our error for a connection that could not be made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessDeniedError(
            f"cannot {what}: the certificate of {origin.authority} is not trusted"
            f" ({error.verify_message}); name its authority's file as ca_file"
        )
    if isinstance(error, ssl.SSLError):
        return StoreUnavailableError(
            f"cannot {what}: {origin.authority} speaks no TLS that we do ({error.reason})"
        )
    reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or error
    return StoreUnavailableError(f"cannot {what}: {origin.authority} is not reachable ({reason})")
