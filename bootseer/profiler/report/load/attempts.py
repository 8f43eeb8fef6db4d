"""Attempts of a job that nobody counted, told apart by what ran again (pure).

A container that is restarted in its pod, or a command that is run again in its container, cannot
know that it is not the first: its events have the job uid, the attempt and so the trace id of those
before. Without a setting, its processes show it:

- the outermost `run` or `start` of a place (a pod, or a node without pods) began after the one
  before had ended, or has the process id of the one before, which no two processes have at a time.
  A `start` tells no end, nor does a command that is killed: it is over if nothing of its job is
  seen at the moment when the next one begins, unless both began at once, as side by side;
- a rank came to its first step in one process, and again in one that began later.

What runs again in a place is a *round* of that place. It begins another attempt where the round
before had come to its first step, or where more than half of the attempt's places run again
instead of coming to one. Otherwise one of several nodes was restarted while the others waited for
it: a try within the same start, see `tries`. Processes that other places began about then or later
belong to the new attempt.

An attempt's kind is `restart_in_place` where it runs in the containers (without containers, on the
boots) of the attempt before, else `restart`. Each `image run` makes a container.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from bootseer.events.resource import digest
from bootseer.profiler.report.load.columns import columns_of, wall_extent_of
from bootseer.profiler.report.load.segments import PREFIX_CHARS
from bootseer.profiler.report.load.spans import Identity, Source, Start
from bootseer.profiler.report.model import FIRST_STEP, JOB

ENTRIES = frozenset((JOB, "start"))
"""The outermost spans of `bootseer run` and `bootseer start`."""


class _Entry(NamedTuple):
    """One `run` or `start` as the outermost command; `end_ns` is None where it is not known."""

    begin_ns: int
    end_ns: int | None
    prefix: str
    """What the ids of its writer's spans begin with, and those that it gave its processes."""
    source: Source


_SIDE_BY_SIDE_NS = 500 * 10**6
"""Commands of one place that begin within this time run side by side, unless it is known better: a
command that was killed takes longer to be begun again."""
_OUTLIVING = ("image.", "deps.publish", "checkpoint.prefetch", "fetch.", "container.")
"""Phases, by the beginnings of their names, that may go on when the job is over."""
_TOGETHER_NS = 120 * 10**9
"""How long before a place that runs again others may have begun again: clocks, raw here, may be a
minute off, and ranks may notice that one is gone before it is back."""

_Container = tuple[str | None, str | None]
"""The pod's uid or the container's id, and what the container is called."""
_Owner = tuple[str, int | None]
"""What may run again: an entry's name, or a first step, and the rank that it is of."""
_Entries = dict[_Owner, list[_Entry]]


