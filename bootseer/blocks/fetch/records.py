"""Records of the fetcher's state machine; `blocks.fetch.fetcher` says what they mean together."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.fetch.slabs import Slot
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import BlockSource
from bootseer.light_dataclasses import dataclass, field, quickly_made
from bootseer.storage.request_control import Attempt
from bootseer.system.randomness import CHANCE

FIRST_WAITS = 32


class Piece(NamedTuple):
    """Block number `block` lies in bytes `[offset, offset + length)` of the object `part`."""

    block: int
    part: str
    offset: int
    length: int


class Status(enum.IntEnum):
    """Where a block stands; one that has no record is absent."""

    WANTED = 0
    IN_FLIGHT = 1
    READY = 2
    DROPPED = 3
    """Delivered without a copy of ours, failed, or given up: its record is of no use any more."""


@quickly_made
@dataclass(slots=True, eq=False)
class Copy:
    """Bytes `[start, start + len(target))` of a block belong into a reader's `target`."""

    start: int
    target: memoryview


@quickly_made
@dataclass(slots=True, eq=False, repr=False)
class Waiter:
    """One read or prefetch that waits for blocks.

    It is finished when it has all its blocks, or one failed (`error`), and no request writes into
    its memory any more (`writing`). Then `on_done` is called, once. `keep` pins its blocks for the
    receiver of `on_done`.
    """

    priority: Priority
    on_done: Callable[[], None] | None = None
    keep: bool = False
    deadline_s: float = 0.0
    remaining: int = 0
    """Blocks that did not arrive yet; one more while further ones may be added."""
    writing: int = 0
    """Requests that write into its memory, and copies being made into it."""
    blocks: dict[Block, None] = field(default_factory=dict)
    """The blocks that it still waits for."""
    pinned: list[Block] = field(default_factory=list)
    late: list[tuple[Block, Copy]] = field(default_factory=list)
    """Blocks that a hedge brought, pinned; the reader copies them itself."""
    queued_bytes: int = 0
    """Where its next job stands; see `StoreQueues.push_new`."""
    error: Exception | None = None
    closed: bool = False
    """It waits for no block any more: nothing new may be written into its memory."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to wait for; it stays so."""
        return self.writing == 0 and (self.closed or self.remaining == 0)


@dataclass(slots=True, eq=False, repr=False)
class ObjectRecord:
    """One source as the fetcher knows it."""

    key: str | int
    source: BlockSource
    queue: StoreQueue
    range_bytes: int
    last_block: int
    last_length: int
    """Of the object's last block; all others have the source's `block_bytes`."""
    queued_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By priority: where the next job that no reader waits for stands."""
    blocks: dict[int, Block] = field(default_factory=dict)
    cached: CachedObject | None = None
    """Once set it stays, even after it was closed."""
    cache_queue: StoreQueue | None = None
    ask_cache_s: float = 0.0
    """When to ask the node cache, for the first time or again."""
    forgotten: bool = False
    """Dropped as soon as nothing of it is in use."""

    def block_length(self, index: int) -> int:
        """Raw bytes of block `index`; see `blocks.source.block_length`."""
        return self.last_length if index == self.last_block else self.source.block_bytes


@quickly_made
@dataclass(slots=True, eq=False, repr=False)
class Block:
    """One block that is wanted, in flight or ready."""

    object: ObjectRecord
    index: int
    length: int
    priority: Priority
    direct_target: memoryview | None = None
    """A reader's own memory for the whole block, which a request may write to directly."""
    direct_waiter: Waiter | None = None
    direct_request: Request | None = None
    """The one request that may write there."""
    status: Status = Status.WANTED
    waiters: list[tuple[Waiter, Sequence[Copy]]] = field(default_factory=list)
    job: Job | None = None
    requests: list[Request] = field(default_factory=list)
    slot: Slot | None = None
    pins: int = 0
    tries: int = 0
    not_cached: bool = False
    """The node cache turned out not to have it."""
    left_s: float = 0.0
    """Since when it is left to another process; 0 = never."""
    failed_replicas: frozenset[str] = frozenset()
    corrupt_replicas: frozenset[str] = frozenset()


