"""The report as data: what `analysis` finds and every renderer shows.

Times ending in `_s` are seconds; where a docstring says "on the start's clock", zero is the
start's first event, clock skew corrected. "Own work" is time inside spans that are not marked
`bootseer.wait`; "waiting" is time inside spans that are. A *process* is one observed process of
the job, usually one rank; a node is `k8s.node.name`, else `host.name`. A field that could not be
known is None, never zero. `to_json` gives the document described in docs/report-schema.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bootseer.profiler.report.before_after import Comparison

SCHEMA_VERSION = 1

JOB = "job"
"""The span around the whole command: every other span of its process lies within it."""

FIRST_STEP = "first_step"
"""The first training step of a process: its start ends with it."""

STANDARD_PHASES: tuple[str, ...] = (
    "queue",
    "schedule",
    "image.pull",
    "container.start",
    "deps.install",
    "imports",
    "rendezvous",
    "model.init",
    "checkpoint.load",
    "compile",
    FIRST_STEP,
)
"""The phases that every start is expected to have, in their usual order."""

NAMED_NODES = 10
"""How many nodes of an incident or a note are kept by name."""

Json = dict[str, object]
StartKind = Literal["first", "restart", "restart_in_place", "unknown"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the input that was worked around.

    `kind` is a short stable word (`torn-line`, `empty-file`, `not-text`, `newer-version`,
    `no-resource`, `clock-jump`, `end-without-begin`, `duplicate-event`, ...), `count` how often
    it happened in `file`, `detail` one sentence for people.
    """

    file: str
    kind: str
    count: int
    detail: str


