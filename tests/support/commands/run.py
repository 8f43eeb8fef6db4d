"""What the wrapper's tests share: running it, and reading what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

BOOTSEER = [sys.executable, "-m", "bootseer"]
PACKAGE = ROOT / "bootseer"


def wrapped(*command: str, options: tuple[str, ...] = ()) -> list[str]:
    return [*BOOTSEER, "run", *options, "--", *command]


def clean_env(**more: str) -> dict[str, str]:
    """This process's environment without anything that steers us."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BOOTSEER_", "OTEL_"))}
    return {**env, **more}


def run(command: list[str], events: Path | None = None, **kwargs) -> subprocess.CompletedProcess:
    env = kwargs.pop("env", clean_env())
    if events is not None:
        env = {**env, "BOOTSEER_EVENTS": str(events)}
    return subprocess.run(command, env=env, capture_output=True, timeout=60, **kwargs)


def lines(path: Path) -> list[dict]:
    """All events below a directory, or of one file; fails on any line that is not strict JSON."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    out = []
    for file in files:
        out += [json.loads(line.decode("ascii")) for line in file.read_bytes().splitlines()]
    return out


def named(path: Path, name: str, kind: str | None = None) -> list[dict]:
    return [e for e in lines(path) if e["name"] == name and kind in (None, e["event"])]
