"""Where the bytes of a striped file lie: layout v1, arithmetic only.

A file is cut into chunks of `chunk_bytes` (the last one shorter). Chunk i lies in stripe
i mod width, at offset (i div width) x chunk_bytes of that stripe, so every stripe is gapless.
"""

from __future__ import annotations

from typing import NamedTuple

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import UsageError

DEFAULT_CHUNK_BYTES = 4 << 20
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 64 << 20
MAX_WIDTH = 4096
MAX_CHUNKS = 3_000_000
"""The digests of more do not fit into a manifest."""


class Place(NamedTuple):
    """Where a chunk is stored: its stripe, and the byte of that stripe where it begins."""

    stripe: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How one file is striped. Raises UsageError for values that are out of bounds."""

    size_bytes: int
    chunk_bytes: int
    width: int

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise UsageError(f"a file cannot have {self.size_bytes} bytes")
        check_chunk_bytes(self.chunk_bytes)
        check_width(self.width)

    @property
    def chunk_count(self) -> int:
        """Number of chunks; 0 for an empty file."""
        return -(-self.size_bytes // self.chunk_bytes)

    def chunk_length(self, index: int) -> int:
        """Bytes of chunk `index`; only the last one is shorter than `chunk_bytes`."""
        self._check(index)
        return min(self.chunk_bytes, self.size_bytes - index * self.chunk_bytes)

    def chunk_location(self, index: int) -> Place:
        """Stripe and offset within it of chunk `index`."""
        self._check(index)
        return Place(index % self.width, index // self.width * self.chunk_bytes)

    def stripe_chunks(self, stripe: int) -> range:
        """The chunks of one stripe, in their order within it."""
        return range(stripe, self.chunk_count, self.width)

    def stripe_length(self, stripe: int) -> int:
        """Bytes of one stripe; 0 where there are fewer chunks than stripes."""
        chunks = self.stripe_chunks(stripe)
        if not chunks:
            return 0
        return (len(chunks) - 1) * self.chunk_bytes + self.chunk_length(chunks[-1])

    def stripe_lengths(self) -> tuple[int, ...]:
        """Bytes of every stripe; their sum is the file's size."""
        return tuple(self.stripe_length(stripe) for stripe in range(self.width))

    def _check(self, index: int) -> None:
        if not 0 <= index < self.chunk_count:
            raise IndexError(f"chunk {index} of {self.chunk_count}")


def check_chunk_bytes(chunk_bytes: int) -> int:
    """Return a chunk size, or raise UsageError when it is out of bounds."""
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % MIN_CHUNK_BYTES:
        raise UsageError(
            f"a chunk cannot have {chunk_bytes} bytes; give a multiple of {MIN_CHUNK_BYTES} "
            f"from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        )
    return chunk_bytes


def check_width(width: int) -> int:
    """Return a number of stripes, or raise UsageError when it is out of bounds."""
    if not 1 <= width <= MAX_WIDTH:
        raise UsageError(f"a file cannot have {width} stripes; give 1 to {MAX_WIDTH}")
    return width


def check_chunks(size_bytes: int, chunk_bytes: int) -> None:
    """Raise UsageError when a file has more chunks than a manifest can list."""
    if -(-size_bytes // chunk_bytes) > MAX_CHUNKS:
        raise UsageError(
            f"{size_bytes} bytes are too many for chunks of {chunk_bytes}; give a larger chunk size"
        )


def trim_width(size_bytes: int, chunk_bytes: int, width: int) -> int:
    """`width` without the stripes that would stay empty; an empty file has one stripe."""
    return max(1, min(width, -(-size_bytes // chunk_bytes)))


def stripe_name(stripe: int) -> str:
    """The object of a stripe within its folder."""
    return f"stripe-{stripe:05d}"
