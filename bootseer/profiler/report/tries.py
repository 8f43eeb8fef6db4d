"""Which processes of a start were an earlier try of the same rank or node (pure).

A node that is restarted within a start runs the same ranks again under the same trace. Its two
tries must not be added up: the last one counts, the earlier one is left out and named.

A process began a later try when it began after all that an earlier process of its rank wrote, and
repeats phases of it, and the earlier one is known to be over: the node was booted in between, its
pod was made again, or it ended in a phase that never ended or failed, which the later one begins
again (or two other phases besides), or in none but the command as a whole (`job`), as one that was
killed between two phases, and two of its phases are begun again. Less is no sign: a rank may run
one process after the other, and a worker process may import again what its parent did.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bootseer.profiler.report.load.spans import Source, Start
from bootseer.profiler.report.model import Problem
from bootseer.profiler.report.overlap import WHOLE

KIND = "earlier-try"
_NAMED_RANKS = 8


@dataclass(frozen=True, slots=True)
class Tries:
    """A start with nothing but each rank's last try, and what was left out of it."""

    start: Start
    problems: tuple[Problem, ...]


class _Process:
    """A source with what the comparison needs of it, in nanoseconds of its node's wall clock."""

    __slots__ = ("begin_ns", "cut_short", "died_in", "end_ns", "names", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        offset = source.offset_ns
        moments = [m + offset for span in source.spans for m in span[1:3] if m is not None]
        self.begin_ns, self.end_ns = min(moments), max(moments)
        spans = [span for span in source.spans if not span.point]
        self.names = {span.name for span in spans if span.begin_ns is not None} - {WHOLE}
        unended = [s for s in spans if s.end_ns is None and s.status != "unknown"]
        self.died_in = {span.name for span in unended} - {WHOLE}
        ended = [(span.end_ns, span.status, span.name) for span in spans if span.end_ns is not None]
        if ended and max(ended)[1] == "error":
            self.died_in.add(max(ended)[2])
        self.cut_short = bool(self.died_in or unended)


def last_tries(start: Start) -> Tries:
    """Leave the earlier tries of restarted nodes and ranks out of a start."""
    ranks: dict[tuple[str, int | None], list[Source]] = defaultdict(list)
    for source in start.sources:
        ranks[source.identity.node, source.identity.rank].append(source)
    left: dict[str, list[_Process]] = defaultdict(list)
    again_ns: dict[str, int] = {}
    for (node, rank), sources in ranks.items():
        if rank is None or len(sources) < 2:
            continue
        earlier, later = _split(sources)
        if earlier:
            left[node] += earlier
            again_ns[node] = min(again_ns.get(node, later[0].begin_ns), later[0].begin_ns)
    for (node, rank), sources in ranks.items():
        if rank is None and len(sources) > 1:
            left[node] += _of_the_node(sources, left.get(node, ()))
    gone = {id(each.source) for processes in left.values() for each in processes}
    if not gone:
        return Tries(start, ())
    kept = tuple(source for source in start.sources if id(source) not in gone)
    problems = tuple(
        _problem(node, found, again_ns.get(node), kept) for node, found in left.items() if found
    )
    return Tries(dataclasses.replace(start, sources=kept), problems)


def _split(sources: Iterable[Source]) -> tuple[list[_Process], list[_Process]]:
    """Processes of earlier tries, and of the last one, by begin."""
    current: list[_Process] = []
    earlier: list[_Process] = []
    for process in sorted(map(_Process, sources), key=lambda each: each.begin_ns):
        over = [each for each in current if each.end_ns <= process.begin_ns]
        if _repeats(over, process):
            first = min(n for n, each in enumerate(over) if each.names & process.names)
            earlier += over[first:]
            current = [each for each in current if each not in over[first:]]
        current.append(process)
    return earlier, current


def _repeats(over: Sequence[_Process], process: _Process) -> bool:
    """Whether `process` does again what these did, and they are known to have been cut short."""
    common = process.names & {name for each in over for name in each.names}
    if not common:
        return False
    mine = process.source.identity
    for each in over:
        if not each.names & process.names:
            continue
        theirs = each.source.identity
        if mine.boot_id and theirs.boot_id and mine.boot_id != theirs.boot_id:
            return True
        same_name = mine.pod is not None and mine.pod == theirs.pod
        if same_name and mine.place and theirs.place and mine.place != theirs.place:
            return True
        if each.died_in & process.names:
            return True
        if each.cut_short and len({name.split(".", 1)[0] for name in common}) > 1:
            return True
    return False


def _of_the_node(sources: Iterable[Source], ranks: Sequence[_Process]) -> list[_Process]:
    """What a node's processes without a rank did for an earlier try: cut short themselves, or
    before the ranks of that try ended and again after it."""
    by_pod: dict[str | None, list[Source]] = defaultdict(list)
    for source in sources:
        by_pod[source.identity.pod].append(source)
    out: list[_Process] = []
    over_ns = max((each.end_ns for each in ranks), default=None)
    for members in by_pod.values():
        earlier, rest = _split(members)
        out += earlier
        if over_ns is None:
            continue
        again = {name for each in rest if each.begin_ns >= over_ns for name in each.names}
        out += [each for each in rest if each.end_ns <= over_ns and each.names & again]
    return out


def _problem(
    node: str, found: Sequence[_Process], again_ns: int | None, kept: Sequence[Source]
) -> Problem:
    """One line for all that was left out of a node."""
    begin_ns, end_ns = min(e.begin_ns for e in found), max(e.end_ns for e in found)
    if again_ns is None:
        mine = [_Process(s).begin_ns for s in kept if s.identity.node == node]
        again_ns = min((ns for ns in mine if ns >= end_ns), default=end_ns)
    ranks = sorted({e.source.identity.rank for e in found if e.source.identity.rank is not None})
    named = ", ".join(str(rank) for rank in ranks[:_NAMED_RANKS])
    more = f" and {len(ranks) - _NAMED_RANKS:,} more" if len(ranks) > _NAMED_RANKS else ""
    whose = f" of {'rank' if len(ranks) == 1 else 'ranks'} {named}{more}" if ranks else ""
    died = sorted({name for each in found for name in each.died_in})
    where = f", last in {died[0]}," if died else ""
    detail = (
        f"an earlier try{whose} on {node}{where} was left out: "
        f"{(again_ns - begin_ns) / 1e9:.1f} s were lost until the next one began"
    )
    return Problem(found[0].source.file, KIND, len(found), detail)