class _Families:
    """Which processes of a place come from which of its commands, by their spans' parents."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._parents: dict[str, str] = {}
        for source in sources:
            prefix = _prefix_of(source)
            for parent in columns_of(source.spans).parents or ():
                if parent is not None and parent[:PREFIX_CHARS] != prefix:
                    self._parents.setdefault(prefix, parent[:PREFIX_CHARS])
                    break

    def find_first(self, source: Source, prefixes: Collection[str]) -> str | None:
        """The nearest of these writers that a source comes from, or is."""
        prefix: str | None = _prefix_of(source)
        passed: set[str] = set()
        while prefix is not None and prefix not in passed:
            if prefix in prefixes:
                return prefix
            passed.add(prefix)
            prefix = self._parents.get(prefix)
        return None

    def is_seen(self, entry: _Entry, moment_ns: int, prefixes: Collection[str]) -> bool:
        """Whether a command's job shows itself at a moment or later.

        So does a process without a parent that began after it, and may be of its job.
        """
        rank = entry.source.identity.rank
        for source in self._sources:
            begin_ns, end_ns = wall_extent_of(source)
            if end_ns < moment_ns:
                continue
            origin = self.find_first(source, prefixes)
            if origin is None:
                about = source.identity
                if about.process_id is None or (rank is not None and about.rank != rank):
                    continue
                if not entry.begin_ns <= begin_ns < moment_ns:
                    continue
            elif origin != entry.prefix:
                continue
            if any(
                time_ns is not None and time_ns + source.offset_ns >= moment_ns
                for span in source.spans
                if not span.name.startswith(_OUTLIVING)
                for time_ns in (span.begin_ns, span.end_ns)
            ):
                return True
        return False


def _prefix_of(source: Source) -> str:
    ids = columns_of(source.spans).ids
    first = ids if type(ids) is str else next((each for each in ids if each), "")
    return first[:PREFIX_CHARS]


class _Again(NamedTuple):
    """An owner that ran again, from `begin_ns` on."""

    begin_ns: int
    owner: _Owner


@dataclass(slots=True)
class _Round:
    """What ran in a place from `begin_ns` until it ran again."""

    place: str
    begin_ns: float
    sources: list[Source] = field(default_factory=list)

    def identity(self) -> Identity:
        """That of its first command, or else of its first process.

        What others recorded of it, such as the cluster, knows no container of it.
        """
        return min(
            self.sources,
            key=lambda source: (
                ENTRIES.isdisjoint(columns_of(source.spans).names),
                not source.identity.container,
                wall_extent_of(source)[0],
            ),
        ).identity

    def containers(self) -> list[_Container]:
        """Those that its ranks ran in, or else that of its first process, in order of time.

        Without the one around a command that makes one for others.
        """
        sources = [
            source
            for source in self.sources
            if source.identity.container and not source.identity.makes_container
        ]
        sources.sort(key=lambda source: wall_extent_of(source)[0])
        ranks = [source for source in sources if source.identity.rank is not None]
        return [
            (source.identity.place, source.identity.container) for source in ranks or sources[:1]
        ]

    def last_step_ns(self) -> float:
        """When its last rank came to its first step; minus infinity where none did."""
        return max(
            (
                span.end_ns + source.offset_ns
                for source in self.sources
                if FIRST_STEP in columns_of(source.spans).names
                for span in source.spans
                if span.name == FIRST_STEP and span.end_ns is not None and span.status != "error"
            ),
            default=-math.inf,
        )


class _Attempt:
    """The rounds of one attempt, by place; several where one try followed another."""

    __slots__ = ("rounds",)

    def __init__(self) -> None:
        self.rounds: dict[str, list[_Round]] = defaultdict(list)

    def add(self, round_: _Round) -> None:
        self.rounds[round_.place].append(round_)


def split_attempts(start: Start) -> list[Start]:
    """One start for each attempt, in order; the first keeps its trace id, kind and attempt."""
    sources_of: dict[str, list[Source]] = defaultdict(list)
    for source in start.sources:
        sources_of[_place_of(source.identity)].append(source)
    entries_of = {place: _find_entries(sources) for place, sources in sources_of.items()}
    again_of = {
        place: _find_again(sources, entries_of[place]) for place, sources in sources_of.items()
    }
    if not any(again_of.values()):
        return [start]
    rounds = [
        round_
        for place, sources in sources_of.items()
        for round_ in _split_rounds(place, sources, again_of[place], entries_of[place])
    ]
    attempts = _join_rounds(sorted(rounds, key=lambda each: each.begin_ns))
    return [_make_start(start, attempts, number) for number in range(len(attempts))]


def _place_of(identity: Identity) -> str:
    """A pod by its name, as it may be created again on another node; else a node."""
    return f"pod {identity.pod}" if identity.pod else f"node {identity.node}"


def _find_entries(sources: Sequence[Source]) -> _Entries:
    """The outermost commands of a place, each owner's by moment."""
    entries: _Entries = defaultdict(list)
    for source in sources:
        if ENTRIES.isdisjoint(columns_of(source.spans).names):
            continue
        for span in source.spans:
            if span.name in ENTRIES and span.parent_id is None and span.begin_ns is not None:
                ended_ns = None
                if not span.point and span.end_ns is not None:
                    ended_ns = span.end_ns + source.offset_ns
                begun_ns = span.begin_ns + source.offset_ns
                entry = _Entry(begun_ns, ended_ns, _prefix_of(source), source)
                entries[span.name, source.identity.rank].append(entry)
    for of_owner in entries.values():
        of_owner.sort(key=lambda entry: entry.begin_ns)
    return entries


