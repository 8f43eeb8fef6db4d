"""One lane a process: its time from first event to first step, cut into pieces (pure).

At each moment the innermost span decides what a lane does: a wait inside a phase is waiting, a
phase inside the whole command (`job`) is that phase, and nothing is counted twice. Where several
are innermost at once, `overlap` decides which one gets the moment. What no span covers is a gap.
Files of a node (or pod) without a rank, such as the wrapper's around an install, belong to every
rank there; a node without ranks is one lane.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter, lt
from typing import NamedTuple

from bootseer.profiler.report import overlap
from bootseer.profiler.report.load.clock_skew import (
    Skew,
    find_barriers,
    find_passages,
    number_names,
)
from bootseer.profiler.report.load.columns import Form, columns_of, extent_of
from bootseer.profiler.report.load.spans import Source, Span, Start
from bootseer.profiler.report.model import FIRST_STEP, JOB, STANDARD_PHASES
from bootseer.profiler.report.overlap import Moment, Part


class Piece(NamedTuple):
    """`[begin_s, end_s)` on the start's clock; `name` None is a gap. `shared`: from a file that
    belongs to all ranks of the node."""

    begin_s: float
    end_s: float
    name: str | None
    wait: bool
    shared: bool


_new = tuple.__new__  # a quarter of the time of Piece(...), a hundred thousand times


class Wait(NamedTuple):
    """One passage through a barrier: its key (name, how often before), arrival and exit."""

    key: tuple[str, int]
    arrival_s: float
    exit_s: float


class Unended(NamedTuple):
    """A begin without an end."""

    name: str
    begin_s: float
    file: str
    shared: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """A process from `begin_s` to `end_s`, cut into parts that follow each other, and gaps.

    `times` has each part's begin and end in turn. A million records of them would take most of a
    large report's memory, so `parts` is one object for all lanes that went the same way, and
    gaps are not kept: `pieces` makes them.

    `moments` is empty where no two spans ran at once: then the pieces say all. `reached` says
    whether it came to its first step (then that is its end), `is_first` whether it is the first
    lane of its group, the one in which shared pieces count.
    """

    node: str
    rank: int | None
    group: int
    is_first: bool
    begin_s: float
    end_s: float
    reached: bool
    parts: tuple[Part, ...]
    times: array[float]
    waits: tuple[Wait, ...]
    unended: tuple[Unended, ...]
    moments: tuple[Moment, ...] = ()

    @property
    def pieces(self) -> list[Piece]:
        """The parts in order, and the gaps: without holes from `begin_s` to `end_s`."""
        pieces = []
        now = self.begin_s
        for part, low, high in zip(self.parts, self.times[::2], self.times[1::2], strict=True):
            if low > now:
                pieces.append(Piece(now, low, None, False, False))
            pieces.append(Piece(low, high, *part))
            now = high
        if now < self.end_s:
            pieces.append(Piece(now, self.end_s, None, False, False))
        return pieces


@dataclass(frozen=True, slots=True)
class Lanes:
    """All lanes of a start; `zero_ns` is the wall time (reference clock) of second 0.

    `chains` maps each span name to itself and the phases it is a part of, outermost last.
    `gpus` is the greatest number of GPUs that a file of each group names, None where none does.
    """

    lanes: tuple[Lane, ...]
    zero_ns: int
    chains: Mapping[str, tuple[str, ...]]
    gpus: tuple[int | None, ...]
    end_s: float
    complete: bool


class _Timed(NamedTuple):
    """A source, what to add to its times to count from the start's second 0, and its extent.

    `low_ns` and `high_ns` are its first and last moment on that clock.
    """

    source: Source
    shift_ns: int
    shared: bool
    low_ns: int
    high_ns: int


def chains_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Which phases a name counts for: itself, then each observed or standard dotted prefix."""
    known = set(names)
    chains = {}
    for name in known:
        phases = [name]
        cut = name.rfind(".")
        while cut > 0:
            above = name[:cut]
            if above in known or above in STANDARD_PHASES:
                phases.append(above)
            cut = name.rfind(".", 0, cut)
        chains[name] = tuple(phases)
    return chains


def shifts_of(start: Start, skew: Skew) -> list[int]:
    """What to add to each source's times to be on the reference node's wall clock."""
    return [s.offset_ns - skew.ahead_ns.get(s.identity.node, 0) for s in start.sources]


