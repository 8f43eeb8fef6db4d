"""Records of starts, made by hand."""

from __future__ import annotations

import random

from bootseer.profiler.history.model import NodePhase, NodeTime, StartRecord

SECOND = 10**9
EPOCH = 1_790_000_000 * SECOND


def record(number: int = 0, **changes) -> StartRecord:
    values = {
        "trace_id": f"{number:032x}",
        "job": "job-a",
        "attempt": None,
        "declared_kind": None,
        "places": (),
        "begin_unix_nano": EPOCH + number * 10_000 * SECOND,
        "held_unix_nano": EPOCH + number * 10_000 * SECOND,
        "start_s": 100.0,
        "held_start_s": 100.0,
        "job_s": 1000.0,
        "gpu_count": 8,
        "rank_count": 8,
        "event_count": 40,
        "nodes": (NodeTime("n0", 60.0), NodeTime("n1", 90.0)),
        "node_phases": (NodePhase("n0", "imports", 60.0), NodePhase("n1", "imports", 90.0)),
    }
    return StartRecord(**(values | changes))


def starts_with(
    rng: random.Random, nodes: int, starts: int, slow: dict[str, float]
) -> list[StartRecord]:
    """Log-normal noise (sigma 0.2) on every node, some nodes slower by a factor."""
    out = []
    for number in range(starts):
        times = tuple(
            NodeTime(f"n{i}", 60 * rng.lognormvariate(0, 0.2) * slow.get(f"n{i}", 1.0))
            for i in range(nodes)
        )
        phases = tuple(NodePhase(t.node, "imports", t.own_s) for t in times)
        out.append(record(number, nodes=times, node_phases=phases))
    return out
