"""The history's record of one start, and its report over many.

Times are seconds as float, instants are nanoseconds of the Unix epoch. None always means "not
observed"; it is never written as 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

FORMAT_VERSION = 1
REPORT_VERSION = 1

Kind = Literal["first", "restart", "restart_in_place", "standby"]
KINDS: tuple[Kind, ...] = ("first", "restart", "restart_in_place", "standby")

# Upper bounds (inclusive) of the classes of GPU counts, and their names.
GPU_CLASSES: tuple[tuple[float, str], ...] = (
    (8, "1-8"),
    (64, "9-64"),
    (128, "65-128"),
    (float("inf"), ">128"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class NodePhase:
    """Own work (waiting excluded) of one node in one phase: the median over its processes."""

    node: str
    phase: str
    own_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTime:
    """One node's own work over all phases of a start."""

    node: str
    own_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class StartRecord:
    """One start as the history keeps it: one row, one Parquet file.

    `begin_unix_nano` is the first event; `held_unix_nano` the moment from which GPUs were held;
    `start_s` the time from the first event to the last rank's first step; `held_start_s` the
    part of it during which GPUs were held; `job_s` the time from the first event to the job's
    end. `places` identify where the processes ran, to distinguish a restart in place from a move.
    `event_count` decides between two records of the same trace: the one of more events is kept.
    """

    trace_id: str
    job: str
    attempt: int | None
    declared_kind: Kind | None
    places: tuple[str, ...]
    begin_unix_nano: int
    held_unix_nano: int
    start_s: float | None
    held_start_s: float | None
    job_s: float | None
    gpu_count: int | None
    rank_count: int
    event_count: int
    nodes: tuple[NodeTime, ...]
    node_phases: tuple[NodePhase, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A file of the history that was left out, and the reason."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Order statistics of `count` values, which are seconds or ratios."""

    count: int
    min: float
    median: float
    p90: float
    max: float


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTime:
    """GPU-seconds over all starts whose end and GPU count were observed.

    `share` = starting / total. `effective_ratio` = training / wall, where wall also counts
    queueing and the gaps between the starts of a job, weighted by GPUs (all jobs equally where no
    job's GPU count is known); progress lost in a crash is not visible in events, so the true ratio
    may be lower.
    """

    starts: int
    left_out: int
    starting_gpu_s: float | None
    total_gpu_s: float | None
    share: float | None
    effective_ratio: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class KindRow:
    """All starts of one kind: how many, how long, cumulated."""

    kind: Kind
    starts: int
    start_s: Spread | None
    cumulated_s: float | None
    cumulated_gpu_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class JobRow:
    """One job over all its starts; `first` counts those from stand-by as well."""

    job: str
    starts: int
    first: int
    restart: int
    restart_in_place: int
    gpu_count: int | None
    cumulated_s: float | None
    cumulated_gpu_s: float | None
    wall_s: float | None
    effective_ratio: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class ClassRow:
    """One class of GPU counts.

    `max_over_median` is taken within each start over its nodes' own work; `node_s` is the
    median node's own work of each start and `slowest_node_s` the slowest node's;
    `node_share` = median node's own work / job-level start time.
    """

    name: str
    starts: int
    start_s: Spread | None
    max_over_median: Spread | None
    node_s: Spread | None
    slowest_node_s: Spread | None
    node_share: Spread | None
    phases: tuple[ClassPhase, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ClassPhase:
    """One phase within a class: the median node's own work, and max / median over nodes."""

    phase: str
    starts: int
    node_s: Spread
    max_over_median: Spread | None


@dataclasses.dataclass(frozen=True, slots=True)
class SlowNode:
    """A node that is among the slowest of its starts more often than chance explains.

    In `slow` of its `starts` starts it was among the slowest sixteenth (at least one node);
    `expected` is the mean of that count under chance; `p` is corrected for all nodes tested;
    `excess_s` and `ratio` compare it with the median node (medians over its starts); `phase`
    is the one in which most of the excess arose.
    """

    node: str
    starts: int
    slow: int
    expected: float
    p: float
    excess_s: float
    ratio: float | None
    phase: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryReport:
    """The report of `bootseer history report` over many starts."""

    jobs: int
    starts: int
    unfinished: int
    from_unix_nano: int | None
    to_unix_nano: int | None
    gpu_time: GpuTime
    kinds: tuple[KindRow, ...]
    classes: tuple[ClassRow, ...]
    job_rows: tuple[JobRow, ...]
    starts_per_job: Spread | None
    nodes_tested: int
    slow_nodes: tuple[SlowNode, ...]
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `history.schema.json` describes."""
        return {"version": REPORT_VERSION, **dataclasses.asdict(self)}
