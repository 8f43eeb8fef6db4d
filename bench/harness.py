"""What every benchmark shares: interleaved sides, ratios within rounds, one result file.

A result file is `{name, when, machine, cases, ratios}`; `values` are one figure a round, sides
of a round run back to back, so a ratio is taken pairwise within rounds and survives a machine
whose speed drifts. A ratio above 1 means that our side is better.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"
OURS = "ours"
Better = Literal["lower", "higher"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """`runs` is the number of counted rounds; `quick` asks for small inputs and few rounds."""

    quick: bool
    runs: int


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """All counted values of one side in one case, one a round, in rounds' order."""

    case: str
    side: str
    unit: str
    better: Better
    values: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Ours against a peer, pairwise within rounds; above 1 = ours better."""

    case: str
    ours: str
    peer: str
    median: float
    min: float
    max: float


def interleave(
    sides: Mapping[str, Callable[[], float]], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Run each side once a round (`warmup` uncounted rounds first); return values by side.

    The order of the sides turns by one each round, so that no side always follows the same one.
    """
    names = list(sides)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = sides[name]()
            if number >= warmup:
                values[name].append(value)
    return values


def cases_of(
    case: str, values: Mapping[str, list[float]], *, unit: str, better: Better = "lower"
) -> list[Case]:
    """Wrap `interleave`'s result."""
    return [Case(case, side, unit, better, list(v)) for side, v in values.items()]


def ratios_of(cases: Sequence[Case]) -> list[Ratio]:
    """Ours against every other side of the same case and unit."""
    out = []
    for ours in (c for c in cases if c.side == OURS):
        for peer in cases:
            if peer.case != ours.case or peer.unit != ours.unit or peer.side == OURS:
                continue
            pairs = list(zip(ours.values, peer.values, strict=True))
            each = [p / o if ours.better == "lower" else o / p for o, p in pairs]
            if each:
                ratio = Ratio(
                    ours.case, OURS, peer.side, statistics.median(each), min(each), max(each)
                )
                out.append(ratio)
    return out


def machine() -> dict[str, object]:
    """What the figures were measured on; no host name, no path."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "arch": platform.machine(),
    }


def save(name: str, cases: Sequence[Case], *, command: str) -> Path:
    """Write `bench/results/NAME.json` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    document = {
        "name": name,
        "when": when,
        "command": command,
        "machine": machine(),
        "cases": [dataclasses.asdict(c) for c in cases],
        "ratios": [dataclasses.asdict(r) for r in ratios_of(cases)],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def keep(name: str, cases: Sequence[Case], *, names: Sequence[str], command: str) -> Path:
    """Put cases into `bench/results/NAME.json` in place of what was told of the same ones.

    `names` are all cases in their order; what is told of one bears its name, or begins with it.
    """
    path = RESULTS / f"{name}.json"
    held = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []

    def number(case: Case) -> int:
        fitting = [n for n in names if case.case == n or case.case.startswith(f"{n} ")]
        return names.index(max(fitting, key=len)) if fitting else len(names)

    new = {number(case) for case in cases}
    kept = [case for case in (Case(**each) for each in held) if number(case) not in new]
    return save(name, sorted([*kept, *cases], key=number), command=command)


def table(cases: Sequence[Case]) -> str:
    """A Markdown table of medians with spread, then of ratios."""
    lines = ["| case | side | median | min | max | n | unit |", "|---|---|---|---|---|---|---|"]
    for c in cases:
        if c.values:
            figures = (statistics.median(c.values), min(c.values), max(c.values))
            shown = " | ".join(f"{f:.4g}" for f in figures)
            lines.append(f"| {c.case} | {c.side} | {shown} | {len(c.values)} | {c.unit} |")
    ratios = ratios_of(cases)
    if ratios:
        lines += ["", "| case | ours against | ratio | min | max |", "|---|---|---|---|---|"]
        lines += [
            f"| {r.case} | {r.peer} | {r.median:.2f} | {r.min:.2f} | {r.max:.2f} |" for r in ratios
        ]
    return "\n".join(lines)
