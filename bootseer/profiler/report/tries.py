"""Which processes of a start were an earlier try of the same rank or node (pure).

A node that is restarted within a start runs the same ranks again under the same trace. Its two
tries must not be added up: the last one counts, the earlier one is left out and reported.

A process belongs to a later try when it began after the last event of an earlier process of its
rank, repeats phases of it, and the earlier one is known to be over, for one of these reasons: the
node was booted in between; its pod was created again; it ended in a phase that never ended or
failed, which the later one begins again (or two other phases besides); or it ended in none but the
command as a whole (`job`), as a process that was killed between two phases does, and two of its
phases are begun again. Less is no sign: a rank may run one process after the other, and a worker
process may import again what its parent did.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bootseer.profiler.report.incidents import name_ranks
from bootseer.profiler.report.load.columns import wall_extent_of
from bootseer.profiler.report.load.spans import Source, Start
from bootseer.profiler.report.model import JOB, Problem

KIND = "earlier-try"
_NAMED_RANKS = 8


@dataclass(frozen=True, slots=True)
class LastTries:
    """A start with each rank's last try only, and a problem for each node's earlier ones."""

    start: Start
    problems: tuple[Problem, ...]


class _Process:
    """A source with what the comparison needs of it, in nanoseconds of its node's wall clock."""

    __slots__ = ("begin_ns", "died_in", "end_ns", "names", "source", "was_cut_short")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.begin_ns, self.end_ns = wall_extent_of(source)
        spans = [span for span in source.spans if not span.point]
        self.names = {span.name for span in spans if span.begin_ns is not None} - {JOB}
        unended = [s for s in spans if s.end_ns is None and s.status != "unknown"]
        self.died_in = {span.name for span in unended} - {JOB}
        ended = [(span.end_ns, span.status, span.name) for span in spans if span.end_ns is not None]
        if ended and max(ended)[1] == "error":
            self.died_in.add(max(ended)[2])
        self.was_cut_short = bool(self.died_in or unended)


def keep_last_tries(start: Start) -> LastTries:
    """Leave the earlier tries of restarted nodes and ranks out of a start."""
    ranks: dict[tuple[str, int | None], list[Source]] = defaultdict(list)
    for source in start.sources:
        ranks[source.identity.node, source.identity.rank].append(source)
    earlier_of_node: dict[str, list[_Process]] = defaultdict(list)
    again_ns: dict[str, int] = {}
    for (node, rank), sources in ranks.items():
        if rank is None or len(sources) < 2:
            continue
        earlier, later = _split_tries(sources)
        if earlier:
            earlier_of_node[node] += earlier
            again_ns[node] = min(again_ns.get(node, later[0].begin_ns), later[0].begin_ns)
    for (node, rank), sources in ranks.items():
        if rank is None and len(sources) > 1:
            earlier_of_node[node] += _find_earlier_unranked(sources, earlier_of_node.get(node, ()))
    left_out = {id(each.source) for earlier in earlier_of_node.values() for each in earlier}
    if not left_out:
        return LastTries(start, ())
    kept = tuple(source for source in start.sources if id(source) not in left_out)
    problems = tuple(
        _make_problem(node, earlier, again_ns.get(node), kept)
        for node, earlier in earlier_of_node.items()
        if earlier
    )
    return LastTries(dataclasses.replace(start, sources=kept), problems)


def _split_tries(sources: Iterable[Source]) -> tuple[list[_Process], list[_Process]]:
    """Processes of earlier tries, and of the last one, by begin."""
    current: list[_Process] = []
    earlier: list[_Process] = []
    for process in sorted(map(_Process, sources), key=lambda each: each.begin_ns):
        over = [each for each in current if each.end_ns <= process.begin_ns]
        if _is_repeated(over, process):
            first = min(n for n, each in enumerate(over) if each.names & process.names)
            earlier += over[first:]
            current = [each for each in current if each not in over[first:]]
        current.append(process)
    return earlier, current


def _is_repeated(over: Sequence[_Process], process: _Process) -> bool:
    """Whether `process` repeats what these did, and they are known to have been cut short."""
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
        if each.was_cut_short and len({name.split(".", 1)[0] for name in common}) > 1:
            return True
    return False


def _find_earlier_unranked(
    sources: Iterable[Source], earlier_ranks: Sequence[_Process]
) -> list[_Process]:
    """What a node's processes without a rank did for an earlier try.

    They were cut short themselves, or ran before the ranks of that try ended and again after it.
    """
    by_pod: dict[str | None, list[Source]] = defaultdict(list)
    for source in sources:
        by_pod[source.identity.pod].append(source)
    unranked: list[_Process] = []
    over_ns = max((each.end_ns for each in earlier_ranks), default=None)
    for members in by_pod.values():
        earlier, rest = _split_tries(members)
        unranked += earlier
        if over_ns is None:
            continue
        again = {name for each in rest if each.begin_ns >= over_ns for name in each.names}
        unranked += [each for each in rest if each.end_ns <= over_ns and each.names & again]
    return unranked


def _make_problem(
    node: str, earlier: Sequence[_Process], again_ns: int | None, kept: Sequence[Source]
) -> Problem:
    """One problem for all that was left out of a node."""
    begin_ns, end_ns = min(e.begin_ns for e in earlier), max(e.end_ns for e in earlier)
    if again_ns is None:
        begins_ns = [wall_extent_of(s)[0] for s in kept if s.identity.node == node]
        again_ns = min((ns for ns in begins_ns if ns >= end_ns), default=end_ns)
    ranks = {e.source.identity.rank for e in earlier if e.source.identity.rank is not None}
    whose = f" of {name_ranks(sorted(ranks), len(ranks), _NAMED_RANKS)}" if ranks else ""
    died_in = sorted({name for each in earlier for name in each.died_in})
    where = f", last in {died_in[0]}," if died_in else ""
    detail = (
        f"an earlier try{whose} on {node}{where} was left out: "
        f"{(again_ns - begin_ns) / 1e9:.1f} s were lost until the next one began"
    )
    return Problem(earlier[0].source.file, KIND, len(earlier), detail)
