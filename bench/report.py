"""Bench `report`: the report of 330k events, as a user runs it; seconds and peak bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import generate, harness

MEASURES = (
    "bootseer/profiler",
    "bootseer/cli/report.py",
    "bench/report.py",
    "bench/generate.py",
)
CASE = "330k events"


def _once(events: Path, page: Path) -> tuple[float, float]:
    """One `bootseer report` in a process of its own: (wall seconds, peak resident bytes)."""
    words = [sys.executable, "-m", "bootseer", "report", str(events), "--html", str(page)]
    began = time.perf_counter()
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {child.returncode}")
    return seconds, usage.ru_maxrss * 1024.0


def run(options: harness.Options) -> list[harness.Case]:
    """Generate one start, then report it once a round (one uncounted round first)."""
    size = generate.Options(nodes=64) if options.quick else generate.Options()
    name = CASE if not options.quick else f"{CASE} (quick: 1/16)"
    seconds: list[float] = []
    peaks: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as folder:
        generate.generate(Path(folder), size)
        for number in range(1 + options.runs):
            took_s, peak = _once(Path(folder) / "events", Path(folder) / "report.html")
            if number:
                seconds.append(took_s)
                peaks.append(peak)
    made = [
        harness.Case(name, harness.OURS, "s", "lower", seconds),
        harness.Case(name, harness.OURS, "bytes", "lower", peaks),
    ]
    return harness.under("page cache warm", made)
