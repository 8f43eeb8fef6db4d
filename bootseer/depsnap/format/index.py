"""An archive's index: encoding, and decoding with every check a hostile one needs.

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

from bootseer.depsnap.format.index_checks import check
from bootseer.depsnap.format.index_records import BadIndexError, Index
from bootseer.depsnap.format.unit_layout import BLOCK
from bootseer.depsnap.json_faults import MALFORMED, ShapeError, fault
from bootseer.depsnap.types import Digest, Limits
from bootseer.errors import CorruptDataError, NotFoundError, from_os_error
from bootseer.system.regular_files import open_to_read

VERSION = 1
SKIPPABLE = 0x184D2A5E
MAGIC = b"bootseer"
_HEAD = struct.Struct("<II")
_TAIL = struct.Struct("<Q8s")


def encode(document: dict[str, Any]) -> tuple[bytes, Digest]:
    """The bytes that end an archive, and the index digest."""
    text = json.dumps(document, separators=(",", ":"), sort_keys=True).encode("ascii")
    stored = zstandard.ZstdCompressor(level=9).compress(text)
    payload = stored + _TAIL.pack(len(stored), MAGIC)
    digest = Digest(hashlib.sha256(stored).hexdigest())
    return _HEAD.pack(SKIPPABLE, len(payload)) + payload, digest


def read(path: str, *, expected_digest: Digest | None, limits: Limits) -> Index:
    """Read and check the index of the archive at `path`.

    Raises NotFoundError, CorruptDataError (truncated, altered, hostile or beyond `limits`).
    """
    return _read_index(path, expected_digest, limits, detached=False)


def read_detached(path: str, *, expected_digest: Digest, limits: Limits) -> Index:
    """`read` for a file that holds the index alone, its frames kept elsewhere or not at all."""
    return _read_index(path, expected_digest, limits, detached=True)


def load(path: str, limits: Limits) -> tuple[bytes, int]:
    """The stored bytes of the index of the archive at `path`, and where its frames end.

    Nothing of them is checked yet but that they are there. Raises as `read` does.
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


def _read_index(
    path: str, expected_digest: Digest | None, limits: Limits, *, detached: bool
) -> Index:
    stored, frames_end = load(path, limits)
    return decode(path, stored, None if detached else frames_end, expected_digest, limits)


def decode(
    path: str,
    stored: bytes,
    frames_end: int | None,
    expected_digest: Digest | None,
    limits: Limits,
) -> Index:
    """Check and decode what `load` gave. `frames_end` is None for an index alone.

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
            f"archive {path}: malformed index: {fault(error)}; do not use it"
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


def decompress(decoder: zstandard.ZstdDecompressor, stored: bytes, raw: int) -> bytes:
    """One frame of exactly `raw` bytes; the claim in the frame is checked before any output.

    Raises ValueError.
    """
    try:
        if zstandard.frame_content_size(stored) != raw:
            raise ShapeError("a frame's own size differs from the index")
        data = decoder.decompress(stored, max_output_size=raw or 1, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ShapeError(f"a frame cannot be decompressed ({error})") from error
    if len(data) != raw:
        raise ShapeError("a frame is shorter than it says")
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
