"""What every benchmark shares: interleaved sides, ratios within rounds, one result file.

A result file is `{name, machine, cases, ratios}`. A case holds one side's `values`, one figure a
round, and its own stamps: `when` it was measured, of which git `revision` of the measured code
(with `-dirty` where that code was not committed), by which `command`, and under which
`conditions`. Sides of a round run back to back, so a ratio is taken pairwise within rounds and
survives a machine whose speed drifts. A ratio above 1 means that our side is better. A side that
takes minutes may be measured in the first rounds alone: its ratios are of these.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from bench import memory, revisions

RESULTS = Path(__file__).parent / "results"
OURS = "ours"
UNLESS_TOLD = {"depsnap": "page cache dropped before every side"}
"""What holds for those cases of a benchmark that name no conditions themselves."""
Better = Literal["lower", "higher"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """`runs` is the number of counted rounds; `quick` asks for small inputs and few rounds."""

    quick: bool
    runs: int


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """All counted values of one side in one case, one a round, in rounds' order.

    A stamp that is empty is filled in when the case is written. `conditions` says what else
    decides the figure and does not stand in the names: `no agent; link 1 Gbit/s, 1 ms`.
    """

    case: str
    side: str
    unit: str
    better: Better
    values: list[float]
    when: str = ""
    revision: str = ""
    command: str = ""
    conditions: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Ours against a peer; above 1 = ours better.

    `median`, `min` and `max` are of the ratios taken pairwise within rounds; `of_medians` is the
    ratio of the two sides' medians.
    """

    case: str
    ours: str
    peer: str
    median: float
    min: float
    max: float
    unit: str = ""
    of_medians: float = 0.0


def interleave(
    sides: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warmup: int = 1,
    at_most: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Run each side once a round (`warmup` uncounted rounds first); return values by side.

    The order of the sides turns by one each round, so that no side always follows the same one.
    `at_most` names sides that are counted in no more than so many rounds, the first ones.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmup + rounds):
        counted = number - warmup
        names = [name for name in sides if counted < (at_most or {}).get(name, rounds)]
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = sides[name]()
            if number >= warmup:
                values[name].append(value)
    return values


def cases_of(
    case: str,
    values: Mapping[str, list[float]],
    *,
    unit: str,
    better: Better = "lower",
    conditions: str | Mapping[str, str] = "",
) -> list[Case]:
    """Wrap `interleave`'s result; `conditions` hold for all sides, or are given by side."""
    when = now()
    by_side = dict.fromkeys(values, conditions) if isinstance(conditions, str) else conditions
    return [
        Case(case, side, unit, better, list(v), when=when, conditions=by_side.get(side, ""))
        for side, v in values.items()
    ]


def under(conditions: str, cases: Sequence[Case]) -> list[Case]:
    """The same cases, with these conditions ahead of those that they name already."""
    return [
        dataclasses.replace(c, conditions="; ".join(filter(None, (conditions, c.conditions))))
        for c in cases
    ]


def ratios_of(cases: Sequence[Case]) -> list[Ratio]:
    """Ours against every other side of the same case, unit and run of the benchmark."""
    out = []
    for ours in (c for c in cases if c.side == OURS and c.values):
        for peer in cases:
            if (peer.case, peer.unit) != (ours.case, ours.unit) or peer.side == OURS:
                continue
            same_run = (peer.revision, peer.command) == (ours.revision, ours.command)
            if not same_run or not peer.values:
                continue
            if len(peer.values) > len(ours.values):
                raise ValueError(f"{peer.case}: {peer.side} has rounds that ours has not")
            mine = ours.values[: len(peer.values)]
            pairs = list(zip(mine, peer.values, strict=True))
            pairs.append((statistics.median(mine), statistics.median(peer.values)))
            *each, of_medians = [p / o if ours.better == "lower" else o / p for o, p in pairs]
            spread = (statistics.median(each), min(each), max(each))
            out.append(Ratio(ours.case, OURS, peer.side, *spread, ours.unit, of_medians))
    return out


