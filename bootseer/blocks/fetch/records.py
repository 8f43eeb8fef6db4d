"""Records of the fetcher's state machine; `blocks.fetch.fetcher` says what they mean together."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from bootseer.blocks.cache.direct_reads import Straight
from bootseer.blocks.fetch.plan.request_plan import Piece
from bootseer.blocks.fetch.slabs import Slot
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import BlockSource
from bootseer.storage.request_control import Attempt
from bootseer.system.randomness import CHANCE


class Status(enum.IntEnum):
    """Where a block stands; one that has no record is absent."""

    WANTED = 0
    FLYING = 1
    READY = 2
    GONE = 3
    """Delivered without a copy of ours, failed, or given up: its record counts no more."""


class Copy:
    """Bytes `[start, start + len(target))` of a block belong into a reader's `target`."""

    __slots__ = ("start", "target")

    def __init__(self, start: int, target: memoryview) -> None:
        self.start = start
        self.target = target


class Group:
    """Somebody who waits for blocks: a reader, a FUSE read, a prefetch.

    It is finished when none of its blocks remains, or one failed (`error`), and nobody writes
    into its memory any more (`writing`). `keep` pins its blocks in memory until it is collected.
    """

    __slots__ = (
        "blocks",
        "callback",
        "closed",
        "deadline_s",
        "error",
        "event",
        "keep",
        "late",
        "pinned",
        "priority",
        "queued_bytes",
        "remaining",
        "told",
        "writing",
    )

    def __init__(
        self,
        priority: Priority,
        *,
        keep: bool = False,
        callback: Callable[[], None] | None = None,
        deadline_s: float = 0.0,
    ) -> None:
        self.priority = priority
        self.keep = keep
        self.callback = callback
        self.deadline_s = deadline_s
        self.event = threading.Event()
        self.blocks: dict[Block, None] = {}  # those it still waits for
        self.pinned: list[Block] = []
        self.late: list[tuple[Block, Copy]] = []  # won by a hedge; the reader copies them itself
        self.queued_bytes = 0  # where its next job stands; see `Lines.stand`
        self.remaining = 0
        self.writing = 0
        self.error: BaseException | None = None
        self.closed = False  # withdrawn: nothing new may be written into its memory
        self.told = False

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.writing == 0 and (self.closed or self.remaining == 0)


class Object:
    """One source as the fetcher knows it."""

    __slots__ = (
        "blocks",
        "cache_line",
        "cached",
        "claims",
        "forgotten",
        "key",
        "line",
        "queued_bytes",
        "range_bytes",
        "reopen_s",
        "source",
        "stats",
    )

    def __init__(self, key: str | int, source: BlockSource, line: Line, range_bytes: int) -> None:
        self.key = key
        self.source = source
        self.line = line
        self.range_bytes = range_bytes
        self.queued_bytes = [0, 0, 0]  # by priority: where the next job ahead of readers stands
        self.blocks: dict[int, Block] = {}
        self.claims: dict[tuple[int, int], list[Group]] = {}
        self.cached: CachedBlocks | None = None  # once set it stays, also when it was closed
        self.cache_line: Line | None = None
        self.reopen_s = 0.0  # when to ask the node cache, again where it could not be opened
        self.stats = ""
        self.forgotten = False  # dropped as soon as nothing of it is in use


class CachedBlocks(Protocol):
    """What the fetcher asks of an object of the node cache (see `blocks.cache.cached_object`)."""

    @property
    def usable(self) -> bool:
        """Whether it may hold anything."""

    @property
    def storing(self) -> bool:
        """Whether `store` may still keep something."""

    def missing(self, first: int, count: int) -> list[int]:
        """Blocks that are not there."""

    def read(self, index: int, raw: memoryview) -> bool:
        """Fill `raw`, verified; False when it is not there."""

    def store(self, index: int, raw: memoryview) -> bool:
        """Keep a verified block; whether it was new and is kept."""

    def straight(self) -> Straight | None:
        """Reads of what was verified; None where nothing is cached."""

    def claim(self, index: int) -> bool:
        """Take the right to fetch a block; False while another process has it."""

    def claimed_elsewhere(self, index: int) -> bool:
        """Whether another process has it."""

    def unclaim(self, index: int) -> None:
        """Give it back; not having it is no error."""

    def close(self) -> None:
        """Unpin."""