def build_lanes(start: Start, skew: Skew) -> Lanes:
    """Cut a start into lanes."""
    shifts = shifts_of(start, skew)
    extents = [extent_of(source.spans) for source in start.sources]
    # A node whose clock could not be compared does not decide when the start began.
    zero_ns = min(
        (source.identity.node not in skew.ahead_ns, low_ns + shift)
        for source, shift, (low_ns, _) in zip(start.sources, shifts, extents, strict=True)
    )[1]
    timed = [
        _Timed(source, shift - zero_ns, False, low + shift - zero_ns, high + shift - zero_ns)
        for source, shift, (low, high) in zip(start.sources, shifts, extents, strict=True)
    ]
    lanes: list[Lane] = []
    gpus: list[int | None] = []
    courses: _Courses = {}
    by_form: _CourseByForm = {}
    for node, members in _group_by_pod(timed):
        named = [t.source.identity.gpus for t in members]
        gpus.append(max((n for n in named if n is not None), default=None))
        for number, (rank, own) in enumerate(_split_by_rank(members)):
            whose = (node, rank, len(gpus) - 1, number == 0)
            lane = _make_plain_lane(*whose, own, courses, by_form)
            lanes.append(lane or _make_lane(*whose, own, courses))
    reached = [lane.end_s for lane in lanes if lane.reached]
    names = set().union(*{columns_of(source.spans).names for source in start.sources})
    return Lanes(
        lanes=tuple(lanes),
        zero_ns=zero_ns,
        chains=chains_of(names),
        gpus=tuple(gpus),
        end_s=max(reached or [lane.end_s for lane in lanes]),
        complete=bool(reached),
    )


def _group_by_pod(timed: Sequence[_Timed]) -> list[tuple[str, list[_Timed]]]:
    """Sources by node and pod; what names no pod belongs to each pod of its node."""
    pods: dict[str, dict[str, list[_Timed]]] = defaultdict(lambda: defaultdict(list))
    for item in timed:
        identity = item.source.identity
        pods[identity.node][identity.pod or ""].append(item)
    groups = []
    for node, pods_of_node in pods.items():
        by_pod = dict(pods_of_node)
        common: list[_Timed] = []
        if len(by_pod) == 2 and "" in by_pod:  # one pod, some of whose writers do not know it
            by_pod = {"": [t for members in by_pod.values() for t in members]}
        elif len(by_pod) > 1 and "" in by_pod:
            common = [t for t in by_pod[""] if t.source.identity.rank is None]
            ranked = [t for t in by_pod.pop("") if t.source.identity.rank is not None]
            if ranked:
                by_pod[""] = ranked
        groups += [(node, members + common) for members in by_pod.values()]
    return groups


def _split_by_rank(members: Sequence[_Timed]) -> list[tuple[int | None, list[_Timed]]]:
    """A group's lanes: one a rank, with the shared sources added; or one for all."""
    # Operators set RANK for the pod's first process too, where it means the pod: when some
    # processes know their local rank, those that do not are the wrappers around them.
    local = any(t.source.identity.local_rank is not None for t in members)
    ranks: dict[int, list[_Timed]] = defaultdict(list)
    shared = []
    for item in members:
        identity = item.source.identity
        if identity.rank is None or (local and identity.local_rank is None):
            shared.append(item)
        else:
            ranks[identity.rank].append(item)
    if not ranks:
        return [(None, list(members))]
    shared = [t._replace(shared=True) for t in shared]
    return [(rank, ranks[rank] + shared) for rank in sorted(ranks)]


class _Course(NamedTuple):
    """What lanes with the same parts have in common: the parts, and which of them are passages
    through barriers, with their keys."""

    parts: tuple[Part, ...]
    passages: tuple[tuple[int, tuple[str, int]], ...]


_Courses = dict[tuple[Sequence[str], Sequence[bool], Sequence[bool]], _Course]
"""By the parts' fields."""

_CourseByForm = dict[int, tuple[Form, _Course]]
"""By the `id` of a form, which is kept, lest another one gets its number."""


def _find_course(
    names: Sequence[str], waits: Sequence[bool], shared: Sequence[bool], courses: _Courses
) -> _Course:
    course = courses.get((names, waits, shared))
    if course is None:
        indices, keys = find_barriers(names, waits)
        parts = tuple(map(Part, names, waits, shared))
        course = _Course(parts, tuple(zip(indices, keys, strict=True)))
        courses[names, waits, shared] = course
    return course


def _make_plain_lane(
    node: str,
    rank: int | None,
    group: int,
    is_first: bool,
    members: list[_Timed],
    courses: _Courses,
    by_form: _CourseByForm,
) -> Lane | None:
    """The lane of a process of one file whose phases followed each other and all ended, up to its
    first step at most; None for any other."""
    if len(members) != 1:
        return None
    source, shift_ns, shared, _, _ = members[0]
    spans = columns_of(source.spans)
    names, waits, statuses, points = spans.form
    if shared or not spans.is_timed or any(points):
        return None
    steps = names.count(FIRST_STEP)
    if steps and not (steps == 1 and names[-1] == FIRST_STEP and statuses[-1] != "error"):
        return None
    times = [(moment + shift_ns) / 1e9 for moment in spans.moments]  # type: ignore[operator]
    if times != sorted(times) or not all(map(lt, times[::2], times[1::2])):
        return None
    known = by_form.get(id(spans.form))
    if known is None:
        course = _find_course(names, waits, (False,) * len(names), courses)
        known = by_form[id(spans.form)] = spans.form, course
    course = known[1]
    return Lane(
        node,
        rank,
        group,
        is_first,
        times[0],
        times[-1],
        steps == 1,
        course.parts,
        array("d", times),
        tuple([_new(Wait, (key, times[2 * n], times[2 * n + 1])) for n, key in course.passages]),
        (),
    )


