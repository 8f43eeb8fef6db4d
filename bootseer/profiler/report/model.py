"""The report as data: what `analysis` finds and every renderer shows.

Times ending in `_s` are seconds; where a docstring says "on the start's clock", zero is the
start's first event, clock skew corrected. "Own work" is time inside spans that are not marked
`bootseer.wait`; "waiting" is time inside spans that are. A *process* is one rank, or a node (with
pods, a pod) without ranks; a node is `k8s.node.name`, else `host.name`. A field that could not be
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
StartKind = Literal["first", "restart", "restart_in_place", "standby", "unknown"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the input that was worked around.

    `kind` is a short stable word (`torn-line`, `empty-file`, `not-text`, `newer-version`,
    `no-resource`, `clock-jump`, `end-without-begin`, `duplicate-event`, ...). `count` is how often
    it happened in `file`; where several files are concerned, `file` is one of them. `detail` is one
    sentence for people.
    """

    file: str
    kind: str
    count: int
    detail: str


@dataclass(frozen=True, slots=True)
class StartSummary:
    """One start (all events of one trace id) in a line.

    `began_unix_s` is the wall time of the first event. `duration_s` runs from there to the last
    rank's first step, or to the last event when there is none. `complete` is False when no rank
    reached its first step, and when ranks are known to have missed their first step while others
    reached theirs. `unreached` counts the ranks that `Unreached` describes. `gpus` is None when the
    GPU count of any node (or pod) is unknown. `processes` counts the writers of events. `ranks`
    counts ranks, each once on its node or pod, however many of its processes wrote events.
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
    """Own work in one phase, over the processes that had it.

    Several spans of a process add up; what another thread did at the same time is not subtracted.
    Spans that the ranks of a node (or pod) share count for the first of these ranks alone.
    Percentiles are of own work; they are None when there was none, as in a phase that was waiting
    only. `max_over_median` is None when the median is 0 or None. `wait_p50_s` and `wait_max_s` are
    of the processes that waited; they are None when none did. `parent` is the phase that this one
    is a part of by its name, as `deps.install.unpack` is a part of `deps.install` (a sub-phase:
    already counted in its parent). `first_begin_s` and `last_end_s` are on the start's clock.
    `killed` counts begins without an end (their length is unknown: they are in no percentile).
    `bytes` is the sum of what the spans state; None when none states any. `within_noise` counts
    processes that meet the straggler definition but are not named, because the phase's own spread
    explains them (see `Straggler`).
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
    """One node.

    `own_s`, `wait_s` and `gap_s` (time that no span describes) are means over its processes, and no
    moment is counted twice in them. `gpus` is None when no process of the node named its GPU count.
    `first_step_s` is its last rank's first step on the start's clock; None when not all of its
    ranks reached theirs. `skew_s` is how far its clock ran ahead of the reference node's (already
    corrected everywhere); None when no barrier compared the clocks. `skew_uncertainty_s` is half
    the width of what the barriers allow; None also when one exit of one process is all there is.
    """

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
    """How clocks were compared.

    `reference` is the node whose clock the report uses (None: one node only, or nothing to compare
    by). `barriers` is how many barrier exits were used, `max_abs_s` the largest skew, ahead or
    behind, and `max_uncertainty_s` the largest `skew_uncertainty_s` of a node. `unknown_nodes` is
    how many nodes could not be compared and keep their own clock.
    """

    reference: str | None
    barriers: int
    max_abs_s: float
    max_uncertainty_s: float
    unknown_nodes: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """One point where processes waited for each other.

    `index` is how many barriers of the same name came before. `exit_s` is when the barrier opened,
    on the start's clock. `last_node` and `last_rank` arrived last. `held_by_phase` is the phase in
    which that process, since the barrier before, had spent most above the median; None when that
    was time outside all phases. `held_s` is the last arrival minus the median arrival: what the
    last process cost all of them. `waited_s` is the waiting of all processes together.
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
    """One piece of the critical path.

    The pieces lead from the first event to the last first step (or to the last event, when no rank
    reached its first step), in order and without holes. `wait` says whether the process waited.
    `phase` is None for time that was not described (an unobserved gap). `median_s` is the phase's
    median own work over all processes that had it; None for waiting and for gaps. `barrier` is the
    barrier that this stretch of the path leads to (None: the end of the start). Pieces under 10 ms,
    or under a thousandth of the start where that is less, are joined to a neighbour.
    """

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
    """Node x phase: row i is `nodes[i]`, column j is `phases[j]`.

    A cell is the median over the node's processes that did own work in the phase (`own_s`) or
    waited in it (`wait_s`), in seconds; None: none of them did. Phases are top-level ones, in the
    order of their first begin. Nodes are sorted by name, with the numbers in names compared by
    value.
    """

    nodes: tuple[str, ...]
    phases: tuple[str, ...]
    own_s: tuple[tuple[float | None, ...], ...]
    wait_s: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node (or, when `ranks` is not empty, those ranks of it) slow in `phase`.

    `own_s` is its own work: of a node, the mean over its processes (of four or more, without the
    highest and the lowest); of ranks, that of the slowest. `median_s` is the phase's median over
    nodes, or over processes. `threshold_s` is what `own_s` had to reach: the greatest of 1.5 x
    median, median + 2 s and what the phase's own spread explains. `ratio` is `own_s` over
    `median_s` (None when that is 0), `excess_s` is `own_s` minus `median_s`.
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
    """GPU-hours that one top-level phase held.

    `phase` None is unobserved time; its hours are in `own`.
    """

    phase: str | None
    own: float
    waiting: float


@dataclass(frozen=True, slots=True)
class GpuHours:
    """GPU-hours held from each node's (or pod's) first event to its processes' first steps.

    A process without a first step counts until its last event, and each process of a node holds an
    equal share of the node's GPUs. The phases `queue` and `schedule` hold none and are left out.
    total = own + waiting + unobserved; a moment in which several phases ran at once is shared out
    evenly among them. `gpus` includes assumed ones: `gpus_assumed` is True when no process of some
    node (or pod) named its GPU count and one GPU a rank was assumed there.
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
    """The start's duration if one thing had been different, computed through the barriers.

    `kind` says whether `name` is a phase or a node. With `change` `median`, every process above the
    phase's median is at the median (for a node: every phase of its processes that was above the
    phase's median). With `change` `removed`, that work is not there at all (for a node: the job
    without that node). `start_s` is the start's duration then, `saved_s` is how much shorter that
    is. Of phases that run at once in a process, only what one does alone is saved.
    """

    kind: Literal["phase", "node"]
    name: str
    change: Literal["median", "removed"]
    start_s: float
    saved_s: float


