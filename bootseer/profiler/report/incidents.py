"""What went wrong inside a start: killed phases, errors, fall-backs; and the phases' extents."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, pairwise
from typing import Any, Literal, NamedTuple

from bootseer.profiler.report.lanes import FIRST_STEP, Lane, Lanes
from bootseer.profiler.report.load.clock_skew import is_barrier
from bootseer.profiler.report.load.columns import Spans, columns_of, extent_of
from bootseer.profiler.report.load.spans import Identity, Source, Span, Start
from bootseer.profiler.report.model import NAMED_NODES, Incident, Killed, Problem, Unreached
from bootseer.profiler.report.overlap import WHOLE, Part
from bootseer.profiler.report.phase_totals import Extras


def killed_phases(lanes: Lanes) -> tuple[Killed, ...]:
    """Every begin without an end, shared ones once; the command around a job that reached its
    first step is still running and no loss."""
    out = []
    for lane in lanes.lanes:
        for name, begin_s, file, shared in lane.open:
            if (shared and not lane.first) or (name == WHOLE and lanes.complete):
                continue
            if lane.reached and begin_s >= lane.end_s:
                continue
            rank = None if shared else lane.rank
            out.append(Killed(lane.node, rank, name, begin_s, file))
    return tuple(sorted(out, key=lambda k: (k.began_s, k.node, k.rank or 0)))


def unreached_ranks(lanes: Lanes) -> tuple[Unreached, ...]:
    """The ranks without a first step, where it is known that they should have one.

    Some jobs tell of it on one rank alone. So a rank without one counts where more than half of
    the ranks have one, or where it began a phase that it never ended, or never came to a barrier
    that more than half of the ranks passed, while another rank went on to its first step. One that
    was begun again on another node is that rank, wherever it got on. Where no rank got there and at
    least half of them are in one phase that they never ended, the others are those that these wait
    for.
    """
    ranked = [lane for lane in lanes.lanes if lane.rank is not None]
    there = {lane.rank for lane in ranked if lane.reached}
    ranked = [lane for lane in ranked if lane.reached or lane.rank not in there]
    reached = len(there)
    if not reached:
        ranked = _waited_for(ranked)
    most = not reached or reached > len({lane.rank for lane in ranked}) / 2
    halted = {id(each.lane) for each in halted_ranks(lanes) if each.is_barrier} if reached else ()
    out = [
        _last_seen(lane, lane.rank)
        for lane in ranked
        if lane.rank is not None and not lane.reached
        if most or _unended(lane) or id(lane) in halted
    ]
    return tuple(sorted(out, key=lambda each: (each.since_s, each.rank)))


def _waited_for(ranked: Sequence[Lane]) -> list[Lane]:
    """The ranks outside of the one phase that most are still in; none where there is no such."""
    inside = Counter(max(_unended(lane))[1] for lane in ranked if _unended(lane))
    phase, number = inside.most_common(1)[0] if inside else ("", 0)
    if number < 2 or number * 2 < len(ranked):
        return []
    return [lane for lane in ranked if phase not in {name for _, name in _unended(lane)}]


class Halted(NamedTuple):
    """A rank that wrote nothing after the end of `last`, while others did `further` after it.

    `is_barrier`: more than half of the ranks passed a barrier that is one of these.
    """

    lane: Lane
    rank: int
    last: str
    further: tuple[str, ...]
    is_barrier: bool


def halted_ranks(lanes: Lanes) -> list[Halted]:
    """The ranks that ended between two phases: they never came to one that others had after theirs.

    Ranks may differ in what they do, and half of them may be of another kind. So it takes a barrier
    that at least half of the ranks passed, or a phase that more than half began, or two that half
    began. What one rank alone did, as where the first one tells what all do, says nothing. Of a
    rank that was begun again on another node the last lane counts.
    """
    latest: dict[int, Lane] = {}
    for lane in lanes.lanes:
        if lane.rank is not None:
            known = latest.get(lane.rank)
            if known is None or lane.begin_s >= known.begin_s:
                latest[lane.rank] = lane
    ranked = list(latest.values())
    there = {lane.rank for lane in lanes.lanes if lane.reached}
    number = len(ranked)
    quiet = [lane for lane in ranked if lane.rank not in there and not _unended(lane)]
    if not quiet or number < 2:
        return []
    courses: dict[int, tuple[Part, ...]] = {}
    lanes_of: Counter[int] = Counter()
    begun: Counter[str] = Counter()
    for lane in ranked:  # most lanes have one course in common
        courses[id(lane.parts)] = lane.parts
        lanes_of[id(lane.parts)] += 1
        begun.update({name for _, name in _unended(lane)})
    own = {key: _own_phases(parts) for key, parts in courses.items()}
    for key, phases in own.items():
        for name in phases:
            begun[name] += lanes_of[key]
    out = []
    found: dict[int, tuple[str, tuple[str, ...], bool] | None] = {}
    for lane in quiet:
        key = id(lane.parts)
        if key not in found:
            found[key] = _find_further(own[key], own.values(), begun, number)
        further = found[key]
        if further is None or lane.rank is None:
            continue
        passed = {wait.key[0] for wait in lane.waits}  # one that took no time is no part
        if passed.isdisjoint(further[1]):
            out.append(Halted(lane, lane.rank, *further))
    return out


def _own_phases(parts: Sequence[Part]) -> dict[str, bool]:
    """What a lane did itself, in the order of the first begins; whether it is a barrier."""
    return {
        name: is_barrier(name, wait)
        for name, wait, shared in reversed(parts)
        if not shared and name is not None and name != WHOLE
    }


def _find_further(
    mine: Mapping[str, bool],
    every: Collection[Mapping[str, bool]],
    begun: Mapping[str, int],
    number: int,
) -> tuple[str, tuple[str, ...], bool] | None:
    """The last phase of a course, those that at least half of the ranks came to after it, whether
    more than half passed a barrier among them; None where too few did."""
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


def halted_problems(start: Start, lanes: Lanes) -> tuple[Problem, ...]:
    """A line for the ranks that were last seen at the same place between two phases."""
    halted = halted_ranks(lanes)
    sources: dict[int, list[Source]] = {each.rank: [] for each in halted}
    for source in start.sources if halted else ():
        if source.identity.rank in sources:
            sources[source.identity.rank].append(source)
    places: dict[tuple[str, str], list[Halted]] = defaultdict(list)
    for each in halted:
        names = {span.name for source in sources[each.rank] for span in source.spans}
        if names.isdisjoint(each.further):  # one that took no time is no part of a lane
            places[each.last, each.further[0]].append(each)
    out = []
    for (last, further), found in places.items():
        ranks = sorted({each.rank for each in found})
        first = min(found, key=lambda each: each.rank)
        nodes = {each.lane.node for each in found}
        where = f" on {first.lane.node}" if len(nodes) == 1 else ""
        named = ", ".join(str(rank) for rank in ranks[:_NAMED_RANKS])
        more = f" and {len(ranks) - _NAMED_RANKS:,} more" if len(ranks) > _NAMED_RANKS else ""
        one = len(ranks) == 1
        detail = (
            f"{'rank' if one else 'ranks'} {named}{more}{where} {'was' if one else 'were'} last "
            f"seen at the end of {last} ({first.lane.end_s:.1f} s), while others went on to "
            f"{further}: killed in between, unless {'it is' if one else 'they are'} not to do that"
        )
        out.append(Problem(sources[first.rank][0].file, HALTED, len(ranks), detail))
    return tuple(out)


MISSING = "missing-rank"


def missing_ranks(start: Start) -> tuple[Problem, ...]:
    """Ranks that wrote nothing, where the others say how many there are (their world size)."""
    known = {s.identity.rank for s in start.sources if s.identity.rank is not None}
    sizes = Counter(s.identity.world_size for s in start.sources if s.identity.world_size)
    if not known or not sizes:
        return ()
    size = sizes.most_common(1)[0][0] or 0
    number = size - sum(rank < size for rank in known)
    if size <= max(known) or number <= 0:  # other numbers than those of the whole job
        return ()
    first = islice((rank for rank in range(size) if rank not in known), _NAMED_RANKS)
    named = ", ".join(str(rank) for rank in first)
    more = f" and {number - _NAMED_RANKS:,} more" if number > _NAMED_RANKS else ""
    word = "rank" if number == 1 else "ranks"
    detail = f"{word} {named}{more} of {size:,} wrote no events"
    return (Problem(start.sources[0].file, MISSING, number, detail),)


def _unended(lane: Lane) -> list[tuple[float, str]]:
    return [(o.begin_s, o.name) for o in lane.open if not o.shared and o.name != WHOLE]


def _last_seen(lane: Lane, rank: int) -> Unreached:
    unended = _unended(lane)
    if unended:
        since_s, phase = max(unended)
        return Unreached(lane.node, rank, phase, True, since_s)
    for piece in reversed(lane.pieces):
        if piece.name is not None and piece.name != WHOLE:
            return Unreached(lane.node, rank, piece.name, False, piece.end_s)
    return Unreached(lane.node, rank, None, False, lane.begin_s)


_EXIT_CODES = ("process.exit.code", "log.exit_code")  # of a process, of a line that tells of one


def _reason(span: Span) -> str:
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


def incidents(start: Start, shifts: Sequence[int], zero_ns: int) -> tuple[Incident, ...]:
    """Errors and fall-backs, equal ones joined, in order of their first occurrence."""
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = defaultdict(list)
    for source, shift in zip(start.sources, shifts, strict=True):
        if _SOUND.issuperset(columns_of(source.spans).states):
            continue
        for span in source.spans:
            if span.status in _SOUND:
                continue
            moment = span.end_ns if span.end_ns is not None else span.begin_ns
            at_s = ((moment or 0) + shift - zero_ns) / 1e9
            status = "fallback" if span.status == "fallback" else "error"
            found[status, span.name, _reason(span)].append((at_s, source.identity.node))
    out = []
    for (status, phase, reason), seen in found.items():
        kind: Literal["error", "fallback"] = "fallback" if status == "fallback" else "error"
        nodes = tuple(sorted({node for _, node in seen})[:NAMED_NODES])
        out.append(Incident(kind, phase, reason, len(seen), nodes, min(seen)[0]))
    return tuple(sorted(out, key=lambda i: (i.first_s, i.phase, i.reason)))


_ENTRIES = frozenset((WHOLE, "start"))  # what `run` and `start` write first
_REPEATED = (
    "ran again under the same job uid and attempt, so several starts are taken for one; "
    "count them in BOOTSEER_ATTEMPT"
)


def repeated(start: Start) -> tuple[Problem, ...]:
    """Entry commands that ran again: one job uid and attempt, but more than one start.

    A restarted container cannot know its attempt, so its events join those of the run before.
    Told by the outermost `run` or `start` of one rank, else of one pod or node, that began after
    another had ended, or had its process id, which two processes never have at a time; and by a
    rank that came to a first step in one process, and again in one that began after it.
    """
    entries: dict[tuple[object, ...], list[tuple[int, int | None, int | None, str]]] = defaultdict(
        list
    )
    for source in start.sources:
        who = source.identity
        place = (who.node, who.pod) if who.rank is None else (who.rank,)
        if _ENTRIES.isdisjoint(columns_of(source.spans).names):
            continue
        for span in source.spans:
            if span.name not in _ENTRIES or span.parent_id is not None or span.begin_ns is None:
                continue
            ended = None if span.point or span.end_ns is None else span.end_ns + source.offset_ns
            begun = span.begin_ns + source.offset_ns
            entries[span.name, *place].append((begun, ended, who.process_id, source.file))
    again: Counter[str] = Counter()
    for found in entries.values():
        for before, after in pairwise(sorted(found, key=lambda entry: entry[0])):
            over = before[1] is not None and before[1] <= after[0]
            same = before[2] is not None and before[2] == after[2] and before[3] != after[3]
            again[after[3]] += over or same
    for file in _stepped_again(start):
        again[file] = again[file] or 1
    return tuple(
        Problem(file, "repeated-start", count, _REPEATED) for file, count in again.items() if count
    )


def _stepped_again(start: Start) -> Iterator[str]:
    """Files of ranks whose first step came after another process of theirs had come to one."""
    ranks: dict[int, list[Source]] = defaultdict(list)
    for source in start.sources:
        if source.identity.rank is not None:
            ranks[source.identity.rank].append(source)
    for sources in ranks.values():
        if len(sources) < 2:
            continue
        stepped = [s for s in sources if any(span.name == FIRST_STEP for span in s.spans)]
        extents = sorted((*_extent(source), source.file) for source in stepped)
        yield from (after[2] for before, after in pairwise(extents) if before[1] <= after[0])


def _extent(source: Source) -> tuple[int, int]:
    low_ns, high_ns = extent_of(source.spans)
    return low_ns + source.offset_ns, high_ns + source.offset_ns


def _widen(extents: dict[str, tuple[int, int]], name: str, low: int, high: int) -> None:
    seen = extents.get(name)
    if seen is None or low < seen[0] or high > seen[1]:
        extents[name] = (min(low, seen[0]), max(high, seen[1])) if seen else (low, high)


def _widest(
    sources: Sequence[Source], shifts: Sequence[int], end_ns: int
) -> Iterator[tuple[list[Spans], Sequence[int | None], int]]:
    """Sources in order, those that follow each other with the same spans and shift as one.

    Gives them with each span's first begin and last end, and their shift. Sources that have
    moments after the start's end, or unknown ones, come alone.
    """
    columns = [columns_of(source.spans) for source in sources]

    def alike(each: tuple[Spans, int]) -> tuple[int, int, bool]:
        return id(each[0].form), each[1], each[0].is_timed

    for (_, shift, timed), group in groupby(zip(columns, shifts, strict=True), key=alike):
        found = [spans for spans, _ in group]
        if timed and len(found) > 1:
            every: list[Any] = [spans.moments for spans in found]
            begins = map(min, *[moments[::2] for moments in every])
            ends = map(max, *[moments[1::2] for moments in every])
            widest = tuple(chain.from_iterable(zip(begins, ends, strict=True)))
            if max(map(max, every)) + shift <= end_ns:
                yield found, widest, shift
                continue
        for spans in found:
            yield [spans], spans.moments, shift


def extras(
    start: Start,
    shifts: Sequence[int],
    lanes: Lanes,
    killed: Sequence[Killed],
) -> Mapping[str, Extras]:
    """Extent, faults and bytes of every phase with at least one span up to the start's end."""
    zero_ns, end_ns = lanes.zero_ns, lanes.zero_ns + round(lanes.end_s * 1e9)
    extents: dict[str, tuple[int, int]] = {}
    states: Counter[tuple[str, str]] = Counter()
    sizes: Counter[str] = Counter()
    for found, moments, shift in _widest(start.sources, shifts, end_ns):
        names, _, status_of, points = found[0].form
        about = [spans.attributes for spans in found if spans.attributes is not None]
        for place, name in enumerate(names):
            status = status_of[place]
            if points[place] and name != FIRST_STEP and status == "ok":
                continue
            began, ended = moments[2 * place], moments[2 * place + 1]
            low = (ended if began is None else began) or 0
            high = low if ended is None else ended
            if low + shift > end_ns:
                continue
            _widen(extents, name, low + shift, min(high + shift, end_ns))
            if status != "ok":
                states[name, status] += len(found)
            for attributes in about:
                if attributes[place] is not None:
                    size = attributes[place].get("bootseer.bytes")
                    sizes[name] += size if type(size) is int and size > 0 else 0
    for name, (low, high) in list(extents.items()):  # a phase may be seen only by its parts
        for above in lanes.chains[name][1:]:
            _widen(extents, above, low, high)
    dead = Counter(k.phase for k in killed)
    return {
        name: Extras(
            first_begin_s=(low - zero_ns) / 1e9,
            last_end_s=(high - zero_ns) / 1e9,
            killed=dead[name],
            errors=states[name, "error"],
            fallbacks=states[name, "fallback"],
            bytes=sizes[name] or None,
        )
        for name, (low, high) in extents.items()
    }


def kind_of(identities: Sequence[Identity]) -> tuple[str, int | None, str | None]:
    """A start's kind, attempt and job uid: what most of its writers say."""
    kinds = Counter(i.kind for i in identities if i.kind)
    attempts = Counter(i.attempt for i in identities if i.attempt is not None)
    uids = Counter(i.job_uid for i in identities if i.job_uid)
    attempt = attempts.most_common(1)[0][0] if attempts else None
    kind = kinds.most_common(1)[0][0] if kinds else "unknown"
    return kind, attempt, uids.most_common(1)[0][0] if uids else None