@quickly_made
@dataclass(slots=True, eq=False, repr=False)
class Job:
    """Blocks that one request could bring, in its order; waits in a queue for a connection."""

    queue: StoreQueue
    items: list[tuple[Block, Piece]]
    priority: Priority
    hedge_of: Request | None = None
    """The slow request that brings the same blocks."""
    place_bytes: int = -1
    """See `StoreQueues.push_new`; a job without a place goes before all others."""
    number: int = 0

    def __lt__(self, other: Job) -> bool:
        mine = (self.priority, self.place_bytes, self.number)
        return mine < (other.priority, other.place_bytes, other.number)


@dataclass(slots=True, repr=False)
class StoreHealth:
    """How soon a store answers, and since when reads have failed."""

    first_waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST_WAITS))
    """Recent waits for a request's first block."""
    arrived_s: float = 0.0
    """When the last block came; what follows is cleared then."""
    error: Exception | None = None
    """Of the last request that failed."""
    failing_s: float = 0.0
    failed_s: float = 0.0
    """When the first and the last request failed."""
    outage_s: float = 0.0
    """When the last read was given up in an outage; 0 = none was."""
    probes: list[Waiter] = field(default_factory=list)
    """Waiters that take the place of such a read's reader, for one block each."""
    probed_s: float = 0.0
    """When the last of them began."""

    def block_arrived(self, now_s: float) -> None:
        """A block came: any outage is over."""
        self.arrived_s, self.error = now_s, None
        self.failing_s = self.failed_s = self.outage_s = 0.0

    def request_failed(self, error: Exception, now_s: float) -> None:
        """A request failed."""
        self.error, self.failed_s = error, now_s
        self.failing_s = self.failing_s or now_s


@dataclass(slots=True, eq=False, repr=False)
class StoreQueue:
    """The jobs for one store (or for one cached object), and how many of them run."""

    owner: object
    """Kept, so that its identity stays its own."""
    streams: int
    heap: list[Job] = field(default_factory=list)
    active: int = 0
    objects: int = 0
    """How many send their jobs here."""
    health: StoreHealth = field(default_factory=StoreHealth)


@quickly_made
@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One request under way to a store, or one reading from the cache."""

    queue: StoreQueue
    items: list[tuple[Block, Piece]]
    priority: Priority
    hedge_of: Request | None
    place_bytes: int
    attempt: Attempt
    ahead: bool
    """No reader was waiting for it when it began."""
    slots: list[Slot | None] = field(default_factory=list)
    targets: list[memoryview | None] = field(default_factory=list)
    """Where each block goes: into a slot of ours, or into its reader's memory."""
    scratch: Slot | None = None
    """Memory for the stored bytes, where these are not the raw ones."""
    writes_to: list[Waiter] = field(default_factory=list)
    """The readers whose memory it writes to."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """By the block's number in `items`."""
    arrived: int = 0
    has_hedge: bool = False
    replica_chosen: bool = False
    replicas: tuple[str, ...] = ()
    chance: float = field(default_factory=CHANCE.random)
    """Of its blocks' back-off; one for all, so that they stay together."""
    began_s: float = 0.0
    progress_s: float = 0.0
    progress_bytes: int = 0

    @property
    def replica(self) -> str:
        """The server that answers, as far as it is known; "" = any."""
        return self.attempt.replica or self.attempt.prefer


@quickly_made
@dataclass(slots=True, eq=False, repr=False)
class Effects:
    """Actions that decisions leave to be done without the lock; see `workers.Decision`."""

    to_cancel: list[Attempt] = field(default_factory=list)
    to_close: list[CachedObject] = field(default_factory=list)
    to_plan: list[Block] = field(default_factory=list)
    """Wanted blocks that have no job."""
    to_call: list[Callable[[], None]] = field(default_factory=list)
    """`on_done` of waiters that finished."""
    new_jobs: int = 0
    """How many jobs need a worker each."""
    clock_changed: bool = False
    """Something is due sooner than the clock knows."""

    @property
    def any_left(self) -> bool:
        """Whether there is something to do; may be asked without the lock."""
        return bool(
            self.new_jobs
            or self.to_call
            or self.to_plan
            or self.to_cancel
            or self.to_close
            or self.clock_changed
        )

    def take(self) -> Effects:
        """Take the actions, which only the caller then does; wakes of threads stay."""
        taken = Effects(self.to_cancel, self.to_close, self.to_plan, self.to_call)
        self.to_cancel, self.to_close, self.to_plan, self.to_call = [], [], [], []
        return taken
