"""Nodes that are slow in start after start, beyond what chance explains (pure).

The test. In a start with n nodes, k = max(1, n // 16) places are "slow". A node is slow in that
start when at most k nodes, itself included, needed as long as it or longer. If nodes were alike
(exchangeable), that happens with probability at most k / n, whatever the distribution of times.
Over a node's starts the count of slow ones is then at most Poisson-binomial with these
probabilities; its upper tail is the node's p-value, computed exactly. All nodes with at least
`MIN_STARTS` starts are tested and p is multiplied by their number (Bonferroni), so that with
alike nodes the chance of naming even one node is below `ALPHA`.

Only own work counts: time spent waiting for others makes no node slow.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from bootseer.profiler.history.model import SlowNode, StartRecord

MIN_STARTS = 5
ALPHA = 0.01
SLOW_SHARE = 16
"""One of this many places of a start counts as slow, and always at least one."""


def count_slow_places(nodes: int) -> int:
    """Return how many places of a start with `nodes` nodes count as slow."""
    return max(1, nodes // SLOW_SHARE)


def flag_slow_nodes(record: StartRecord) -> dict[str, bool]:
    """Return for each node of one start whether it was slow; ties beyond the places are not."""
    times = sorted((node.own_s for node in record.nodes), reverse=True)
    places = count_slow_places(len(times))
    # As slow as the place after the last slow one = tied with it = not slow.
    bound = times[places] if places < len(times) else float("inf")
    return {node.node: node.own_s > bound for node in record.nodes}


def upper_tail(probabilities: Sequence[float], count: int) -> float:
    """Return P(at least `count` successes) of independent trials with these probabilities.

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
    """Return the nodes slow beyond chance, most certain first, and how many nodes were tested."""
    trials: dict[str, list[float]] = defaultdict(list)
    slow_counts: dict[str, int] = defaultdict(int)
    for record in records:
        if len(record.nodes) < 2:
            continue
        probability = count_slow_places(len(record.nodes)) / len(record.nodes)
        for node, is_slow in flag_slow_nodes(record).items():
            trials[node].append(probability)
            slow_counts[node] += is_slow
    tested = [node for node, probabilities in trials.items() if len(probabilities) >= MIN_STARTS]
    p_values: dict[str, float] = {}
    for node in tested:
        p = upper_tail(trials[node], slow_counts[node]) * len(tested)
        if p < ALPHA:
            p_values[node] = p
    effects = _compute_effects(records, set(p_values))
    rows = [
        SlowNode(node, len(trials[node]), slow_counts[node], sum(trials[node]), p, *effects[node])
        for node, p in p_values.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.p, row.node))), len(tested)


def _compute_effects(
    records: Sequence[StartRecord], nodes: set[str]
) -> dict[str, tuple[float, float | None, str | None]]:
    """Return for each node its median excess over the median node, median ratio, and main phase."""
    excesses_s: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    phase_excesses_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for record in records:
        if len(record.nodes) < 2 or not any(node.node in nodes for node in record.nodes):
            continue
        median_s = statistics.median(node.own_s for node in record.nodes)
        for node in record.nodes:
            if node.node in nodes:
                excesses_s[node.node].append(node.own_s - median_s)
                if median_s > 0:
                    ratios[node.node].append(node.own_s / median_s)
        for name, phase, excess_s in _compute_phase_excesses(record, nodes):
            phase_excesses_s[name][phase] += excess_s
    return {
        name: (
            statistics.median(excesses_s[name]),
            statistics.median(ratios[name]) if ratios[name] else None,
            _find_main_phase(phase_excesses_s[name]),
        )
        for name in nodes
    }


def _find_main_phase(excesses_s: dict[str, float]) -> str | None:
    return max(excesses_s.items(), key=lambda item: item[1])[0] if excesses_s else None


def _compute_phase_excesses(record: StartRecord, nodes: set[str]) -> list[tuple[str, str, float]]:
    """Return (node, phase, seconds above the median node) of each of `nodes` in one start."""
    times: dict[str, list[float]] = defaultdict(list)
    for node_phase in record.node_phases:
        times[node_phase.phase].append(node_phase.own_s)
    medians = {phase: statistics.median(values) for phase, values in times.items()}
    return [
        (node_phase.node, node_phase.phase, node_phase.own_s - medians[node_phase.phase])
        for node_phase in record.node_phases
        if node_phase.node in nodes
    ]
