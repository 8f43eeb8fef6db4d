"""One start of the job, plainly or through bootseer, and what its events say about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bootseer import events
from tools.demo.lab import Lab
from tools.machine import drop_page_cache

Kind = Literal["plain", "record", "fresh", "second"]
LABELS: dict[Kind, str] = {
    "plain": "plain install, then the job",
    "record": "bootseer, snapshot not there yet",
    "fresh": "bootseer, fresh node",
    "second": "bootseer, second start on a node",
}


@dataclass(frozen=True, slots=True)
class Start:
    """A start that ended. `output` is what the job printed; `wall_s` runs from before its launch
    to its first step, as the events say, `exit_code` is that of the whole command."""

    kind: Kind
    events: Path
    exit_code: int
    output: str
    wall_s: float | None

    @property
    def restores(self) -> bool:
        """Whether a snapshot had to be restored."""
        return self.kind in ("fresh", "second")

    def ends(self, name: str) -> list[dict[str, Any]]:
        """Attributes of every span of that name that ended."""
        lines = _lines(self.events)
        return [e["attributes"] for e in lines if e["name"] == name and e["event"] == "end"]

    def fallbacks(self) -> list[str]:
        """Reasons of everything that fell back."""
        found = [e for e in _lines(self.events) if e["status"] == "fallback"]
        told = [(e["attributes"], e["name"]) for e in found]
        return [a.get("bootseer.reason") or a.get("error.message") or name for a, name in told]


def launch(lab: Lab, kind: Kind, number: int, config: Path) -> Start:
    """Start the job once, its events in a directory of their own."""
    place = lab.events / f"{kind}-{number}"
    environ = _environment(lab, kind, number, place)
    log = lab.logs / f"{kind}-{number}.log"
    if lab.options.cold:
        drop_page_cache()
    ours = [sys.executable, "-m", "bootseer"]
    with open(log, "wb") as errors:
        environ |= _launched(environ)
        if kind == "plain":
            run = [*ours, "run", "--phase", "deps.install", "--", *lab.install]
            done = subprocess.run(run, env=environ, stdout=errors, stderr=errors, check=False)
            if done.returncode:
                return Start(kind, place, done.returncode, _tail(log), None)
            fetch = lab.place.fetch(lab.fetched)
            if fetch:
                run = [*ours, "run", "--phase", "checkpoint.load", "--", *fetch]
                subprocess.run(run, env=environ, stdout=errors, stderr=errors, check=True)
            command = lab.train(plain=True)
        else:
            command = [*ours, "start", "-c", str(config), "--", *lab.train(plain=False)]
        job = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    output = job.stdout if job.returncode == 0 else _tail(log)
    return Start(kind, place, job.returncode, output, _first_step_s(place))


def settle(start: Start, limit_s: float = 120.0) -> bool:
    """Wait until a snapshot that is published in the background is there; False: it never came."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        ended = [e for e in _lines(start.events) if e["name"] == "deps.publish"]
        if any(e["event"] == "end" for e in ended):
            return all(e["status"] != "fallback" for e in ended)
        time.sleep(0.1)
    return False


def _environment(lab: Lab, kind: Kind, number: int, place: Path) -> dict[str, str]:
    # Neither the caller's settings nor an unusual Python shall decide what is measured.
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("BOOTSEER_", "PYTHON"))}
    ours |= {"BOOTSEER_EVENTS": str(place), "BOOTSEER_JOB_UID": f"demo-{kind}-{number}"}
    ours |= {"PYTHONPATH": str(lab.modules), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return ours


def _launched(environ: dict[str, str]) -> dict[str, str]:
    """Mark the moment of launch, so that our own start-up is counted as part of the start.

    Returns what makes all that follows part of this trace. It also keeps a container's age out
    of it: the demonstration may run in a container that has been there for hours.
    """
    with events.open_writer(None, environ) as writer:
        writer.point("launch")
        return events.child_environment(writer, None, environ)


def _first_step_s(place: Path) -> float | None:
    lines = _lines(place)
    begin = [e["time_unix_nano"] for e in lines if e["name"] == "launch"]
    end = [e["time_unix_nano"] for e in lines if e["name"] == "first_step" and e["event"] == "end"]
    return float(end[0] - begin[0]) / 1e9 if begin and end else None


def _lines(place: Path) -> list[dict[str, Any]]:
    files = sorted(place.glob("*.jsonl"))
    texts = (file.read_text(encoding="utf-8") for file in files)
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]
