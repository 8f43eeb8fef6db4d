"""Bench `report`: the report of large starts, as a user runs it; seconds and peak bytes.

A case that ends in `json` is of `--json`, the others of the terminal with `--html`; of one start
all sides take turns, so that both cases have the same rounds of the peer.

duckdb's side is the pairing and the percentiles alone (see `bench.report.duckdb_peer`), which is
the least that any report of these events must do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import harness
from bench.report import generate

MEASURES = (
    "bootseer/cli/report/report.py",
    "bootseer/profiler",
    "bench/report/benchmark.py",
    "bench/report/duckdb_peer.py",
    "bench/report/generate.py",
)
PEER = "duckdb"
STARTS = {
    "330k events": generate.Options(),
    "65,536 ranks": generate.Options(nodes=8192, by_node=True),
}
JSON = ", json"
CASES = tuple(f"{start}{output}" for start in STARTS for output in ("", JSON))
_QUICK = 16  # times fewer nodes


def _once(words: list[str]) -> tuple[float, float]:
    """A command in a process of its own: (wall seconds, peak resident bytes of its largest
    process)."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {child.returncode}")
    return seconds, usage.ru_maxrss * 1024.0


def _sides(folder: Path) -> dict[str, Callable[[], tuple[float, float]]]:
    events, page = str(folder / "events"), str(folder / "report.html")
    sides = {
        harness.OURS: lambda: _once(["bootseer", "report", events, "--html", page]),
        JSON: lambda: _once(["bootseer", "report", events, "--json"]),
    }
    if importlib.util.find_spec("duckdb"):
        sides[PEER] = lambda: _once(["bench.report.duckdb_peer", events])
    else:
        print("duckdb is not installed: its side is missing", file=sys.stderr)
    return sides


def _measured(folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """All sides of one start in turn, after one round that does not count."""
    found: dict[str, list[tuple[float, float]]] = {}
    sides = _sides(folder)
    for number in range(1 + rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            figures = sides[side]()
            if number:
                found.setdefault(side, []).append(figures)
    return found


def _cases(
    name: str, conditions: str, found: dict[str, list[tuple[float, float]]]
) -> list[harness.Case]:
    """What is told of one start: of each output, ours against the peer."""
    peer = {PEER: found[PEER]} if PEER in found else {}
    outputs = {"": ("terminal and HTML", harness.OURS), JSON: ("JSON", JSON)}
    made = []
    for output, (what, side) in outputs.items():
        for unit, place in (("s", 0), ("bytes", 1)):
            both = {harness.OURS: found[side], **peer}
            values = {each: [figures[place] for figures in both[each]] for each in both}
            cases = harness.cases_of(f"{name}{output}", values, unit=unit)
            made += harness.under(f"{what}; {conditions}", cases)
    return made


def run(options: harness.Options) -> list[harness.Case]:
    """Generate each start, then report it once a round."""
    made: list[harness.Case] = []
    for name, size in STARTS.items():
        if options.quick:
            size = generate.Options(nodes=size.nodes // _QUICK, by_node=size.by_node)  # noqa: PLW2901
        with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as folder:
            generate.generate(Path(folder), size)
            about = "page cache warm; peak of the largest process"
            about += f"; {os.cpu_count()} processors; a file a {'node' if size.by_node else 'rank'}"
            about += f"; quick: 1/{_QUICK} of the nodes" if options.quick else ""
            made += _cases(name, about, _measured(Path(folder), options.runs))
    return made
