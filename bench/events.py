"""What one event costs, in microseconds, and how many lines tear when processes share a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import harness
from bootseer import events

MEASURES = (
    "bootseer/events",
    "bench/events.py",
)
PROCESSES, APPENDS = 8, 5000
ATTRIBUTES = {"bootseer.source": "phase", "bootseer.bytes": 123456}
APPENDER = """
import sys
from bootseer import events
writer = events.open_writer(sys.argv[1])
for number in range(int(sys.argv[2])):
    writer.point("p", attributes={"number": number, "text": "x" * (number % 400)})
"""


def event_us(folder: str, count: int) -> float:
    """Return the mean cost of a point with two attributes."""
    with events.open_writer(folder, {}) as writer:
        began = time.perf_counter()
        for _ in range(count):
            writer.point("model.init", attributes=ATTRIBUTES)
        return (time.perf_counter() - began) / count * 1e6


def json_us(folder: str, count: int) -> float:
    """Return the cost of the plain way: `json.dumps` of the same fields and one `os.write`."""
    path = os.path.join(folder, "plain.jsonl")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        began = time.perf_counter()
        for number in range(count):
            event = {"v": 1, "event": "point", "trace_id": "a" * 32, "span_id": f"{number:016x}"}
            event |= {"parent_span_id": None, "name": "model.init"}
            event |= {"time_unix_nano": time.time_ns(), "mono_nano": time.monotonic_ns()}
            event |= {"status": "ok", "attributes": ATTRIBUTES}
            os.write(fd, json.dumps(event, separators=(",", ":")).encode() + b"\n")
        return (time.perf_counter() - began) / count * 1e6
    finally:
        os.close(fd)
        os.unlink(path)


def bash_us(folder: str, count: int) -> float:
    """Return the cost of `bootseer_point` in bash."""
    library = Path(events.__file__).with_name("bootseer.sh")
    script = f"""
. {library}
bootseer_point warm
began=${{EPOCHREALTIME/[.,]/}}
for ((i = 0; i < {count}; i++)); do bootseer_point model.init; done
echo $((${{EPOCHREALTIME/[.,]/}} - began))
"""
    env = {**os.environ, "BOOTSEER_EVENTS": folder}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, check=True)
    return int(done.stdout) / count


def torn_lines(folder: str) -> float:
    """Return how many lines of 8 processes x 5,000 appends to one file are broken or missing."""
    path = os.path.join(folder, "shared.jsonl")
    command = [sys.executable, "-c", APPENDER, path, str(APPENDS)]
    running = [subprocess.Popen(command) for _ in range(PROCESSES)]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("an appender failed")
    whole = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                whole += json.loads(line)["event"] == "point"
            except ValueError:
                continue
    os.unlink(path)
    return float(PROCESSES * APPENDS - whole)


def run(options: harness.Options) -> list[harness.Case]:
    """Cost of an event by three ways, then torn lines."""
    count = 5_000 if options.quick else 50_000
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as folder:
        values = harness.interleave(
            {
                harness.OURS: lambda: event_us(folder, count),
                "json.dumps and one write": lambda: json_us(folder, count),
                "bootseer.sh in bash": lambda: bash_us(folder, count // 25),
            },
            rounds=options.runs,
        )
        torn = [torn_lines(folder) for _ in range(options.runs)]
    cases = harness.cases_of("one event", values, unit="us")
    name = f"{PROCESSES} processes x {APPENDS} appends"
    made = [*cases, harness.Case(name, harness.OURS, "torn lines", "lower", torn)]
    return harness.under("events on the temporary directory's file system", made)
