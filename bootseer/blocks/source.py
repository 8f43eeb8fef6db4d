"""What the fetcher reads: an immutable object cut into blocks, wherever their bytes lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    the fetcher knows nothing else of them.
    """

    @property
    def key(self) -> str:
        """Names the bytes, for ever: equal keys mean equal bytes. "" = nothing may be reused."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def store(self) -> Store: ...

    @property
    def in_place(self) -> bool:
        """True when stored bytes are the raw bytes, so that they may land in a caller's buffer."""

    def locate(self, index: int) -> Location:
        """Where block `index` is stored; pure and quick."""

    def ends_stretch(self, part: str, offset: int) -> int:
        """The end of the stretch of `part` that holds `offset`: one request should not cross it."""

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        """Servers that hold this byte of `part` (see `storage.store.BlockLocation`); often ()."""

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        """Verify a block's stored bytes and put its raw bytes into `raw`.

        With `in_place`, `raw` is `stored` itself and is only verified. Raises CorruptDataError;
        then nobody sees the bytes, and the fetcher tries another replica.
        """


def is_volatile(source: BlockSource) -> bool:
    """Whether blocks have no digests, so that the source itself must see each one that it serves.

    Such a source says so by an attribute `volatile`. Its object may be replaced while it is read;
    it tells its readers by what `open_block` was given. So what one source let through is no
    answer for another, of the same key or not, and blocks from the node cache go through
    `open_block` as those from the store do.
    """
    return bool(getattr(source, "volatile", False))


def memory_key(source: BlockSource) -> str | int:
    """Under what a source's blocks are found in memory."""
    return id(source) if not source.key or is_volatile(source) else source.key


def block_length(source: BlockSource, index: int) -> int:
    """Raw bytes of block `index`."""
    return min(source.block_bytes, source.size_bytes - index * source.block_bytes)


def block_count(source: BlockSource) -> int:
    """Number of blocks; 0 for an empty object."""
    return -(-source.size_bytes // source.block_bytes)