@dataclass(frozen=True, slots=True)
class StartSummary:
    """One start (all events of one trace id) in a line.

    `began_unix_s` is the first event's wall time. `duration_s` runs from there to the last
    rank's first step; when no rank reached one, to the last event. `complete` is False then, and
    when `unreached` ranks are known to have missed it while others reached it.
    `gpus` is None when no process named its GPU count. `processes` counts event writers,
    `ranks` those that carry a rank.
    """

    trace_id: str
    kind: StartKind
    job_uid: str | None
    attempt: int | None
    began_unix_s: float
    duration_s: float
    complete: bool
    unreached: int
    nodes: int
    processes: int
    ranks: int
    gpus: int | None
    events: int


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Own work in one phase over the processes that had it (several spans of a process add up;
    what another thread did meanwhile takes nothing away).

    Percentiles are of own work; they are None when the phase was waiting only. `parent` is the
    phase within whose spans this one lies (a sub-phase: already counted in its parent).
    `max_over_median` is None when the median is 0. `first_begin_s` and `last_end_s` are on the
    start's clock. `killed` counts begins without an end (their length is unknown: they are in
    no percentile). `within_noise` counts processes that pass the straggler definition but that
    the phase's own spread explains (see `stragglers`), so they are not named.
    """

    name: str
    parent: str | None
    nodes: int
    processes: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    max_s: float | None
    max_over_median: float | None
    wait_p50_s: float | None
    wait_max_s: float | None
    first_begin_s: float
    last_end_s: float
    killed: int
    errors: int
    fallbacks: int
    bytes: int | None
    within_noise: int

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured or went wrong; of a mere moment, nothing is."""
        faults = self.killed or self.errors or self.fallbacks
        return bool(self.processes or faults or self.bytes)


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node. `own_s`, `wait_s`, `gap_s` are means over its processes, and no moment is counted
    twice in them; `first_step_s` is its
    last rank's first step on the start's clock (None: not reached); `skew_s` is how far its
    clock ran ahead of the reference node's (already corrected everywhere), `uncertainty_s` half
    the width of what the barriers allow; both None where no barrier told."""

    name: str
    processes: int
    gpus: int | None
    own_s: float
    wait_s: float
    gap_s: float
    first_step_s: float | None
    killed: int
    skew_s: float | None
    skew_uncertainty_s: float | None


@dataclass(frozen=True, slots=True)
class SkewSummary:
    """How clocks were compared. `reference` is the node whose clock the report uses (None: one
    node only, or nothing to compare by), `barriers` how many barrier exits were used,
    `max_abs_s` the largest skew, `max_uncertainty_s` the largest half-width, `unknown_nodes`
    how many nodes could not be compared and keep their own clock."""

    reference: str | None
    barriers: int
    max_abs_s: float
    max_uncertainty_s: float
    unknown_nodes: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """One point where processes waited for each other.

    `exit_s`: when it opened (start's clock). `last_node`, `last_rank` arrived last and
    `held_by_phase` is the phase in which that process had spent most above the median since
    the barrier before. `held_s` is last minus median arrival: what the last one cost everybody.
    `waited_s` is all processes' waiting together.
    """

    name: str
    index: int
    processes: int
    exit_s: float
    last_node: str
    last_rank: int | None
    held_by_phase: str | None
    held_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """One piece of the critical path, from the first event to the last first step, in order and
    without holes. `phase` is None for time nobody described (an unobserved gap). `median_s` is
    the phase's median own work over all processes, `barrier` the barrier that this stretch of
    the path leads to (None: the end of the start). Pieces under 10 ms are joined to a neighbour."""

    begin_s: float
    end_s: float
    node: str
    rank: int | None
    phase: str | None
    wait: bool
    median_s: float | None
    barrier: str | None

    @property
    def duration_s(self) -> float:
        """Length of this step."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Node x phase: row i is `nodes[i]`, column j is `phases[j]`. A cell is the median over the
    node's processes, in seconds; None: that node did not have that phase. Phases are top-level
    ones in the order of their first begin; nodes are sorted by name, numbers by value."""

    nodes: tuple[str, ...]
    phases: tuple[str, ...]
    own_s: tuple[tuple[float | None, ...], ...]
    wait_s: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node (or, when `ranks` is not empty, those ranks of it) slow in `phase`.

    `own_s` is its own work, `median_s` the phase's median, `threshold_s` what it had to exceed:
    the greatest of 1.5 x median, median + 2 s and what the phase's own spread explains.
    """

    node: str
    ranks: tuple[int, ...]
    phase: str
    own_s: float
    median_s: float
    threshold_s: float

    @property
    def ratio(self) -> float:
        """Own work over the phase's median."""
        return self.own_s / self.median_s if self.median_s else float("inf")

    @property
    def excess_s(self) -> float:
        """Own work above the phase's median."""
        return self.own_s - self.median_s


@dataclass(frozen=True, slots=True)
class PhaseGpuHours:
    """GPU-hours that one top-level phase held; `phase` None is unobserved time."""

    phase: str | None
    own: float
    waiting: float


@dataclass(frozen=True, slots=True)
class GpuHours:
    """GPU-hours held from each node's first event to its first step (or its last event).

    total = own + waiting + unobserved; a moment in which several phases ran at once is shared out
    evenly among them. `gpus_assumed` is True when some process named no GPU
    count and one GPU a rank was assumed for it.
    """

    total: float
    own: float
    waiting: float
    unobserved: float
    gpus: int
    gpus_assumed: bool
    phases: tuple[PhaseGpuHours, ...]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The start's duration had one thing been otherwise, computed through the barriers.

    `kind` says whether `name` is a phase or a node; `change` `median`: every process above the
    phase's median (or every phase of that node above it) at the median; `removed`: that work
    not there at all (for a node: the job without that node). Of phases that run at once in a
    process, only what one does alone is saved.
    """

    kind: Literal["phase", "node"]
    name: str
    change: Literal["median", "removed"]
    start_s: float
    saved_s: float


@dataclass(frozen=True, slots=True)
class Killed:
    """A phase that began and never ended: the process was killed, or is still at it."""

    node: str
    rank: int | None
    phase: str
    began_s: float
    file: str


@dataclass(frozen=True, slots=True)
class Unreached:
    """A rank that did not reach its first step, though others did, and where it was last.

    `phase` is the innermost phase that it had begun and not ended, else the last one that it
    ended; None: it described nothing. `inside` tells the two apart. `since_s` is when that phase
    began, or ended, on the start's clock.
    """

    node: str
    rank: int
    phase: str | None
    inside: bool
    since_s: float


@dataclass(frozen=True, slots=True)
class Incident:
    """Errors or fall-backs of one phase for one reason, over all processes.

    For status `fallback`, `reason` is `bootseer.reason`, else the message; for `error` the type,
    else the exit code as text. `nodes` names at most ten of the `count` occurrences' nodes.
    """

    status: Literal["error", "fallback"]
    phase: str
    reason: str
    count: int
    nodes: tuple[str, ...]
    first_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """What phases say that went well: what a user should know, and is no fault; over all processes.

    Such as that newer packages may be out than the snapshot that was restored has. `nodes` names
    at most ten of the `count` occurrences' nodes.
    """

    phase: str
    text: str
    count: int
    nodes: tuple[str, ...]
    first_s: float


@dataclass(frozen=True, slots=True)
class ImageUse:
    """One image as one process served it, or read its files ahead.

    `mode`: `lazy` (mounted), `cache` (mounted with its registry gone), `shared` (another mount
    served it), `files`. `hot_set`: used, none, foreign or damaged; None where nobody said.
    `ready_s`: until the tree was there; `replay_s`: while the hot set arrived. `missed_reads` of
    `reads` found their bytes missing and waited `blocked_s` together (so it can exceed the wall
    time). Over the wire came `boot_bytes` to mount, `hot_bytes` ahead of need, `cold_bytes`
    because somebody waited, `fill_bytes` in the background; `cache_bytes` were on the node.
    `recorded_bytes` were touched and recorded; `faults` are those that readers did not see.
    """

    node: str
    ref: str | None
    workload: str
    mode: str
    hot_set: str | None
    ready_s: float | None
    replay_s: float | None
    replay_bytes: int | None
    reads: int | None
    read_bytes: int | None
    missed_reads: int | None
    blocked_s: float | None
    boot_bytes: int | None
    hot_bytes: int | None
    cold_bytes: int | None
    fill_bytes: int | None
    cache_bytes: int | None
    recorded_bytes: int | None
    faults: int


@dataclass(frozen=True, slots=True)
class PartUse:
    """Whether a part of bootseer (image, deps, checkpoint) was used, and why not."""

    used: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything known of one start, of the others given with it, and of the input's faults.

    `start` is the one that all other fields describe; `starts` lists all given, newest first.
    `not_observed` are the standard phases nobody observed (not zero: unknown).
    `unreached` are the ranks that missed their first step, longest silent first.
    `critical_path` is empty when nothing has a duration. `what_if` is sorted by time saved.
    """

    version: str
    start: StartSummary
    starts: tuple[StartSummary, ...]
    problems: tuple[Problem, ...]
    phases: tuple[PhaseStats, ...]
    not_observed: tuple[str, ...]
    nodes: tuple[NodeSummary, ...]
    skew: SkewSummary
    barriers: tuple[Barrier, ...]
    critical_path: tuple[CriticalStep, ...]
    heat_map: HeatMap
    stragglers: tuple[Straggler, ...]
    gpu_hours: GpuHours
    what_if: tuple[WhatIf, ...]
    killed: tuple[Killed, ...]
    incidents: tuple[Incident, ...]
    unreached: tuple[Unreached, ...] = ()
    comparison: Comparison | None = None
    images: tuple[ImageUse, ...] = ()
    parts: Mapping[str, PartUse] = field(default_factory=dict)
    emulated: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    def to_json(self) -> Json:
        """The report as plain JSON values, matching report.schema.json.

        Seconds are rounded to the microsecond; records become objects with the fields' names,
        derived figures (`duration_s`, `ratio`, `excess_s`) included.
        """
        plain = _plain(self)
        assert isinstance(plain, dict)
        return {"schema_version": SCHEMA_VERSION, **plain}


DERIVED: Mapping[type, tuple[str, ...]] = {
    CriticalStep: ("duration_s",),
    Straggler: ("ratio", "excess_s"),
}
"""Properties that the JSON holds in addition to the fields."""


def _plain(value: object) -> object:
    """Records, tuples and mappings as JSON values; floats rounded, infinities as None."""
    if isinstance(value, float):
        return round(value, 6) if abs(value) != float("inf") else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        names += DERIVED.get(type(value), ())
        return {name: _plain(getattr(value, name)) for name in names}
    return value
