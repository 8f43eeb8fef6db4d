"""How a checkpoint is written: what a caller may choose, and the plan made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import UsageError
from bootseer.storage.store import Store, WriteHints
from bootseer.stripedfs.format.json_fields import compute_digest
from bootseer.stripedfs.format.stripe_layout import (
    DEFAULT_CHUNK_BYTES,
    check_chunk_bytes,
    check_width,
)
from bootseer.system.randomness import CHANCE

Placement = Literal["auto", "steered", "store"]

DEFAULT_WIDTH = 6
STRIPES_A_PLACE = 2
MAX_AUTO_WIDTH = 24
MAX_JOBS = 256
COMMON_BLOCK_BYTES = 128 << 20
BUFFER_BUDGET_BYTES = 256 << 20
"""For all that is written at once, in chunks that wait for their stripes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """How a checkpoint is to be written; 0 chooses automatically.

    `jobs` stripes are written at once, each through one buffer of `chunk_bytes`; fewer where these
    would take more than 256 MiB. `placement` "steered" sends each stripe to a server of its own;
    "auto" does so where it pays, which is at replication 1. A stripe that fails is written again up
    to `tries` times, half as often where that takes long. A put that continues an interrupted one
    keeps its stripes of at least `keep_bytes`, and its whole files.
    """

    width: int = 0
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    replication: int = 0
    block_bytes: int = 0
    placement: Placement = "auto"
    jobs: int = 0
    tries: int = 16
    keep_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)
        if self.width:
            check_width(self.width)
        if not 0 <= self.jobs <= MAX_JOBS:
            raise UsageError(f"{self.jobs} jobs are not possible; give 1 to {MAX_JOBS}")
        if not 0 <= self.replication <= 512:
            raise UsageError(f"a replication of {self.replication} is not possible; give 1 to 512")
        if self.tries < 1 or self.block_bytes < 0 or self.keep_bytes < 0:
            raise UsageError("tries must be at least 1, and no size negative")
        if self.block_bytes % self.chunk_bytes:
            raise UsageError(
                f"blocks of {self.block_bytes} bytes are no multiple of chunks of "
                f"{self.chunk_bytes}; a chunk must not lie in two blocks"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class WritePlan:
    """The settings that were chosen for one store."""

    width: int
    chunk_bytes: int
    replication: int
    block_bytes: int
    jobs: int
    tries: int
    keep_bytes: int
    places: tuple[str, ...]

    def hints(self, number: int) -> WriteHints:
        """Hints for the `number`th object: the places take turns."""
        place = self.places[number % len(self.places)] if self.places else ""
        return WriteHints(self.replication, self.block_bytes, place)


def plan_write(
    settings: WriteSettings,
    store: Store,
    *,
    shuffle: Callable[[list[str]], None] = CHANCE.shuffle,
) -> WritePlan:
    """Choose width, placement and jobs; asks the store for its places where that matters."""
    steer = settings.placement == "steered" or (
        settings.placement == "auto" and settings.replication == 1
    )
    places = store.write_nodes() if steer or not settings.width else []
    if steer:
        shuffle(places)  # several writers at once should not all begin with one server
    width = settings.width or _choose_width(places)
    return WritePlan(
        width=width,
        chunk_bytes=settings.chunk_bytes,
        replication=settings.replication,
        block_bytes=settings.block_bytes or _choose_block_bytes(settings.chunk_bytes),
        # Several files of a directory are written at once: small ones would else wait in line.
        jobs=min(
            settings.jobs or max(width, store.preferred.streams),
            max(1, BUFFER_BUDGET_BYTES // settings.chunk_bytes),
            MAX_JOBS,
        ),
        tries=settings.tries,
        keep_bytes=settings.keep_bytes,
        places=tuple(places) if steer else (),
    )


def choose_place(name: str) -> int:
    """The number of an object's first place, by its name: the objects of a put are spread."""
    return int.from_bytes(compute_digest(name.encode(errors="surrogateescape"))[:4], "big")


def _choose_width(places: Sequence[str]) -> int:
    """Two stripes a server keep its link busy while one of them waits for its next chunk."""
    return min(max(DEFAULT_WIDTH, STRIPES_A_PLACE * len(places)), MAX_AUTO_WIDTH)


def _choose_block_bytes(chunk_bytes: int) -> int:
    """A block size such that no chunk lies in two blocks; 0, the store's own, where that holds."""
    if COMMON_BLOCK_BYTES % chunk_bytes == 0:
        return 0
    return COMMON_BLOCK_BYTES // chunk_bytes * chunk_bytes
