"""What went wrong inside a start: killed phases, errors, fall-backs; and the phases' extents."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from typing import Any, Literal, NamedTuple

from bootseer.profiler.report.lanes import Lane, Lanes
from bootseer.profiler.report.load.clock_skew import is_barrier
from bootseer.profiler.report.load.columns import Spans, columns_of
from bootseer.profiler.report.load.spans import Identity, Source, Span, Start
from bootseer.profiler.report.model import (
    FIRST_STEP,
    JOB,
    NAMED_NODES,
    Incident,
    Killed,
    Problem,
    Unreached,
)
from bootseer.profiler.report.overlap import Part
from bootseer.profiler.report.phase_totals import PhaseFacts


def name_ranks(ranks: Iterable[int], count: int, limit: int) -> str:
    """Name at most `limit` of `count` ranks: `rank 3`, `ranks 3, 5 and 1,200 more`."""
    named = ", ".join(str(rank) for rank in islice(ranks, limit))
    more = f" and {count - limit:,} more" if count > limit else ""
    return f"{'rank' if count == 1 else 'ranks'} {named}{more}"


def find_killed_phases(lanes: Lanes) -> tuple[Killed, ...]:
    """Every begin without an end, each shared one once.

    The command around a job that reached its first step is still running, so it does not count.
    """
    killed = []
    for lane in lanes.lanes:
        for name, begin_s, file, shared in lane.unended:
            if (shared and not lane.is_first) or (name == JOB and lanes.complete):
                continue
            if lane.reached and begin_s >= lane.end_s:
                continue
            rank = None if shared else lane.rank
            killed.append(Killed(lane.node, rank, name, begin_s, file))
    return tuple(sorted(killed, key=lambda k: (k.began_s, k.node, k.rank or 0)))


def find_unreached_ranks(lanes: Lanes) -> tuple[Unreached, ...]:
    """The ranks without a first step, where it is known that they should have one.

    Some jobs report a first step on one rank alone. So a rank without one counts where more than
    half of the ranks have one, or where it began a phase that it never ended, or never came to a
    barrier that more than half of the ranks passed, while another rank went on to its first step. A
    rank that was started again on another node counts once, and as reached wherever it got there.
    Where no rank got there and at least half of them are in one phase that they never ended, the
    unreached ranks are the others: those that these wait for.
    """
    ranked = [lane for lane in lanes.lanes if lane.rank is not None]
    reached = {lane.rank for lane in ranked if lane.reached}
    ranked = [lane for lane in ranked if lane.reached or lane.rank not in reached]
    if not reached:
        ranked = _find_awaited(ranked)
    most = not reached or len(reached) > len({lane.rank for lane in ranked}) / 2
    halted = (
        {id(each.lane) for each in find_halted_ranks(lanes) if each.is_barrier} if reached else ()
    )
    unreached = [
        _describe_last_seen(lane, lane.rank)
        for lane in ranked
        if lane.rank is not None and not lane.reached
        if most or _unended_phases(lane) or id(lane) in halted
    ]
    return tuple(sorted(unreached, key=lambda each: (each.since_s, each.rank)))


def _find_awaited(ranked: Sequence[Lane]) -> list[Lane]:
    """The ranks outside of the one phase that most are still in; none where there is no such."""
    inside = Counter(max(_unended_phases(lane))[1] for lane in ranked if _unended_phases(lane))
    phase, number = inside.most_common(1)[0] if inside else ("", 0)
    if number < 2 or number * 2 < len(ranked):
        return []
    return [lane for lane in ranked if phase not in {name for _, name in _unended_phases(lane)}]


class HaltedRank(NamedTuple):
    """A rank that wrote nothing after the end of `last`, while others did `further` after it.

    `is_barrier`: more than half of the ranks passed a barrier that is one of these.
    """

    lane: Lane
    rank: int
    last: str
    further: tuple[str, ...]
    is_barrier: bool


def find_halted_ranks(lanes: Lanes) -> list[HaltedRank]:
    """The ranks that ended between two phases: they never came to one that others had after theirs.

    Ranks may differ in what they do, and half of them may be of another kind. So it takes a barrier
    that at least half of the ranks passed, or a phase that more than half began, or two that half
    began. What one rank alone did proves nothing: the first rank may report what all do. Of a rank
    that was started again on another node, the last lane counts.
    """
    latest: dict[int, Lane] = {}
    for lane in lanes.lanes:
        if lane.rank is not None:
            known = latest.get(lane.rank)
            if known is None or lane.begin_s >= known.begin_s:
                latest[lane.rank] = lane
    ranked = list(latest.values())
    reached = {lane.rank for lane in lanes.lanes if lane.reached}
    number = len(ranked)
    quiet = [lane for lane in ranked if lane.rank not in reached and not _unended_phases(lane)]
    if not quiet or number < 2:
        return []
    courses: dict[int, tuple[Part, ...]] = {}
    lanes_of: Counter[int] = Counter()
    begun: Counter[str] = Counter()
    for lane in ranked:  # most lanes have one course in common
        courses[id(lane.parts)] = lane.parts
        lanes_of[id(lane.parts)] += 1
        begun.update({name for _, name in _unended_phases(lane)})
    own = {key: _collect_own_phases(parts) for key, parts in courses.items()}
    for key, phases in own.items():
        for name in phases:
            begun[name] += lanes_of[key]
    halted = []
    further_of: dict[int, tuple[str, tuple[str, ...], bool] | None] = {}
    for lane in quiet:
        key = id(lane.parts)
        if key not in further_of:
            further_of[key] = _find_further(own[key], own.values(), begun, number)
        further = further_of[key]
        if further is None or lane.rank is None:
            continue
        passed = {wait.key[0] for wait in lane.waits}  # one that took no time is no part
        if passed.isdisjoint(further[1]):
            halted.append(HaltedRank(lane, lane.rank, *further))
    return halted


def _collect_own_phases(parts: Sequence[Part]) -> dict[str, bool]:
    """What a lane did itself, by the last begin, the latest first; whether each is a barrier."""
    return {
        name: is_barrier(name, wait)
        for name, wait, shared in reversed(parts)
        if not shared and name is not None and name != JOB
    }


def _find_further(
    mine: Mapping[str, bool],
    every: Collection[Mapping[str, bool]],
    begun: Mapping[str, int],
    number: int,
) -> tuple[str, tuple[str, ...], bool] | None:
    """The last phase of a course, and the phases that at least half of the ranks came to after it.

    And whether more than half passed a barrier among these. None where too few ranks came further.
    """
    if not mine:
        return None
    last = next(iter(mine))
    known = {name.split(".", 1)[0] for name in mine}  # what a phase consists of may differ
    after: dict[str, bool] = {}
    for phases in every:
        names = list(phases)
        if last in phases:
            later = reversed(names[: names.index(last)])
            new = [name for name in later if name.split(".", 1)[0] not in known]
            after.update({name: phases[name] for name in new})
    half = tuple(name for name in after if begun[name] > 1 and 2 * begun[name] >= number)
    most = [name for name in half if 2 * begun[name] > number]
    if not most and len(half) < 2 and not any(after[name] for name in half):
        return None
    return last, half, any(after[name] for name in most)


_NAMED_RANKS = 5
HALTED = "halted-rank"


def report_halted_ranks(start: Start, lanes: Lanes) -> tuple[Problem, ...]:
    """One problem for the ranks that were last seen at the same place between two phases."""
    halted = find_halted_ranks(lanes)
    sources: dict[int, list[Source]] = {each.rank: [] for each in halted}
    for source in start.sources if halted else ():
        if source.identity.rank in sources:
            sources[source.identity.rank].append(source)
    by_phases: dict[tuple[str, str], list[HaltedRank]] = defaultdict(list)
    for each in halted:
        names = {span.name for source in sources[each.rank] for span in source.spans}
        if names.isdisjoint(each.further):  # one that took no time is no part of a lane
            by_phases[each.last, each.further[0]].append(each)
    problems = []
    for (last, further), group in by_phases.items():
        ranks = sorted({each.rank for each in group})
        first = min(group, key=lambda each: each.rank)
        nodes = {each.lane.node for each in group}
        where = f" on {first.lane.node}" if len(nodes) == 1 else ""
        one = len(ranks) == 1
        detail = (
            f"{name_ranks(ranks, len(ranks), _NAMED_RANKS)}{where} {'was' if one else 'were'} last "
            f"seen at the end of {last} ({first.lane.end_s:.1f} s), while others went on to "
            f"{further}: killed in between, unless {'it is' if one else 'they are'} not to do that"
        )
        problems.append(Problem(sources[first.rank][0].file, HALTED, len(ranks), detail))
    return tuple(problems)


MISSING = "missing-rank"


def report_missing_ranks(start: Start) -> tuple[Problem, ...]:
    """One problem for the ranks that wrote nothing, where others state how many there are.

    That is their world size.
    """
    known = {s.identity.rank for s in start.sources if s.identity.rank is not None}
    sizes = Counter(s.identity.world_size for s in start.sources if s.identity.world_size)
    if not known or not sizes:
        return ()
    size = sizes.most_common(1)[0][0] or 0
    number = size - sum(rank < size for rank in known)
    if size <= max(known) or number <= 0:  # other numbers than those of the whole job
        return ()
    missing = (rank for rank in range(size) if rank not in known)
    detail = f"{name_ranks(missing, number, _NAMED_RANKS)} of {size:,} wrote no events"
    return (Problem(start.sources[0].file, MISSING, number, detail),)


def _unended_phases(lane: Lane) -> list[tuple[float, str]]:
    return [(u.begin_s, u.name) for u in lane.unended if not u.shared and u.name != JOB]


def _describe_last_seen(lane: Lane, rank: int) -> Unreached:
    unended = _unended_phases(lane)
    if unended:
        since_s, phase = max(unended)
        return Unreached(lane.node, rank, phase, True, since_s)
    for piece in reversed(lane.pieces):
        if piece.name is not None and piece.name != JOB:
            return Unreached(lane.node, rank, piece.name, False, piece.end_s)
    return Unreached(lane.node, rank, None, False, lane.begin_s)


_EXIT_CODES = ("process.exit.code", "log.exit_code")  # a process's; one that a log line states


def _find_reason(span: Span) -> str:
    attributes = span.attributes or {}
    keys = ["bootseer.reason", "error.message", "error.type", "process.exit.code"]
    if span.status == "error":
        keys = ["error.type", *_EXIT_CODES, "bootseer.reason"]
    for key in keys:
        value = attributes.get(key)
        if value is not None and value != "":
            return f"exit code {value}" if key in _EXIT_CODES else str(value)
    return "no reason given"


_SOUND = frozenset(("ok", "unknown"))


def find_incidents(start: Start, shifts: Sequence[int], zero_ns: int) -> tuple[Incident, ...]:
    """Errors and fall-backs, equal ones joined, in order of their first occurrence."""
    seen_by_key: dict[tuple[str, str, str], list[tuple[float, str]]] = defaultdict(list)
    for source, shift in zip(start.sources, shifts, strict=True):
        if _SOUND.issuperset(columns_of(source.spans).statuses):
            continue
        for span in source.spans:
            if span.status in _SOUND:
                continue
            moment = span.end_ns if span.end_ns is not None else span.begin_ns
            at_s = ((moment or 0) + shift - zero_ns) / 1e9
            status = "fallback" if span.status == "fallback" else "error"
            seen_by_key[status, span.name, _find_reason(span)].append((at_s, source.identity.node))
    incidents = []
    for (status, phase, reason), seen in seen_by_key.items():
        kind: Literal["error", "fallback"] = "fallback" if status == "fallback" else "error"
        nodes = tuple(sorted({node for _, node in seen})[:NAMED_NODES])
        incidents.append(Incident(kind, phase, reason, len(seen), nodes, min(seen)[0]))
    return tuple(sorted(incidents, key=lambda i: (i.first_s, i.phase, i.reason)))


def _widen(extents: dict[str, tuple[int, int]], name: str, low: int, high: int) -> None:
    known = extents.get(name)
    if known is None or low < known[0] or high > known[1]:
        extents[name] = (min(low, known[0]), max(high, known[1])) if known else (low, high)


def _group_alike(
    sources: Sequence[Source], shifts: Sequence[int], end_ns: int
) -> Iterator[tuple[list[Spans], Sequence[int | None], int]]:
    """Sources in order, those that follow each other with the same spans and shift as one.

    Gives their spans, each span's first begin and last end over them, and their shift. Sources
    that have moments after the start's end, or unknown ones, come alone.
    """
    columns = [columns_of(source.spans) for source in sources]

    def form_of(each: tuple[Spans, int]) -> tuple[int, int, bool]:
        return id(each[0].form), each[1], each[0].is_timed

    for (_, shift, is_timed), group in groupby(zip(columns, shifts, strict=True), key=form_of):
        alike = [spans for spans, _ in group]
        if is_timed and len(alike) > 1:
            every: list[Any] = [spans.moments for spans in alike]
            begins = map(min, *[moments[::2] for moments in every])
            ends = map(max, *[moments[1::2] for moments in every])
            widest = tuple(chain.from_iterable(zip(begins, ends, strict=True)))
            if max(map(max, every)) + shift <= end_ns:
                yield alike, widest, shift
                continue
        for spans in alike:
            yield [spans], spans.moments, shift


def find_phase_facts(
    start: Start,
    shifts: Sequence[int],
    lanes: Lanes,
    killed: Sequence[Killed],
) -> Mapping[str, PhaseFacts]:
    """Extent, faults and bytes of every phase with at least one span up to the start's end."""
    zero_ns, end_ns = lanes.zero_ns, lanes.zero_ns + round(lanes.end_s * 1e9)
    extents: dict[str, tuple[int, int]] = {}
    faults: Counter[tuple[str, str]] = Counter()
    sizes: Counter[str] = Counter()
    for alike, moments, shift in _group_alike(start.sources, shifts, end_ns):
        names, _, statuses, points = alike[0].form
        attributes_of = [spans.attributes for spans in alike if spans.attributes is not None]
        for index, name in enumerate(names):
            status = statuses[index]
            if points[index] and name != FIRST_STEP and status == "ok":
                continue
            began, ended = moments[2 * index], moments[2 * index + 1]
            low = (ended if began is None else began) or 0
            high = low if ended is None else ended
            if low + shift > end_ns:
                continue
            _widen(extents, name, low + shift, min(high + shift, end_ns))
            if status != "ok":
                faults[name, status] += len(alike)
            for attributes in attributes_of:
                if attributes[index] is not None:
                    size = attributes[index].get("bootseer.bytes")
                    sizes[name] += size if type(size) is int and size > 0 else 0
    for name, (low, high) in list(extents.items()):  # a phase may be seen only by its parts
        for above in lanes.chains[name][1:]:
            _widen(extents, above, low, high)
    killed_in = Counter(k.phase for k in killed)
    return {
        name: PhaseFacts(
            first_begin_s=(low - zero_ns) / 1e9,
            last_end_s=(high - zero_ns) / 1e9,
            killed=killed_in[name],
            errors=faults[name, "error"],
            fallbacks=faults[name, "fallback"],
            bytes=sizes[name] or None,
        )
        for name, (low, high) in extents.items()
    }


def find_kind(identities: Sequence[Identity]) -> tuple[str, int | None, str | None]:
    """A start's kind, attempt and job uid: what most of its writers say."""
    kinds = Counter(i.kind for i in identities if i.kind)
    attempts = Counter(i.attempt for i in identities if i.attempt is not None)
    uids = Counter(i.job_uid for i in identities if i.job_uid)
    attempt = attempts.most_common(1)[0][0] if attempts else None
    kind = kinds.most_common(1)[0][0] if kinds else "unknown"
    return kind, attempt, uids.most_common(1)[0][0] if uids else None