def _find_again(sources: Sequence[Source], entries: _Entries) -> list[_Again]:
    """What ran again in a place, by moment."""
    again = []
    if any(len(of_owner) > 1 for of_owner in entries.values()):
        families = _Families(sources)
        prefixes = {entry.prefix for of_owner in entries.values() for entry in of_owner}
        for (name, rank), of_owner in entries.items():
            jobs = [] if name == JOB else entries.get((JOB, rank), [])
            again += [
                _Again(after.begin_ns, (name, rank))
                for before, after in pairwise(of_owner)
                if _is_again(before, after, jobs, families, prefixes)
            ]
    return sorted([*again, *_find_after_steps(sources)], key=lambda each: each.begin_ns)


def _is_again(
    before: _Entry,
    after: _Entry,
    jobs: Sequence[_Entry],
    families: _Families,
    prefixes: Collection[str],
) -> bool:
    """Whether one entry was over when the next began.

    A `start` has no end of its own; `jobs` are the commands that it may have become.
    """
    old, new = before.source.identity, after.source.identity
    if old.process_id is not None and before.source.file != after.source.file:
        if old.process_id == new.process_id:
            return True
        if old.boot_id and new.boot_id and old.boot_id != new.boot_id:
            return True
    last = [job for job in jobs if before.begin_ns <= job.begin_ns < after.begin_ns] or [before]
    if any(each.end_ns is not None and each.end_ns > after.begin_ns for each in last):
        return False
    unknown = [each for each in last if each.end_ns is None]
    if unknown and after.begin_ns - before.begin_ns < _SIDE_BY_SIDE_NS:
        return False
    return not any(families.is_seen(each, after.begin_ns, prefixes) for each in unknown)


def _find_after_steps(sources: Sequence[Source]) -> Iterator[_Again]:
    """Ranks that began again after a first step, and came to one again."""
    ranks: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        if source.identity.rank is not None:
            ranks[source.identity.rank].append(source)
    for rank, of_rank in ranks.items():
        if len(of_rank) < 2:
            continue
        extents = sorted(
            (*wall_extent_of(source), FIRST_STEP in columns_of(source.spans).names)
            for source in of_rank
        )
        for before, after in pairwise(extent for extent in extents if extent[2]):
            if before[1] <= after[0]:
                begin_ns = next(begin for begin, _, _ in extents if begin >= before[1])
                yield _Again(begin_ns, (FIRST_STEP, rank))


def _split_rounds(
    place: str, sources: Sequence[Source], again: Sequence[_Again], entries: _Entries
) -> Iterator[_Round]:
    """A place's sources by round. A round begins with the first owner that runs again in it.

    What comes from a command that ran again is of its round, however late it began: the last
    attempt's processes may end while the next one runs.
    """
    begins: list[float] = [-math.inf]
    owners: set[_Owner] = set()
    last_round_of: dict[str, int] = {}  # of commands that ran again
    for begin_ns, owner in again:
        if len(begins) == 1 or owner in owners:
            begins.append(begin_ns)
            owners.clear()
        owners.add(owner)
        for entry in entries.get(owner, ()):
            if entry.begin_ns < begin_ns:
                last_round_of.setdefault(entry.prefix, len(begins) - 2)
    first_round_of: dict[str, int] = {}
    for of_owner in entries.values():
        for entry in of_owner:
            first = bisect.bisect_right(begins, entry.begin_ns) - 1
            first_round_of[entry.prefix] = min(first, first_round_of.get(entry.prefix, first))
    rounds = [_Round(place, begin) for begin in begins]
    families = _Families(sources) if first_round_of else None
    for source in sources:
        begin_ns = wall_extent_of(source)[0]
        number = bisect.bisect_right(begins, begin_ns) - 1
        origin = None if families is None else families.find_first(source, first_round_of)
        if origin is not None:
            # What it tells of, such as the container's making, may have begun before it did.
            number = max(number, first_round_of[origin])
            number = min(number, last_round_of.get(origin, number))
        rounds[number].sources.append(source)
    for round_ in rounds:
        if round_.sources:
            round_.begin_ns = min(wall_extent_of(source)[0] for source in round_.sources)
            yield round_


