"""Read one frame of an archive, verified."""

from __future__ import annotations

import hashlib
import os

import zstandard

from bootseer.depsnap.format.index import decompress
from bootseer.depsnap.format.index_records import Frame
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
