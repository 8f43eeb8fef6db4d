"""Records of starts, made by hand, the events that they come from, and their files."""

from __future__ import annotations

import json
import os
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


def names(store) -> list[str]:
    return sorted(n for n in os.listdir(store / "history") if n != ".lock")


def write_events(path, trace: str, spans, **resource) -> None:
    """One process: spans are (name, begin s, end s or None), on the epoch above."""
    attributes = {"host.name": "node-0", "bootseer.rank": 0, "bootseer.gpu.count": 8} | resource
    lines = []

    def line(event, name, moment, span_id):
        lines.append(
            json.dumps(
                {
                    "v": 1, "event": event, "trace_id": trace, "span_id": span_id,
                    "parent_span_id": None, "name": name,
                    "time_unix_nano": EPOCH + int(moment * SECOND), "mono_nano": None,
                    "status": "ok", "attributes": attributes if event == "resource" else {},
                }
            )
        )  # fmt: skip

    begins = [begin for _, begin, _ in spans]
    line("resource", "resource", min(begins), f"{os.path.basename(path):>16}"[-16:])
    for number, (name, begin, end) in enumerate(spans):
        span_id = f"{trace[:4]}{number:012x}"
        if name == "first_step":
            line("point", name, begin, span_id)
            continue
        line("begin", name, begin, span_id)
        if end is not None:
            line("end", name, end, span_id)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
