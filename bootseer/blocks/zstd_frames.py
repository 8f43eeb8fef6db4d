"""Single zstd frames of bounded size: lists, traces, metadata."""

from __future__ import annotations

import zstandard

from bootseer.errors import CorruptDataError


def unpack_frame(
    data: bytes | bytearray | memoryview, *, most_bytes: int, window_bytes: int = 0, name: str
) -> bytes:
    """Decode one frame that says its size, at most `most_bytes`.

    `window_bytes` bounds the memory besides the result; 0 is zstd's own bound. Raises
    CorruptDataError, naming `name`, for anything else.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
    try:
        # A frame that does not say its size could be cut behind its last block unnoticed.
        if not 0 <= zstandard.frame_content_size(data) <= most_bytes:
            raise CorruptDataError(f"{name} unpacks to more than is allowed, {most_bytes} bytes")
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"{name} is no intact zstd frame: {error}") from error
