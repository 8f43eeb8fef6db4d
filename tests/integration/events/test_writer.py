"""Events of many processes in one file."""

from __future__ import annotations

import subprocess
import sys

from tests.support.commands.run import lines


def append_all(target: str, processes: int, count: int) -> None:
    code = f"""
import sys
from bootseer import events
writer = events.open_writer({target!r})
for i in range({count}): writer.point("p", attributes={{"i": i, "text": "z" * (i % 500)}})
"""
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    assert [p.wait(120) for p in running] == [0] * processes


def test_eight_processes_append_to_one_file_without_a_torn_line(tmp_path):
    target = tmp_path / "all.jsonl"
    append_all(str(target), 8, 5000)
    seen: dict[str, set[int]] = {}
    for event in lines(target):
        if event["event"] == "point":
            seen.setdefault(event["span_id"][:10], set()).add(event["attributes"]["i"])
    assert len(seen) == 8
    assert all(numbers == set(range(5000)) for numbers in seen.values())