@dataclass(frozen=True, slots=True)
class Killed:
    """A phase that began and never ended: the process was killed, or is still in it.

    `began_s` is on the start's clock. `rank` is None for a process without a rank, and for a phase
    that the ranks of a node share. `file` holds the begin event.
    """

    node: str
    rank: int | None
    phase: str
    began_s: float
    file: str


@dataclass(frozen=True, slots=True)
class Unreached:
    """A rank that did not reach its first step, though others did, and where it was last.

    When no rank reached its first step, but at least half of them (two or more) are in one phase
    that they never ended, the others are meant: the ranks that these wait for. `phase` is the
    innermost phase that the rank had begun and not ended (then `inside` is True), else the last one
    that it ended (then `inside` is False); None: it described nothing. `since_s` is when that phase
    began, or ended, on the start's clock; without a phase, when the rank's events began.
    """

    node: str
    rank: int
    phase: str | None
    inside: bool
    since_s: float


@dataclass(frozen=True, slots=True)
class Incident:
    """Errors or fall-backs of one phase for one reason, over all processes.

    For status `fallback`, `reason` is `bootseer.reason`, else the error's message, else its type,
    else the exit code; for `error` it is the type, else the exit code, else `bootseer.reason`. An
    exit code is given as `exit code 1`; `no reason given` stands where the events have none of
    these.
    `nodes` names the nodes of the `count` occurrences, ten at most. `first_s` is the first
    occurrence on the start's clock.
    """

    status: Literal["error", "fallback"]
    phase: str
    reason: str
    count: int
    nodes: tuple[str, ...]
    first_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """A message of a phase that is no fault, but that a user should know; over all processes.

    An example is that newer packages may be available than the restored snapshot has. `nodes` names
    the nodes of the `count` occurrences, ten at most. `first_s` is the first occurrence on the
    start's clock.
    """

    phase: str
    text: str
    count: int
    nodes: tuple[str, ...]
    first_s: float


@dataclass(frozen=True, slots=True)
class ImageUse:
    """One image as one process served it, or read its files ahead.

    `mode`: `lazy` (mounted), `cache` (mounted while its registry was unavailable), `complete`
    (mounted without a server, as all of it was on the node), `shared` (another mount served it),
    `files` (its files were read ahead). `hot_set`: `used`, `none` or `damaged`; None when not
    reported. `ready_s`: until the tree was available; `replay_s`: while the hot set arrived, which
    was `replay_bytes`. `reads` counts the reads of programs, `read_bytes` their bytes.
    `missed_reads` of them found their bytes missing and waited `blocked_s` together, which can
    therefore exceed the wall time. Over the network came `boot_bytes` to mount, `hot_bytes` ahead
    of need, `cold_bytes` because a reader waited, and `fill_bytes` in the background; `cache_bytes`
    were on the node. `recorded_bytes` were touched and recorded. `faults` counts the reported
    faults: each kind once, and each outage.
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
    """Whether a part of bootseer (image, deps, checkpoint) was used, and how, or why not."""

    used: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything known of one start, of the others given with it, and of the input's faults.

    `start` is the start that all other fields describe, except `starts` (all starts given, newest
    first), `problems` (of the whole input) and `comparison` (None without a baseline).
    `not_observed` are the standard phases that were not observed (not zero: unknown). `unreached`
    are the ranks that missed their first step, longest silent first. `critical_path` is empty when
    nothing has a duration. `what_if` is sorted by time saved, the most first, and empty for an
    incomplete start. `parts` says which parts of bootseer were used, by name, and `emulated` what
    was emulated: demonstrations of bootseer fill these in, `bootseer report` leaves them empty.
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
        plain = _to_plain(self)
        assert isinstance(plain, dict)
        return {"schema_version": SCHEMA_VERSION, **plain}


DERIVED: Mapping[type, tuple[str, ...]] = {
    CriticalStep: ("duration_s",),
    Straggler: ("ratio", "excess_s"),
}
"""Properties that the JSON holds in addition to the fields."""


def _to_plain(value: object) -> object:
    """Records, tuples and mappings as JSON values; floats rounded, infinities as None."""
    if isinstance(value, float):
        return round(value, 6) if abs(value) != float("inf") else None
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        names += DERIVED.get(type(value), ())
        return {name: _to_plain(getattr(value, name)) for name in names}
    return value