def machine() -> dict[str, object]:
    """What the figures were measured on; no host name, no path."""
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(size_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "arch": platform.machine(),
        "free_memory": "given back to the host" if memory.is_given_back() else "kept",
    }


def now() -> str:
    """The time as a result file has it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line(module: str, words: Sequence[str]) -> str:
    """How `bench.MODULE` was called, as a result file has it; our programs' `main` asks early.

    Places of this machine stand as DIR. It also takes the revision of the tree, so that it is that
    of the start of the measurement.
    """
    revisions.current(module)
    shown = [re.sub("^(--[a-z-]+=)?/.*", r"\1DIR", word) for word in words]
    return f"python -m bench.{module} {shlex.join(shown)}"


def path_of(name: str, *, quick: bool = False) -> Path:
    """Where a benchmark's result file is; that of a quick run is not committed."""
    return RESULTS / "quick" / f"{name}.json" if quick else RESULTS / f"{name}.json"


def load(path: Path) -> tuple[dict[str, object], list[Case]]:
    """The machine and the cases of a result file; no cases where there is no file."""
    if not path.exists():
        return {}, []
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["machine"], [Case(**case) for case in document["cases"]]


def save(name: str, cases: Sequence[Case], *, command: str, quick: bool = False) -> Path:
    """Write a result file of these cases alone and return its path."""
    path = path_of(name, quick=quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    revision, when = revisions.current(name), now()
    stamped = [
        dataclasses.replace(
            case,
            when=case.when or when,
            revision=case.revision or revision,
            command=case.command or command,
            conditions=case.conditions or UNLESS_TOLD.get(name, ""),
        )
        for case in cases
    ]
    document = {
        "name": name,
        "machine": machine(),
        "cases": [dataclasses.asdict(c) for c in stamped],
        "ratios": [dataclasses.asdict(r) for r in ratios_of(stamped)],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def keep(
    name: str, cases: Sequence[Case], *, names: Sequence[str], command: str, quick: bool = False
) -> Path:
    """Put cases into a result file in place of older figures of the same ones.

    `names` are all cases in their order; figures of one bear its name, or begin with it. Cases
    that were not measured now keep their figures and their stamps; where those are of another
    machine, their conditions say of which.
    """
    measured_on, held = load(path_of(name, quick=quick))

    def number(case: Case) -> int:
        fitting = [n for n in names if case.case == n or case.case.startswith((f"{n} ", f"{n}:"))]
        return names.index(max(fitting, key=len)) if fitting else len(names)

    new = {number(case) for case in cases}
    kept = [case for case in held if number(case) not in new]
    if measured_on != machine():
        kept = under(f"another machine ({describe(measured_on)})", kept)
    return save(name, sorted([*kept, *cases], key=number), command=command, quick=quick)


def describe(about: Mapping[str, object]) -> str:
    """A machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in about.items())


def table(cases: Sequence[Case]) -> str:
    """A Markdown table of medians with spread, then of ratios, as a run of a benchmark shows it."""
    lines = ["| case | side | median | min | max | n | unit |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {c.case} | {c.side} | {figures(c)} |" for c in cases if c.values]
    ratios = ratios_of(cases)
    if ratios:
        lines += ["", "| case | unit | ours against | ratio | min | max | of medians |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| {r.case} | {r.unit} | {r.peer} | {r.median:.2f} | {r.min:.2f} | {r.max:.2f} "
            f"| {r.of_medians:.2f} |"
            for r in ratios
        ]
    return "\n".join(lines)


def figures(case: Case) -> str:
    """Median, least, most, number of rounds and unit, as cells of a Markdown table."""
    spread = (statistics.median(case.values), min(case.values), max(case.values))
    return " | ".join([*(f"{f:.4g}" for f in spread), str(len(case.values)), case.unit])
