"""Read and decompress one frame of an archive, verified."""

from __future__ import annotations

import hashlib
import os

import zstandard

from bootseer.depsnap.format.index_records import Frame
from bootseer.depsnap.json_faults import ShapeError
from bootseer.errors import CorruptDataError


def read_frame(descriptor: int, frame: Frame, decoder: zstandard.ZstdDecompressor) -> bytes:
    """One frame's raw bytes, its digest checked before the decoder sees it.

    Raises CorruptDataError (without the archive's path), OSError.
    """
    stored = os.pread(descriptor, frame.stored, frame.offset)
    if len(stored) != frame.stored:
        raise CorruptDataError(f"truncated at byte {frame.offset + len(stored)}")
    if hashlib.sha256(stored).hexdigest() != frame.digest:
        end = frame.offset + frame.stored
        raise CorruptDataError(f"bytes {frame.offset} to {end} do not match their digest")
    try:
        return decompress(decoder, stored, frame.raw)
    except ValueError as error:
        raise CorruptDataError(f"the frame at byte {frame.offset}: {error}") from error


def decompress(decoder: zstandard.ZstdDecompressor, stored: bytes, raw: int) -> bytes:
    """One frame of exactly `raw` bytes; the frame's own size is checked before any output.

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