class Block:
    """One block that is wanted, in flight or ready."""

    __slots__ = (
        "avoid",
        "bad",
        "flights",
        "foreign_s",
        "index",
        "job",
        "landing",
        "landing_flight",
        "landing_group",
        "length",
        "object",
        "pins",
        "priority",
        "slot",
        "status",
        "tries",
        "uncached",
        "waiters",
    )

    def __init__(self, parent: Object, index: int, length: int, priority: Priority) -> None:
        self.object = parent
        self.index = index
        self.length = length
        self.priority = priority
        self.status = Status.WANTED
        self.waiters: list[tuple[Group, Sequence[Copy]]] = []
        self.job: Job | None = None
        self.flights: list[Flight] = []
        self.slot: Slot | None = None
        self.pins = 0
        self.landing: memoryview | None = None  # a reader's memory for the whole block
        self.landing_group: Group | None = None
        self.landing_flight: Flight | None = None  # the one request that may write there
        self.tries = 0
        self.uncached = False  # the cache was asked in vain
        self.foreign_s = 0.0  # since when it was left to another process; 0 = never
        self.avoid: frozenset[str] = frozenset()
        self.bad: frozenset[str] = frozenset()  # replicas whose bytes were wrong


class Job:
    """Blocks that one request could bring, in its order; waits in a line for a free connection."""

    __slots__ = ("hedges", "items", "line", "place_bytes", "priority", "seq")

    def __init__(
        self,
        line: Line,
        items: list[tuple[Block, Piece]],
        priority: Priority,
        hedges: Flight | None = None,
    ) -> None:
        self.line = line
        self.items = items
        self.priority = priority
        self.hedges = hedges
        self.place_bytes = -1  # see `Lines.stand`; a job without one goes before all others
        self.seq = 0

    @property
    def length(self) -> int:
        """Stored bytes."""
        return sum(piece.length for _, piece in self.items)

    def __lt__(self, other: Job) -> bool:
        mine = (self.priority, self.place_bytes, self.seq)
        return mine < (other.priority, other.place_bytes, other.seq)


class Line:
    """The jobs for one store (or for one cache), and how many of them run."""

    __slots__ = (
        "active",
        "error",
        "failed_s",
        "failing_s",
        "first_s",
        "heap",
        "landed_s",
        "objects",
        "out_s",
        "owner",
        "probed_s",
        "probes",
        "streams",
    )

    def __init__(self, owner: object, streams: int) -> None:
        self.owner = owner  # kept, so that its identity stays its own
        self.streams = max(1, streams)
        self.heap: list[Job] = []
        self.active = 0
        self.objects = 0  # that send their jobs here
        self.first_s: list[float] = []  # recent waits for a request's first block
        self.landed_s = 0.0  # when the last block came; all that follows is cleared then
        self.error: BaseException | None = None  # the last one ...
        self.failing_s = self.failed_s = 0.0  # ... and when the first and the last one came
        self.out_s = 0.0  # when the last read was given up in an outage; 0 = none was
        self.probes: list[Group] = []  # that wait for a block of such a read, instead of readers
        self.probed_s = 0.0  # since when the last of them does

    def landed(self, now_s: float) -> None:
        """A block came: whatever was wrong is over."""
        self.landed_s, self.error = now_s, None
        self.failing_s = self.failed_s = self.out_s = 0.0

    def failed(self, error: BaseException, now_s: float) -> None:
        """A request failed."""
        self.error, self.failed_s = error, now_s
        self.failing_s = self.failing_s or now_s


class Flight:
    """One request under way, or one reading from the cache."""

    __slots__ = (
        "ahead",
        "asked",
        "attempt",
        "began_s",
        "chance",
        "errors",
        "hedged",
        "hedges",
        "items",
        "landed",
        "line",
        "owners",
        "place_bytes",
        "priority",
        "progress_bytes",
        "progress_s",
        "replicas",
        "scratch",
        "slots",
        "targets",
    )

    def __init__(self, job: Job, items: list[tuple[Block, Piece]], attempt: Attempt) -> None:
        self.line = job.line
        self.items = items
        self.priority = job.priority
        self.hedges = job.hedges
        self.attempt = attempt
        self.place_bytes = job.place_bytes
        self.ahead = job.priority > Priority.DEMAND  # nobody waited when it began
        self.asked = False  # it is known whom
        self.hedged = False
        self.slots: list[Slot | None] = []
        self.targets: list[memoryview | None] = []
        self.scratch: Slot | None = None
        self.owners: list[Group] = []  # whose memory it writes to
        self.errors: dict[int, BaseException] = {}
        self.landed = 0
        self.replicas: tuple[str, ...] = ()
        self.chance = CHANCE.random()  # one for all its blocks, so that they stay together
        self.began_s = 0.0
        self.progress_s = 0.0
        self.progress_bytes = 0

    @property
    def replica(self) -> str:
        """Who answers, as far as it is known; "" = nobody in particular."""
        return self.attempt.replica or self.attempt.prefer
