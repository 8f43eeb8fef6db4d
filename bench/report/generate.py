"""Make the events of one large start, and the truth about it in a separate file.

    python -m bench.report.generate OUT [--seed N] [--nodes N] [--ranks N] [--quiet-noise]

OUT/events holds one file a rank, as the event writer names and writes them, or with `--by-node` one
file a node with its ranks' events one after the other; OUT/truth.json what was put in, which the
report must find without seeing it. The start has 20 phases: 16 of work
and 4 barriers, all in every rank.

What is true here: every piece of work is its phase's base time, times log-normal noise (sigma
0.2 per rank), times the injected factors. All ranks still alive leave a barrier when the last of
them arrives, each up to some milliseconds late (exponential, mean 0.5 ms). Each node's wall clock
is off by its own skew of up to 4 s; monotonic clocks have arbitrary zeros and no drift. A killed
node stops in the middle of a phase, all ranks at the same moment, and the others go on without
it. Some of its files, and some of sound ranks, end in half a line. On some nodes the wall clock
is set back in mid-start.

A *straggler* is injected work that meets the definition as drawn: own work >= 1.5 x the phase's
median and >= 2 s above it, over nodes (a node's own work is the mean of its ranks without the
highest and the lowest) or, for a single slow rank, over ranks. What was injected but does not
meet it is listed under `below_definition`, and naming it is an error as well.

What is injected only where `Options` asks for it: single ranks less than 8 times slow
(`rank_factor_min`) and nodes less than twice as slow (`factor_min`). Over thousands of ranks with
this noise nobody can tell a rank twice as slow from the slowest ordinary ones, so the report counts
those instead of naming them (see `bootseer.profiler.report.stragglers`). One slow node also has its
wall clock set back; killed nodes are not slow ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
from pathlib import Path

PHASES: tuple[tuple[str, float], ...] = (  # name, base seconds; 0 = a barrier
    ("queue", 20.0),
    ("schedule", 2.0),
    ("image.pull", 40.0),
    ("container.start", 3.0),
    ("deps.install", 60.0),
    ("network.check", 5.0),
    ("dataset.index", 12.0),
    ("imports", 15.0),
    ("rendezvous", 0.0),
    ("nccl.init", 8.0),
    ("model.init", 20.0),
    ("barrier.model", 0.0),
    ("checkpoint.load", 50.0),
    ("optimizer.load", 25.0),
    ("barrier.checkpoint", 0.0),
    ("compile", 45.0),
    ("autotune", 10.0),
    ("warmup", 6.0),
    ("barrier.warmup", 0.0),
    ("first_step", 6.0),
)
BARRIERS = tuple(name for name, base_s in PHASES if not base_s)
_EPOCH_S = 1_700_000_000
_JITTER_S = 0.0005


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What to make.

    `node_sigma` is noise that all ranks of a node share in a phase. `slow_nodes` and `slow_ranks`
    count the slow ones, None as many as suits the size; a slow rank's node is not slow itself.
    Factors are by how much one takes longer. `by_node` joins the files of a node's ranks.
    """

    seed: int = 0
    nodes: int = 1024
    ranks: int = 8
    sigma: float = 0.2
    node_sigma: float = 0.0
    stragglers: bool = True
    faults: bool = True
    factor_min: float = 2.0
    factor_max: float = 6.0
    slow_nodes: int | None = None
    slow_ranks: int | None = None
    rank_factor_min: float = 8.0
    rank_factor_max: float = 15.0
    by_node: bool = False


@dataclasses.dataclass(slots=True)
class _Plan:
    """The draws of one start before it runs."""

    slow_nodes: dict[tuple[int, int], float]  # (node, phase) -> factor
    slow_ranks: dict[tuple[int, int, int], float]  # (node, rank, phase) -> factor
    killed: dict[int, int]  # node -> phase
    jumps: dict[int, float]  # node -> seconds the wall goes back
    skew_s: list[float]


@dataclasses.dataclass(slots=True)
class _Rank:
    """One rank as it ran: true times in seconds since the start's zero, per phase."""

    node: int
    local: int
    now_s: float
    begins: list[float]
    ends: list[float]
    own: list[float]


