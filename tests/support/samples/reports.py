"""Hand-made reports for the renderers' tests: small ones by hand, large ones from a seed."""

from __future__ import annotations

import random
import statistics

from bootseer.profiler.report import before_after as c
from bootseer.profiler.report import model as m

PHASES = (
    ("queue", 31.0, 0.0),
    ("image.pull", 42.0, 0.15),
    ("container.start", 1.4, 0.1),
    ("deps.install", 64.0, 0.12),
    ("imports", 9.5, 0.08),
    ("rendezvous", 0.3, 0.1),
    ("model.init", 6.0, 0.05),
    ("checkpoint.load", 38.0, 0.1),
    ("first_step", 7.2, 0.03),
)
WAITING = "rendezvous"


def start(**changes) -> m.StartSummary:
    values = {
        "trace_id": "5f" * 16,
        "kind": "first",
        "job_uid": "train-7b",
        "attempt": 0,
        "began_unix_s": 1_790_000_000.0,
        "duration_s": 212.4,
        "complete": True,
        "unreached": 0,
        "nodes": 1,
        "processes": 1,
        "ranks": 1,
        "gpus": 8,
        "events": 60,
    }
    return m.StartSummary(**(values | changes))


def empty(**changes) -> m.Report:
    """A start of which next to nothing was observed."""
    summary = start(duration_s=0.0, complete=False, gpus=None, ranks=0, events=1)
    values = {
        "version": "0.1.0",
        "start": summary,
        "starts": (summary,),
        "problems": (),
        "phases": (),
        "not_observed": m.STANDARD_PHASES,
        "nodes": (),
        "skew": m.SkewSummary(None, 0, 0.0, 0.0, 0),
        "barriers": (),
        "critical_path": (),
        "heat_map": m.HeatMap((), (), (), ()),
        "stragglers": (),
        "gpu_hours": m.GpuHours(0.0, 0.0, 0.0, 0.0, 0, False, ()),
        "what_if": (),
        "killed": (),
        "incidents": (),
    }
    return m.Report(**(values | changes))