def _make_lane(
    node: str,
    rank: int | None,
    group: int,
    is_first: bool,
    members: list[_Timed],
    courses: _Courses,
) -> Lane:
    begin_s = min(t.low_ns for t in members) / 1e9
    last_s = max(t.high_ns for t in members) / 1e9
    reached_s = _find_first_step_s([t for t in members if not t.shared])
    if reached_s is None:
        reached_s = _find_first_step_s(members)
    end_s = last_s if reached_s is None else reached_s
    items: list[Piece] = []
    spans: list[Span] = []  # of the items
    outlasting: set[int] = set()  # items that ended later than the lane
    waits: list[Wait] = []
    unended: list[Unended] = []
    for source, shift_ns, shared, _, _ in members:
        for span in source.spans:
            if span[5] or span[1] is None:
                continue
            begun = (span[1] + shift_ns) / 1e9
            if span[2] is None:
                if span.name == JOB and reached_s is not None:
                    items.append(Piece(begun, end_s, JOB, False, shared))
                    spans.append(span)
                elif span.status != "unknown":
                    unended.append(Unended(span.name, begun, source.file, shared))
            elif begun < end_s:
                ended = (span[2] + shift_ns) / 1e9
                if ended > end_s:
                    outlasting.add(len(items))
                    ended = end_s
                items.append(_new(Piece, (begun, ended, span[0], span[3], shared)))
                spans.append(span)
        waits += _find_waits(source.spans, shift_ns, end_s)
    pieces = _drop_empty(sorted(items, key=_nesting_of))
    at_once: list[Moment] = []
    if pieces is None:
        overlapping = [
            overlap.Item(item.begin_s, item.end_s, span, item.shared, number in outlasting)
            for number, (item, span) in enumerate(zip(items, spans, strict=True))
        ]
        every = [span for timed in members for span in timed.source.spans]
        parents = {span.span_id: span.parent_id for span in every if span.span_id is not None}
        at_once = overlap.find_moments(overlapping, parents)
        items = [Piece(low, high, *parts[0]) for low, high, parts in at_once]
        pieces = _drop_empty(items)
        assert pieces is not None  # moments do not overlap
        if not any(len(moment.parts) > 1 for moment in at_once):
            at_once = []
    course = _find_course(
        tuple([piece.name or "" for piece in pieces]),
        tuple([piece.wait for piece in pieces]),
        tuple([piece.shared for piece in pieces]),
        courses,
    )
    return Lane(
        node,
        rank,
        group,
        is_first,
        begin_s,
        end_s,
        reached_s is not None,
        course.parts,
        array("d", chain.from_iterable([piece[:2] for piece in pieces])),
        tuple(_number_waits(waits)),
        tuple(unended),
        tuple(at_once),
    )


def _number_waits(waits: list[Wait]) -> list[Wait]:
    """The waits in order of arrival, with new numbers in their keys.

    Each file of a process numbers only its own, and a lane passes no barrier twice.
    """
    waits.sort(key=_passage_of)
    keys = number_names([wait.key[0] for wait in waits])
    return [
        wait if wait.key == key else wait._replace(key=key)
        for wait, key in zip(waits, keys, strict=True)
    ]


_passage_of = itemgetter(1, 2)  # arrival and exit of a wait


def _find_waits(spans: Sequence[Span], shift_ns: int, end_s: float) -> list[Wait]:
    waits = []
    for key, begin_ns, end_ns, _ in find_passages(spans):
        if begin_ns is not None and end_ns is not None:
            exit_s = (end_ns + shift_ns) / 1e9
            if exit_s <= end_s:
                waits.append(_new(Wait, (key, (begin_ns + shift_ns) / 1e9, exit_s)))
    return waits


def _find_first_step_s(members: Sequence[_Timed]) -> float | None:
    ends = [
        (span[2] + shift_ns) / 1e9
        for source, shift_ns, *_ in members
        for span in source.spans
        if span[0] == FIRST_STEP and span[2] is not None and span[4] != "error"
    ]
    return min(ends) if ends else None


def _drop_empty(items: list[Piece]) -> list[Piece] | None:
    """The items that took any time; None where they overlap. They are ordered by begin."""
    now = -math.inf
    for piece in items:
        if piece[0] < now:
            return None
        now = max(now, piece[1])
    return [piece for piece in items if piece[1] > piece[0]]


def _nesting_of(piece: Piece) -> tuple[float, float]:
    """A sort key that puts outer spans before inner ones: by begin, the longer first."""
    return piece[0], -piece[1]