def _plan(options: Options, rng: random.Random) -> _Plan:
    work = [i for i, (_, base_s) in enumerate(PHASES) if base_s]
    slow = [i for i in work if PHASES[i][1] >= 4.0]
    plan = _Plan({}, {}, {}, {}, [rng.uniform(-4.0, 4.0) for _ in range(options.nodes)])
    names = list(range(options.nodes))
    rng.shuffle(names)
    few = max(1, options.nodes // 128)
    if options.faults:
        plan.killed = {names.pop(): rng.choice(work[2:]) for _ in range(few)}
        plan.jumps = {names.pop(): rng.uniform(1.0, 30.0) for _ in range(few)}
    if options.stragglers:
        low, high = math.log(options.factor_min), math.log(options.factor_max)
        count = max(2, options.nodes // 100) if options.slow_nodes is None else options.slow_nodes
        for _ in range(count):
            node = names.pop()
            for phase in rng.sample(slow, rng.choice((1, 1, 2))):
                plan.slow_nodes[node, phase] = math.exp(rng.uniform(low, high))
        lone = few if options.slow_ranks is None else options.slow_ranks
        for _ in range(lone if options.ranks >= 4 else 0):
            key = (names.pop(), rng.randrange(options.ranks), rng.choice(slow))
            factor = rng.uniform(options.rank_factor_min, options.rank_factor_max)
            plan.slow_ranks[key] = factor
    if options.faults and plan.slow_nodes:  # one of those whose wall is set back is slow too
        plan.jumps[min(plan.slow_nodes)[0]] = plan.jumps.popitem()[1]
    return plan


def _run(options: Options, plan: _Plan, rng: random.Random) -> tuple[list[_Rank], dict[int, float]]:
    """Let all ranks run through the phases; returns them and when each killed node died."""
    ranks = [
        _Rank(n, r, rng.expovariate(2.0), [], [], [])
        for n in range(options.nodes)
        for r in range(options.ranks)
    ]
    died: dict[int, float] = {}
    for index, (_, base_s) in enumerate(PHASES):
        alive = [rank for rank in ranks if rank.node not in died]
        shared = [math.exp(rng.gauss(0.0, options.node_sigma)) for _ in range(options.nodes)]
        opens_s = max(rank.now_s for rank in alive)
        for rank in alive:
            rank.begins.append(rank.now_s)
            if base_s:
                factor = plan.slow_nodes.get((rank.node, index), 1.0)
                factor *= plan.slow_ranks.get((rank.node, rank.local, index), 1.0)
                noise = math.exp(rng.gauss(0.0, options.sigma)) * shared[rank.node]
                rank.now_s += base_s * noise * factor
            else:
                rank.now_s = opens_s + rng.expovariate(1 / _JITTER_S)
            rank.own.append(rank.now_s - rank.begins[-1] if base_s else 0.0)
            rank.ends.append(rank.now_s)
            rank.now_s += 0.001 + rng.expovariate(1000.0)
        for node in (n for n, phase in plan.killed.items() if phase == index):
            # The fastest rank is in this phase then; others may still be in the one before.
            first = min((r for r in alive if r.node == node), key=lambda rank: rank.ends[-1])
            died[node] = first.ends[-1] - rng.uniform(0.1, 0.9) * first.own[-1]
    return ranks, died


def _node_own(values: list[float]) -> float:
    values = sorted(values)
    kept = values[1:-1] if len(values) >= 4 else values
    return statistics.fmean(kept)


def _node_name(node: int) -> str:
    return f"gpu-{node:04d}"


def _open_at_death(ranks: list[_Rank], node: int, died_s: float) -> dict[int, str]:
    """Which phase each local rank of a killed node was in; one just between two is absent."""
    return {
        rank.local: PHASES[index][0]
        for rank in ranks
        if rank.node == node
        for index, (begin_s, end_s) in enumerate(zip(rank.begins, rank.ends, strict=True))
        if begin_s < died_s <= end_s
    }


def _injected(
    options: Options, plan: _Plan, index: int, by_node: dict[int, list[float]]
) -> list[dict[str, object]]:
    """What was injected into one phase, with the own work and median that it came to."""
    nodes = {node: _node_own(values) for node, values in by_node.items()}
    node_median_s = statistics.median(nodes.values())
    rank_median_s = statistics.median(v for values in by_node.values() for v in values)
    out: list[dict[str, object]] = []

    def add(node: int, ranks: list[int], factor: float, own_s: float, median_s: float) -> None:
        numbers = [node * options.ranks + local for local in ranks]
        about = {"node": _node_name(node), "ranks": numbers, "phase": PHASES[index][0]}
        out.append({**about, "factor": factor, "own_s": own_s, "median_s": median_s})

    for (node, phase), factor in plan.slow_nodes.items():
        if phase == index:
            add(node, [], factor, nodes[node], node_median_s)
    for (node, local, phase), factor in plan.slow_ranks.items():
        if phase == index:
            add(node, [local], factor, by_node[node][local], rank_median_s)
    return out


def _is_straggler(entry: dict[str, object]) -> bool:
    """The definition, by what the work came to."""
    own_s, median_s = entry["own_s"], entry["median_s"]
    assert isinstance(own_s, float)
    assert isinstance(median_s, float)
    return own_s >= 1.5 * median_s and own_s >= median_s + 2.0


def _truth(
    options: Options, plan: _Plan, ranks: list[_Rank], died: dict[int, float]
) -> dict[str, object]:
    injected: list[dict[str, object]] = []
    opens_s: dict[str, float] = {}
    for index, (phase, base_s) in enumerate(PHASES):
        here = [rank for rank in ranks if index < len(rank.ends)]
        if not base_s:
            arrivals = [(r.begins[index], died.get(r.node, math.inf)) for r in here]
            opens_s[phase] = max(at_s for at_s, died_s in arrivals if at_s < died_s)
            continue
        by_node: dict[int, list[float]] = {}
        for rank in here:
            if rank.ends[index] < died.get(rank.node, math.inf):
                by_node.setdefault(rank.node, []).append(rank.own[index])
        injected += _injected(options, plan, index, by_node)
    first_s = min(rank.begins[0] for rank in ranks)
    return {
        **dataclasses.asdict(options),
        "stragglers": [entry for entry in injected if _is_straggler(entry)],
        "below_definition": [entry for entry in injected if not _is_straggler(entry)],
        "killed": {_node_name(node): _open_at_death(ranks, node, at) for node, at in died.items()},
        "clock_jumps": {_node_name(n): s for n, s in plan.jumps.items()},
        "skew_s": {_node_name(n): s for n, s in enumerate(plan.skew_s)},
        "duration_s": max(r.ends[-1] for r in ranks if r.node not in died) - first_s,
        "first_event_s": first_s,
        "barriers": opens_s,
    }


class _Files:
    """Writes one event file a rank, with its node's clocks."""

    def __init__(self, options: Options, plan: _Plan, died: dict[int, float], out: Path) -> None:
        self._options, self._plan, self._died, self._out = options, plan, died, out
        self._rng = random.Random(options.seed + 1_000_003)
        self._trace = f"{self._rng.getrandbits(128):032x}"
        self._boots = [f"{self._rng.getrandbits(128):032x}" for _ in range(options.nodes)]
        self._zero_ns = [self._rng.randrange(10**15) for _ in range(options.nodes)]
        self._jump_at = {node: self._rng.uniform(60.0, 200.0) for node in plan.jumps}
        self.torn: list[str] = []

    def _times(self, node: int, moment_s: float) -> tuple[int, int]:
        passed_ns = round(moment_s * 1e9)
        wall_ns = _EPOCH_S * 10**9 + passed_ns + round(self._plan.skew_s[node] * 1e9)
        if node in self._jump_at and moment_s >= self._jump_at[node]:
            wall_ns -= round(self._plan.jumps[node] * 1e9)
        return wall_ns, self._zero_ns[node] + passed_ns

    def _resource(self, rank: _Rank) -> dict[str, object]:
        return {
            "service.name": "train",
            "k8s.node.name": _node_name(rank.node),
            "host.name": _node_name(rank.node),
            "process.pid": 100 + rank.local,
            "bootseer.rank": rank.node * self._options.ranks + rank.local,
            "bootseer.local_rank": rank.local,
            "bootseer.world_size": self._options.nodes * self._options.ranks,
            "bootseer.attempt": 0,
            "bootseer.start.kind": "first",
            "bootseer.job_uid": f"job-{self._options.seed}",
            "bootseer.boot_id": self._boots[rank.node],
            "bootseer.gpu.count": self._options.ranks,
        }

    def write(self, rank: _Rank) -> None:
        """Write one rank's file, cut off where its node died."""
        node = rank.node
        prefix = f"{self._rng.getrandbits(40):010x}"

        def line(kind: str, span: int, name: str, at_s: float, text: str) -> str:
            wall_ns, mono_ns = self._times(node, at_s)
            return (
                f'{{"v":1,"event":"{kind}","trace_id":"{self._trace}","span_id":"{prefix}'
                f'{span:06x}","parent_span_id":null,"name":"{name}","time_unix_nano":{wall_ns},'
                f'"mono_nano":{mono_ns},"status":"ok","attributes":{text}}}\n'
            )

        opened_s = rank.begins[0] - 0.0001
        lines = [line("resource", 0, "resource", opened_s, json.dumps(self._resource(rank)))]
        died_s = self._died.get(node, math.inf)
        for index, (begin_s, end_s) in enumerate(zip(rank.begins, rank.ends, strict=True)):
            name, base_s = PHASES[index]
            if begin_s < died_s:
                text = "{}" if base_s else '{"bootseer.wait":true}'
                lines.append(line("begin", index + 1, name, begin_s, text))
            if end_s < died_s:
                lines.append(line("end", index + 1, name, end_s, "{}"))
        path = self._out / f"{_node_name(node)}-{100 + rank.local}-{prefix}.jsonl"
        if self._options.faults and self._rng.random() < (0.5 if died_s < math.inf else 0.002):
            half = line("point", 99, "step", min(died_s, rank.ends[-1]), "{}")
            lines.append(half[: self._rng.randrange(5, len(half) - 2)])
            self.torn.append(path.name)
        if not self._options.by_node:
            path.write_text("".join(lines), encoding="ascii")
            return
        # Half a line at the end of a rank's events stays a line of its own.
        whole = "".join(lines)
        with open(self._out / f"{_node_name(node)}.jsonl", "a", encoding="ascii") as file:
            file.write(whole if whole.endswith("\n") else whole + "\n")


def generate(out: Path, options: Options) -> dict[str, object]:
    """Write `out`/events and `out`/truth.json; return the truth. `out`/events must not exist."""
    rng = random.Random(options.seed)
    plan = _plan(options, rng)
    ranks, died = _run(options, plan, rng)
    events = out / "events"
    events.mkdir(parents=True)
    files = _Files(options, plan, died, events)
    for rank in ranks:
        files.write(rank)
    truth = {**_truth(options, plan, ranks, died), "torn": files.torn}
    (out / "truth.json").write_text(json.dumps(truth, indent=1), encoding="utf-8")
    return truth


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report.generate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sigma", type=float, default=0.2)
    parser.add_argument("--node-sigma", type=float, default=0.0)
    parser.add_argument("--no-stragglers", action="store_true", help="noise alone")
    parser.add_argument("--no-faults", action="store_true", help="no kills, torn lines, jumps")
    parser.add_argument("--by-node", action="store_true", help="one file a node")
    arguments = parser.parse_args()
    options = Options(
        seed=arguments.seed,
        nodes=arguments.nodes,
        ranks=arguments.ranks,
        sigma=arguments.sigma,
        node_sigma=arguments.node_sigma,
        stragglers=not arguments.no_stragglers,
        faults=not arguments.no_faults,
        by_node=arguments.by_node,
    )
    truth = generate(arguments.out, options)
    files = sum(1 for _ in os.scandir(arguments.out / "events"))
    print(f"{files} files in {arguments.out}/events; truth in {arguments.out}/truth.json")
    del truth
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
