"""An archive's index: encoded, and decoded with every check that a hostile one needs.

The index is one zstd frame of ASCII JSON inside a skippable frame (RFC 8878) at the archive's
end: `magic, length, index, stored length of the index (8 bytes), "bootseer"`, little-endian. Its
sha256 over the stored bytes is kept outside the archive. Entries are columns: one list a field.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import Any

import zstandard

from bootseer.depsnap.format.frames import decompress
from bootseer.depsnap.format.index_checks import check
from bootseer.depsnap.format.index_records import BadIndexError, Index
from bootseer.depsnap.format.unit_layout import BLOCK
from bootseer.depsnap.json_faults import MALFORMED, describe_fault
from bootseer.depsnap.types import Digest, Limits
from bootseer.errors import CorruptDataError, NotFoundError, from_os_error
from bootseer.system.blocking_calls import call_in_process
from bootseer.system.regular_files import open_to_read

VERSION = 1
SKIPPABLE = 0x184D2A5E
MAGIC = b"bootseer"
_HEAD = struct.Struct("<II")
_TAIL = struct.Struct("<Q8s")
_FRAMES_END = struct.Struct("<Q")


def encode(document: dict[str, Any]) -> tuple[bytes, Digest]:
    """The bytes that end an archive, and the index digest."""
    text = json.dumps(document, separators=(",", ":"), sort_keys=True).encode("ascii")
    stored = zstandard.ZstdCompressor(level=9).compress(text)
    payload = stored + _TAIL.pack(len(stored), MAGIC)
    digest = Digest(hashlib.sha256(stored).hexdigest())
    return _HEAD.pack(SKIPPABLE, len(payload)) + payload, digest


def read_index(
    path: str,
    *,
    expected_digest: Digest | None,
    limits: Limits | None = None,
    stall_s: float | None = None,
) -> Index:
    """Read and check an archive's index; without `expected_digest` only its form is checked.

    Raises NotFoundError, CorruptDataError (truncated, altered, hostile or beyond `limits`). With
    `stall_s` the archive's file system may hang: DeadlineError where it takes longer.
    """
    bounds = limits or Limits()
    if stall_s is None:
        stored, frames_end = _load(path, bounds)
    else:

        def load() -> bytes:
            stored, frames_end = _load(path, bounds)
            return _FRAMES_END.pack(frames_end) + stored

        reply = call_in_process(load, stall_s, path)
        (frames_end,) = _FRAMES_END.unpack_from(reply)
        stored = reply[_FRAMES_END.size :]
    return _decode(path, stored, frames_end, expected_digest, bounds)


def read_detached_index(path: str, *, expected_digest: Digest, limits: Limits) -> Index:
    """`read_index` for a file that holds the index only, without the frames."""
    stored, _ = _load(path, limits)
    return _decode(path, stored, None, expected_digest, limits)


def _load(path: str, limits: Limits) -> tuple[bytes, int]:
    """The stored bytes of the index of the archive at `path`, unchecked, and where its frames end.

    Raises as `read_index` does.
    """
    try:
        descriptor = open_to_read(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"no archive at {path}; check the store") from error
    except OSError as error:
        raise from_os_error(error, f"open the archive {path}") from error
    try:
        return _stored_index(descriptor, limits)
    except IsADirectoryError as error:
        raise CorruptDataError(f"archive {path}: it is a folder; make it again") from error
    except OSError as error:
        raise from_os_error(error, f"read the archive {path}") from error
    except BadIndexError as error:
        raise CorruptDataError(f"archive {path}: {error}; fetch or make it again") from error
    finally:
        os.close(descriptor)


def _decode(
    path: str,
    stored: bytes,
    frames_end: int | None,
    expected_digest: Digest | None,
    limits: Limits,
) -> Index:
    """Check and decode what `_load` gave. `frames_end` is None for an index without frames.

    Raises CorruptDataError.
    """
    digest = Digest(hashlib.sha256(stored).hexdigest())
    if expected_digest is not None and digest != expected_digest:
        raise CorruptDataError(
            f"archive {path}: its index has digest {digest}, the record says {expected_digest}; "
            "fetch or make it again"
        )
    try:
        return check(_parse(stored, limits), digest, frames_end, limits)
    except BadIndexError as error:
        raise CorruptDataError(f"archive {path}: {error}; do not use it") from error
    except MALFORMED as error:
        raise CorruptDataError(
            f"archive {path}: malformed index: {describe_fault(error)}; do not use it"
        ) from error


def _stored_index(descriptor: int, limits: Limits) -> tuple[bytes, int]:
    length = os.fstat(descriptor).st_size
    frame_overhead = _HEAD.size + _TAIL.size
    if length < frame_overhead:
        raise BadIndexError("truncated")
    stored, magic = _TAIL.unpack(_read(descriptor, _TAIL.size, length - _TAIL.size))
    if magic != MAGIC:
        raise BadIndexError("no index at its end (truncated, or not an archive of ours)")
    if stored > limits.index_stored or stored + frame_overhead > length:
        raise BadIndexError(f"an index of {stored} bytes is impossible or beyond the limit")
    start = length - _TAIL.size - stored - _HEAD.size
    if _HEAD.unpack(_read(descriptor, _HEAD.size, start)) != (SKIPPABLE, stored + _TAIL.size):
        raise BadIndexError("the index frame's header is damaged")
    return _read(descriptor, stored, start + _HEAD.size), start


def _read(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise BadIndexError("truncated")
    return data


def _parse(stored: bytes, limits: Limits) -> dict[str, Any]:
    try:
        raw = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as error:
        raise BadIndexError(f"unreadable index ({error})") from error
    if not 0 < raw <= limits.index_raw:
        raise BadIndexError(f"an index of {raw} bytes unpacked is impossible or beyond the limit")
    document = json.loads(decompress(zstandard.ZstdDecompressor(), stored, raw))
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise BadIndexError("an unknown index version; use the bootseer that made it")
    if document["block"] != BLOCK:
        raise BadIndexError("an unknown block size")
    return document
