"""What the fetcher reads: an immutable object cut into blocks, wherever their bytes lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from bootseer.errors import NotSupportedError

if TYPE_CHECKING:
    from bootseer.storage.store import Store


class Location(NamedTuple):
    """Where one block is stored: bytes `[offset, offset + length)` of the store's object `part`."""

    part: str
    offset: int
    length: int


class BlockSource(Protocol):
    """One immutable object of `size_bytes`, cut into blocks of `block_bytes` (the last shorter).

    A striped checkpoint file, a plain file and a compressed block image are all of this shape;
    the fetcher knows nothing else of them. Sources inherit from this class, for its defaults.
    """

    key: str
    """Names the bytes, for ever: equal keys mean equal bytes. "" = nothing may be reused."""
    size_bytes: int
    block_bytes: int
    store: Store
    in_place: bool
    """Stored bytes are the raw bytes, so that a request may write them to a reader's buffer."""

    source_class: str = "plain"
    """What is read, for the statistics: see `blocks.stats`."""

    volatile: bool = False
    """The blocks have no digests, so the source itself must see each block that it serves.

    Such an object may be replaced while it is read; its source detects that by what `open_block`
    was given. Blocks that one source has passed are not reused for another, even of the same key,
    and blocks from the node cache go through `open_block` like those from the store.
    """

    has_raw_digests: bool = False
    """Whether `check_raw` knows what each block's raw bytes must be."""

    def locate(self, index: int) -> Location:
        """Where block `index` is stored; pure and quick."""

    def ends_stretch(self, part: str, offset: int) -> int:
        """The end of the stretch of `part` that holds `offset`: one request should not cross it."""

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        """Servers that hold this byte of `part` (see `storage.store.BlockLocation`)."""
        return ()

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        """Verify a block's stored bytes and put its raw bytes into `raw`.

        With `in_place`, `raw` is `stored` itself and is only verified. Raises CorruptDataError;
        then no reader sees the bytes, and the fetcher tries another replica.
        """

    def check_raw(self, index: int, raw: memoryview) -> None:
        """Raise CorruptDataError unless these are the raw bytes of block `index`.

        Called only where the source `has_raw_digests`.
        """
        raise NotSupportedError(f"{type(self).__name__} has no digests of raw bytes")


def block_length(source: BlockSource, index: int) -> int:
    """Raw bytes of block `index`."""
    return min(source.block_bytes, source.size_bytes - index * source.block_bytes)


def block_count(source: BlockSource) -> int:
    """Number of blocks; 0 for an empty object."""
    return -(-source.size_bytes // source.block_bytes)
