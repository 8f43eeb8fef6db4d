"""Which nodes are slow again and again, and not by chance (pure).

The test. In a start with n nodes, k = max(1, n // 16) places are "slow". A node is slow in that
start when at most k nodes, itself included, needed as long as it or longer. If nodes were alike
(exchangeable), that happens with probability at most k / n, whatever the distribution of times.
Over a node's starts the count of slow ones is then at most Poisson-binomial with these
probabilities; its upper tail is the node's p-value, computed exactly. All nodes with at least
`MIN_STARTS` starts are tested and p is multiplied by their number (Bonferroni), so that with
alike nodes the chance of naming even one node is below `ALPHA`.

Only own work counts: time spent waiting for others makes nobody slow.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from bootseer.profiler.history.model import SlowNode, StartRecord

MIN_STARTS = 5
ALPHA = 0.01
SLOW_SHARE = 16


def slow_places(nodes: int) -> int:
    """How many of `nodes` places count as slow."""
    return max(1, nodes // SLOW_SHARE)


def slow_nodes_of(record: StartRecord) -> dict[str, bool]:
    """For each node of one start, whether it was slow; ties beyond the places make none slow."""
    times = sorted((node.own_s for node in record.nodes), reverse=True)
    places = slow_places(len(times))
    # As slow as the place after the last slow one = tied with it = not slow.
    bound = times[places] if places < len(times) else float("inf")
    return {node.node: node.own_s > bound for node in record.nodes}


def upper_tail(probabilities: Sequence[float], count: int) -> float:
    """P(at least `count` successes) of independent trials with these probabilities.

    The Poisson-binomial distribution by direct convolution; for equal probabilities the sum of
    C(n, i) p^i (1-p)^(n-i). Only non-negative terms are added, so tiny tails keep their digits.
    """
    if count <= 0:
        return 1.0
    # below[i] = P(i successes so far) for i < count; `tail` has already reached `count`.
    below = [1.0] + [0.0] * (count - 1)
    tail = 0.0
    for p in probabilities:
        tail += below[count - 1] * p
        for i in range(count - 1, 0, -1):
            below[i] = below[i] * (1 - p) + below[i - 1] * p
        below[0] *= 1 - p
    return min(1.0, tail)


def find(records: Sequence[StartRecord]) -> tuple[tuple[SlowNode, ...], int]:
    """Nodes slow beyond chance, most certain first, and how many nodes were tested."""
    trials: dict[str, list[float]] = defaultdict(list)
    slow: dict[str, int] = defaultdict(int)
    for record in records:
        if len(record.nodes) < 2:
            continue
        probability = slow_places(len(record.nodes)) / len(record.nodes)
        for node, is_slow in slow_nodes_of(record).items():
            trials[node].append(probability)
            slow[node] += is_slow
    tested = [node for node, each in trials.items() if len(each) >= MIN_STARTS]
    named: list[tuple[str, float]] = []
    for node in tested:
        p = upper_tail(trials[node], slow[node]) * len(tested)
        if p < ALPHA:
            named.append((node, p))
    effects = _effects(records, {node for node, _ in named})
    rows = [
        SlowNode(node, len(trials[node]), slow[node], sum(trials[node]), p, *effects[node])
        for node, p in named
    ]
    return tuple(sorted(rows, key=lambda row: (row.p, row.node))), len(tested)


def _effects(
    records: Sequence[StartRecord], nodes: set[str]
) -> dict[str, tuple[float, float | None, str | None]]:
    """For each node: median excess over the median node, median ratio to it, and main phase."""
    excess: dict[str, list[float]] = defaultdict(list)
    ratio: dict[str, list[float]] = defaultdict(list)
    by_phase: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for record in records:
        if len(record.nodes) < 2 or not any(each.node in nodes for each in record.nodes):
            continue
        median = statistics.median(each.own_s for each in record.nodes)
        for each in record.nodes:
            if each.node in nodes:
                excess[each.node].append(each.own_s - median)
                if median > 0:
                    ratio[each.node].append(each.own_s / median)
        for node, phase, over in _phase_excess(record, nodes):
            by_phase[node][phase] += over
    return {
        node: (
            statistics.median(excess[node]),
            statistics.median(ratio[node]) if ratio[node] else None,
            max(by_phase[node].items(), key=lambda item: item[1])[0] if by_phase[node] else None,
        )
        for node in nodes
    }


def _phase_excess(record: StartRecord, nodes: set[str]) -> list[tuple[str, str, float]]:
    times: dict[str, list[float]] = defaultdict(list)
    for each in record.node_phases:
        times[each.phase].append(each.own_s)
    medians = {phase: statistics.median(values) for phase, values in times.items()}
    return [
        (each.node, each.phase, each.own_s - medians[each.phase])
        for each in record.node_phases
        if each.node in nodes
    ]
