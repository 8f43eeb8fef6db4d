"""Which nodes and ranks are stragglers (pure).

Definition: a straggler of a phase has own work (waiting excluded) of at least 1.5 times the
phase's median and at least 2 s above it. Over thousands of ranks, ordinary noise passes that
too: of log-normal noise with sigma 0.2, one rank in 50. So there is a second condition: own work
must be beyond what the phase's own spread explains,

    own >= median * exp(t * sigma)

with sigma the standard deviation of log(own) over the bulk of the phase (values within 3.5
robust deviations of the median), and t the Student quantile at 0.001 divided by the number of
values tested in the whole start (Bonferroni), so that pure noise names a node in at most one of
a thousand starts, and a single process likewise. Few values know their own spread badly: sigma is
therefore pooled with a prior of 0.1 worth 8 values. With fewer than about 30 values in a phase
this favours the definition: of small starts of pure noise with sigma 0.2 in single values, up to
3 % name a straggler.

It is applied twice. To nodes first: a node's own work is the mean over its processes without the
highest and the lowest (all of them below four), if at least three quarters of them finished the
phase. That averages noise out: with 8 ranks and sigma 0.2 per rank the spread of nodes is 0.07
and the second condition asks no more than the definition does. Then to the single processes of
nodes not named in that phase: there, with 8,192 ranks and sigma 0.2, a rank has to be about
three times the median to stand out from noise; slower ones below that are counted in
`PhaseStats.within_noise`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul, sub

from bootseer.profiler.report.lanes import Lane
from bootseer.profiler.report.model import Straggler
from bootseer.profiler.report.quantiles import student_quantile

RATIO = 1.5
EXCESS_S = 2.0
ALPHA = 0.001
_PRIOR_SIGMA = 0.1
_PRIOR_VALUES = 8
_LEAST_S = 1e-3  # shorter work counts as this in logarithms
_LEAST_VALUES = 3

Totals = Sequence[Mapping[str, float]]
_Values = tuple[list[int], list[float]]  # numbers of a node's lanes, and their own work in a phase


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The stragglers, greatest excess first, and per phase how many processes pass the
    definition but not the test against noise."""

    stragglers: tuple[Straggler, ...]
    within_noise: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Limit:
    """A phase's median, and the own work from which on a process or node is a straggler."""

    median_s: float
    threshold_s: float

    @property
    def defined_s(self) -> float:
        """The threshold by the definition alone."""
        return max(RATIO * self.median_s, self.median_s + EXCESS_S)


def node_own(values: Sequence[float]) -> float:
    """A node's own work from its processes': the mean without the highest and the lowest."""
    kept = sorted(values)[1:-1] if len(values) >= 4 else values
    return math.fsum(kept) / len(kept)  # as fmean does, which looks for iterators first


def compute_limit(values: Sequence[float], tests: int) -> Limit | None:
    """The limit of one phase over `values`, one of `tests` made in all; None for too few."""
    if len(values) < _LEAST_VALUES:
        return None
    # In order of the values their logarithms are in order too, and the distances from the middle
    # one are two runs, one down and one up: sorting those costs next to nothing.
    ordered = sorted(values)
    median_s = _median_of(ordered)
    logs = _logs_of(ordered)
    middle = _median_of(logs)
    bulk_limit = 3.5 * 1.4826 * _median_of(sorted(_distances(logs, middle)))
    bulk = [distance for distance in _distances(_logs_of(values), middle) if distance <= bulk_limit]
    known = len(bulk) - 1
    freedom = _PRIOR_VALUES + known
    variance = (_PRIOR_VALUES * _PRIOR_SIGMA**2 + sum(map(mul, bulk, bulk))) / freedom
    noise = math.exp(student_quantile(ALPHA / tests, freedom) * math.sqrt(variance))
    defined_s = max(RATIO * median_s, median_s + EXCESS_S)
    return Limit(median_s, max(defined_s, median_s * noise))


