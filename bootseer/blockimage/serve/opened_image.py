"""A block image as its server needs it, wherever its parts come from."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from bootseer.blockimage.pack_format import Index
from bootseer.blocks.cache.present_index import Identity
from bootseer.blocks.source import BlockSource
from bootseer.light_dataclasses import dataclass, replace


class FrameStream(Protocol):
    """A pack's frames in order, one byte after the other; a context manager."""

    def readinto(self, view: memoryview, /) -> int:
        """Put the next bytes into `view`; how many, 0 at the end."""

    def spoil(self) -> None:
        """Some of its bytes were wrong: no copy of it may be kept."""

    def close(self) -> None:
        """Let go of it; twice is safe."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockImage:
    """One image of `data_bytes`, whose EROFS metadata is the file `meta_path`.

    `source` opens the data's blocks and `index` reads the hot set's index: both are asked once,
    after the image is mounted, because it can be mounted without them. `frames` is the pack's
    stream, standing at its first frame; None where there is no hot set. `identity` gives the
    data's name in the node cache, more quickly than `source` would.
    """

    meta_path: str
    data_bytes: int
    source: Callable[[], BlockSource]
    index: Callable[[], Index] | None = None
    frames: FrameStream | None = None
    identity: Callable[[], Identity] | None = None


def without_hot_set(image: BlockImage) -> BlockImage:
    """The image without its hot set, whose stream is closed."""
    if image.frames is not None:
        image.frames.close()
    return replace(image, index=None, frames=None)