def sample(nodes: int = 16, *, seed: int = 1, prefix: str = "node", **changes) -> m.Report:
    """A plausible start: two barriers, one slow install, one slow checkpoint read."""
    rng = random.Random(seed)
    names = tuple(f"{prefix}-{i:04d}" for i in range(nodes))
    own = [[median * rng.lognormvariate(0, sigma) for _, median, sigma in PHASES] for _ in names]
    slow: list[tuple[int, int]] = []
    if nodes > 1:
        slow = [(nodes // 3, 3), (nodes * 2 // 3, 7)]
    for node, phase in slow:
        own[node][phase] *= 2.1
    install = PHASES.index(PHASES[5])
    arrive = [sum(row[:install]) for row in own]
    barrier_s = max(arrive)
    wait = [[None] * len(PHASES) for _ in names]
    for i, at in enumerate(arrive):
        wait[i][install] = barrier_s - at
    steps, at = [], 0.0
    late = max(range(nodes), key=lambda i: arrive[i])
    last = max(range(nodes), key=lambda i: sum(own[i][install:]))
    for j, (phase, _, _) in enumerate(PHASES):
        node = late if j < install else last
        median = statistics.median(row[j] for row in own)
        if phase == "imports":
            steps.append(
                m.CriticalStep(at, at + 3.1, names[node], node * 8, None, False, None, "r")
            )
            at += 3.1
        if phase == "first_step":
            steps.append(
                m.CriticalStep(at, at + 2.6, names[node], node * 8, phase, True, 0.4, None)
            )
            at += 2.6
        end = at + own[node][j]
        steps.append(m.CriticalStep(at, end, names[node], node * 8, phase, False, median, None))
        at = end
    summary = start(
        duration_s=at,
        nodes=nodes,
        processes=nodes * 8,
        ranks=nodes * 8,
        gpus=nodes * 8,
        events=nodes * 8 * 40,
    )
    stragglers = tuple(
        m.Straggler(names[i], (i * 8, i * 8 + 1), PHASES[j][0], own[i][j],
                    statistics.median(r[j] for r in own), PHASES[j][1] * 1.5)
        for i, j in slow
    )  # fmt: skip
    hours = at * nodes * 8 / 3600
    values = {
        "version": "0.1.0",
        "start": summary,
        "starts": (summary, start(trace_id="ab" * 16, duration_s=260.0, kind="restart")),
        "problems": (m.Problem("events/host-12.jsonl", "torn-line", 1, "the last line is cut"),),
        "phases": phase_stats(own, wait, nodes),
        "not_observed": ("schedule", "compile"),
        "nodes": tuple(
            m.NodeSummary(name, 8, 8, sum(own[i]), wait[i][install], 3.1, at - rng.random(), 0,
                          rng.gauss(0, 0.02), 0.001)
            for i, name in enumerate(names)
        ),
        "skew": m.SkewSummary(names[0], 2, 0.0471, 0.0021, 1 if nodes > 1 else 0),
        "barriers": (
            m.Barrier("rendezvous", 0, nodes * 8, barrier_s, names[late], late * 8, "deps.install",
                      barrier_s - statistics.median(arrive), nodes * 120.0),
        ),
        "critical_path": tuple(steps),
        "heat_map": m.HeatMap(
            names, tuple(p for p, _, _ in PHASES),
            tuple(map(tuple, own)), tuple(map(tuple, wait)),
        ),
        "stragglers": stragglers,
        "gpu_hours": m.GpuHours(
            hours, hours * 0.66, hours * 0.31, hours * 0.03, nodes * 8, False,
            (*(m.PhaseGpuHours(p, hours * s / 220, hours * 0.31 if p == WAITING else 0.0)
               for p, s, _ in PHASES), m.PhaseGpuHours(None, hours * 0.03, 0.0)),
        ),
        "what_if": (
            m.WhatIf("phase", "deps.install", "removed", at - 71.0, 71.0),
            m.WhatIf("phase", "image.pull", "removed", at - 42.0, 42.0),
            m.WhatIf("node", names[late], "median", at - 33.0, 33.0),
            m.WhatIf("phase", "deps.install", "median", at - 31.0, 31.0),
        ),
        "killed": (m.Killed(names[-1], nodes * 8 - 1, "first_step", at - 5, "events/x.jsonl"),),
        "incidents": (
            m.Incident("fallback", "deps.install", "the snapshot did not match its digest",
                       3, names[:3], 40.0),
            m.Incident("error", "image.pull", "TimeoutError", 1, names[:1], 12.0),
        ),
        "parts": {"deps": m.PartUse(True, ""), "image": m.PartUse(False, "not configured")},
        "emulated": ("the link's speed (1 Gbit/s)",),
    }  # fmt: skip
    return m.Report(**(values | changes))


def phase_stats(own, wait, nodes) -> tuple[m.PhaseStats, ...]:
    rows, at = [], 0.0
    for j, (name, median, _) in enumerate(PHASES):
        values = sorted(row[j] for row in own)
        waits = [w for row in wait if (w := row[j]) is not None]
        p50 = statistics.median(values)
        rows.append(
            m.PhaseStats(
                name, None, nodes, nodes * 8, p50, values[int(0.9 * (nodes - 1))],
                values[int(0.99 * (nodes - 1))], values[-1], values[-1] / p50,
                statistics.median(waits) if waits else None, max(waits, default=None),
                at, at + values[-1], 0, 0, 3 if name == "deps.install" else 0,
                1_440_000_000 if name == "deps.install" else None, 0,
            )
        )  # fmt: skip
        if name == "deps.install":
            for part, share in (("download", 0.3), ("install", 0.6)):
                rows.append(
                    m.PhaseStats(
                        f"deps.install.{part}", name, nodes, nodes * 8, p50 * share, p50 * share,
                        p50 * share, p50 * share, 1.0, None, None, at, at + p50 * share, 0, 0, 0,
                        None, 0,
                    )
                )  # fmt: skip
        at += median
    return tuple(rows)


def comparison(*, claim: bool = True) -> c.Comparison:
    """Three starts a side; or a refused claim with one on the candidate's."""
    phases = {
        "deps.install": c.Spread(3, 64.0, 61.0, 70.0),
        "imports": c.Spread(3, 9.5, 9.0, 9.9),
    }
    faster = {
        "deps.install": c.Spread(3, 4.0, 3.8, 4.9),
        "imports": c.Spread(3, 9.4, 9.0, 9.9),
    }
    baseline = c.Side(3, 212.0, 205.0, 230.0, phases)
    if not claim:
        return c.Comparison(
            baseline, c.Side(1, 150.0, 150.0, 150.0, faster), False, None, None, None, 0.9, None,
            (c.PhaseSpeedup("deps.install", None),),
            "No claim: the candidate side has 1 complete start, at least 3 are needed.",
        )  # fmt: skip
    return c.Comparison(
        baseline, c.Side(3, 151.0, 149.0, 156.0, faster), True, 1.404, 1.31, 1.54, 0.9, 0.1,
        (c.PhaseSpeedup("deps.install", 16.0), c.PhaseSpeedup("imports", 1.01)),
        "1.40 times faster (median of 3 against 3 starts).",
    )  # fmt: skip