def _median_of(ordered: Sequence[float]) -> float:
    """The median of sorted values."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _logs_of(values: Sequence[float]) -> list[float]:
    if min(values) < _LEAST_S:
        values = [max(value, _LEAST_S) for value in values]
    return list(map(math.log, values))


def _distances(values: Sequence[float], middle: float) -> list[float]:
    return list(map(abs, map(sub, values, repeat(middle))))


def find_stragglers(lanes: Sequence[Lane], totals: Totals, counted: Totals) -> Stragglers:
    """Name the stragglers of a start.

    `totals` is each lane's own work per top-level phase; `counted` the same without what the
    lane shares with the first lane of its group.
    """
    by_phase: dict[str, dict[str, _Values]] = defaultdict(dict)
    absent: Counter[tuple[str, str]] = Counter()  # shared: not to be expected of this lane
    size = Counter(lane.node for lane in lanes)
    for number, (all_own, own) in enumerate(zip(totals, counted, strict=True)):
        node = lanes[number].node
        for phase, own_s in own.items():
            nodes = by_phase[phase]
            mine = nodes.get(node)
            if mine is None:
                mine = nodes[node] = ([], [])
            mine[0].append(number)
            mine[1].append(own_s)
        if len(own) < len(all_own):
            absent.update((phase, node) for phase in all_own if phase not in own)
    own_of_nodes = {
        phase: {
            node: node_own(values)
            for node, (_, values) in nodes.items()
            if len(values) >= 0.75 * (size[node] - absent[phase, node])
        }
        for phase, nodes in by_phase.items()
    }
    node_tests = sum(len(nodes) for nodes in own_of_nodes.values()) or 1
    rank_tests = sum(len(values) for nodes in by_phase.values() for _, values in nodes.values())
    stragglers: list[Straggler] = []
    within_noise: dict[str, int] = {}
    for phase, nodes in by_phase.items():
        own_of_node = own_of_nodes[phase]
        slow_nodes = _find_slow_nodes(phase, own_of_node, node_tests)
        named = {s.node for s in slow_nodes}
        slow_ranks, within_noise[phase] = _find_slow_ranks(
            phase, nodes, own_of_node, named, lanes, rank_tests
        )
        stragglers += slow_nodes + slow_ranks
    stragglers.sort(key=lambda s: (-s.excess_s, s.node, s.phase))
    return Stragglers(tuple(stragglers), within_noise)


def _find_slow_nodes(phase: str, own: Mapping[str, float], tests: int) -> list[Straggler]:
    limit = compute_limit(list(own.values()), tests)
    if limit is None:
        return []
    return [
        Straggler(node, (), phase, own_s, limit.median_s, limit.threshold_s)
        for node, own_s in own.items()
        if own_s >= limit.threshold_s
    ]


def _find_slow_ranks(
    phase: str,
    nodes: Mapping[str, _Values],
    own_of_node: Mapping[str, float],
    named: set[str],
    lanes: Sequence[Lane],
    tests: int,
) -> tuple[list[Straggler], int]:
    """Slow processes of nodes not named, and how many are slow by the definition alone."""
    limit = compute_limit([own_s for _, values in nodes.values() for own_s in values], tests)
    if limit is None:
        return [], 0
    stragglers = []
    within_noise = 0
    defined_s = limit.defined_s
    for node, (numbers, values) in nodes.items():
        if node in named or max(values) < defined_s:
            continue
        is_alone = len(values) == 1 and node in own_of_node  # the node itself was tested
        every = zip(numbers, values, strict=True)
        slow = [] if is_alone else [(n, own_s) for n, own_s in every if own_s >= limit.threshold_s]
        within_noise += sum(own_s >= defined_s for own_s in values) - len(slow)
        ranks = tuple(r for n, _ in slow if (r := lanes[n].rank) is not None)
        if slow:
            own_s = max(own_s for _, own_s in slow)
            stragglers.append(
                Straggler(node, ranks, phase, own_s, limit.median_s, limit.threshold_s)
            )
    return stragglers, within_noise