def _join_rounds(rounds: Sequence[_Round]) -> list[_Attempt]:
    """Attempts of rounds that are sorted by begin."""
    attempts = [_Attempt()]
    for number, round_ in enumerate(rounds):
        attempt = attempts[-1]
        if round_.place in attempt.rounds and _is_over(attempt, round_, rounds[number + 1 :]):
            attempts.append(_begin_attempt(attempt, round_))
        attempts[-1].add(round_)
    return attempts


def _begin_attempt(before: _Attempt, again: _Round) -> _Attempt:
    """An attempt that begins with `again`.

    It has what other places began for it: processes that began about then or later, where all had
    come to their first steps.
    """
    attempt = _Attempt()
    for place, rounds in before.rounds.items():
        last = rounds[-1]
        least_ns = max(again.begin_ns - _TOGETHER_NS, last.last_step_ns())
        if place == again.place or last.last_step_ns() == -math.inf:
            continue
        late = [source for source in last.sources if _begins_after(source, least_ns)]
        if late:
            last.sources = [source for source in last.sources if source not in late]
            attempt.add(_Round(place, min(wall_extent_of(source)[0] for source in late), late))
    return attempt


def _begins_after(source: Source, least_ns: float) -> bool:
    """Whether a process began after that moment, and more than told a moment."""
    points = columns_of(source.spans).points
    return wall_extent_of(source)[0] > least_ns and not all(points)


def _is_over(attempt: _Attempt, again: _Round, later: Sequence[_Round]) -> bool:
    """Whether an attempt is over when a round of one of its places begins again."""
    if any(each.last_step_ns() > -math.inf for each in attempt.rounds[again.place]):
        return True
    places = {again.place}
    for round_ in later:
        if round_.place in attempt.rounds and round_.place not in places:
            steps_ns = (each.last_step_ns() for each in attempt.rounds[round_.place])
            if max(steps_ns) < again.begin_ns:
                places.add(round_.place)
    return 2 * len(places) > len(attempt.rounds)


def _make_start(start: Start, attempts: Sequence[_Attempt], number: int) -> Start:
    mine = {
        id(source)
        for rounds in attempts[number].rounds.values()
        for round_ in rounds
        for source in round_.sources
    }
    sources = tuple(source for source in start.sources if id(source) in mine)
    if number == 0:
        return replace(start, sources=sources)
    kind = _find_kind(attempts[number - 1], attempts[number])
    sources = tuple(
        replace(source, identity=_count_attempt(source.identity, number, kind))
        for source in sources
    )
    return Start(_derive_trace_id(start, sources, number), sources)


def _derive_trace_id(start: Start, sources: Sequence[Source], number: int) -> str:
    """The trace id of an attempt: the one that its processes would have, had it been counted.

    Records of others, such as the cluster's, may have counted it, and have that one.
    """
    about = {(source.identity.job_uid, source.identity.attempt) for source in sources}
    if len(about) == 1:
        ((uid, attempt),) = about
        if uid and attempt and start.trace_id == digest(f"{uid}:{attempt - number}"):
            return digest(f"{uid}:{attempt}")
    return digest(f"{start.trace_id} attempt {number}")


def _count_attempt(identity: Identity, number: int, kind: str) -> Identity:
    return identity._replace(kind=kind, attempt=(identity.attempt or 0) + number)


def _find_kind(before: _Attempt, after: _Attempt) -> str:
    """What happened in most places of an attempt."""
    in_place = sum(
        place in before.rounds and _is_same_container(before.rounds[place][-1], rounds[0])
        for place, rounds in after.rounds.items()
    )
    return "restart_in_place" if 2 * in_place > len(after.rounds) else "restart"


def _is_same_container(before: _Round, after: _Round) -> bool:
    """Whether a round ran in the container of the one before, or without one on the same boot."""
    old, new = before.identity(), after.identity()
    if new.makes_container or old.boot_id != new.boot_id:
        return False
    containers, again = before.containers(), after.containers()
    if containers and again:
        return again[0] in containers
    if old.place != new.place:
        return False
    # Two processes of one number had each a process namespace of its own.
    return old.process_id is None or old.process_id != new.process_id
