"""A start of the image alone, as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_it_is_told_like_any_other_and_the_job_gets_its_place(tmp_path: Path) -> None:
    (tmp_path / "bootseer.toml").write_text('[image]\ntraces = "/proc/none"\n', encoding="utf-8")
    command = [sys.executable, "-m", "bootseer", "start", "--events", str(tmp_path / "events")]
    started = subprocess.Popen(
        [*command, "--", "sh", "-c", "echo $$ $BOOTSEER_TRACEPARENT; exit 7"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    out = started.communicate()[0].split()
    assert started.returncode == 7
    assert out[0] == str(started.pid)
    texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "events").glob("*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    begun = next(line for line in lines if line["name"] == "start")
    assert begun["trace_id"] == out[1].split("-")[1]
