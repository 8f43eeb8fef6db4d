"""Bench `report`: the report of large starts, as a user runs it; seconds and peak bytes.

duckdb's side is the pairing and the percentiles alone (see `report_duckdb`), which is the least
that any report of these events must do.
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

from bench import generate, harness

MEASURES = (
    "bootseer/profiler",
    "bootseer/cli/report.py",
    "bench/report.py",
    "bench/report_duckdb.py",
    "bench/generate.py",
)
PEER = "duckdb"
CASES = {
    "330k events": generate.Options(),
    "65,536 ranks": generate.Options(nodes=8192, by_node=True),
}
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
    sides = {harness.OURS: lambda: _once(["bootseer", "report", events, "--html", page])}
    if importlib.util.find_spec("duckdb"):
        sides[PEER] = lambda: _once(["bench.report_duckdb", events])
    else:
        print("duckdb is not installed: its side is missing", file=sys.stderr)
    return sides


def _case(name: str, folder: Path, rounds: int) -> list[harness.Case]:
    """Both sides in turn, after one round that does not count."""
    found: dict[str, list[tuple[float, float]]] = {}
    sides = _sides(folder)
    for number in range(1 + rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            figures = sides[side]()
            if number:
                found.setdefault(side, []).append(figures)
    made = []
    for unit, place in (("s", 0), ("bytes", 1)):
        values = {side: [each[place] for each in found[side]] for side in sides}
        made += harness.cases_of(name, values, unit=unit)
    return made


def run(options: harness.Options) -> list[harness.Case]:
    """Generate each start, then report it once a round."""
    made: list[harness.Case] = []
    for case, size in CASES.items():
        name = case
        if options.quick:
            name = f"{case} (quick: 1/{_QUICK})"
            size = generate.Options(nodes=size.nodes // _QUICK, by_node=size.by_node)  # noqa: PLW2901
        with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as folder:
            generate.generate(Path(folder), size)
            about = "terminal and HTML; page cache warm; peak of the largest process"
            about += f"; {os.cpu_count()} processors; a file a {'node' if size.by_node else 'rank'}"
            made += harness.under(about, _case(name, Path(folder), options.runs))
    return made
