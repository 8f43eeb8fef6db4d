"""A start without settings: as with them, only without loading what reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = "import os, sys; print(sorted(n for n in os.environ if n[:9] == 'BOOTSEER_')); sys.exit(3)"


def start(
    folder: Path, *options: str, python: tuple[str, ...] = (), **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    events = folder / "events"
    clean = {name: value for name, value in os.environ.items() if name[:9] != "BOOTSEER_"}
    command = [sys.executable, *python, "-m", "bootseer", "start", *options]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", JOB],
        cwd=folder,
        env={**clean, "BOOTSEER_EVENTS": str(events), "BOOTSEER_JOB_UID": "j", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted(events.rglob("*.jsonl"))]
    for path in events.rglob("*.jsonl"):
        path.unlink()
    return done, [json.loads(line) for text in texts for line in text.splitlines()]


def told(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(e["event"], e["name"], e["status"]) for e in lines if e["name"] != "container.start"]


def test_it_tells_and_starts_what_the_whole_start_does(tmp_path: Path) -> None:
    bare, bare_lines = start(tmp_path)
    whole, whole_lines = start(tmp_path, "--set", "job.attempt=0")
    assert bare.returncode == whole.returncode == 3
    assert bare.stdout == whole.stdout
    assert told(bare_lines) == told(whole_lines)
    assert ("point", "start", "ok") in told(bare_lines)
    (point,) = [e for e in bare_lines if e["name"] == "start"]
    assert point["attributes"]["bootseer.command"][0] == sys.executable


def test_it_loads_no_settings(tmp_path: Path) -> None:
    done, _ = start(tmp_path, python=("-X", "importtime"))
    assert "bootseer.entrypoint.start_unconfigured" in done.stderr
    assert "bootseer.config.loading" not in done.stderr
    assert " dataclasses" not in done.stderr


@pytest.mark.parametrize("how", ["file", "option", "variable", "config variable"])
def test_settings_from_anywhere_are_followed(tmp_path: Path, how: str) -> None:
    install = [sys.executable, "-c", "open('installed', 'w')"]
    text = f"[deps]\nenabled = false\ninstall = {json.dumps(install)}\n"
    options: tuple[str, ...] = ()
    variables = {}
    if how == "file":
        (tmp_path / "bootseer.toml").write_text(text, encoding="utf-8")
    elif how == "variable":
        script = tmp_path / "install.py"
        script.write_text("open('installed', 'w')", encoding="ascii")
        variables["BOOTSEER_DEPS_INSTALL"] = f"{sys.executable} {script}"
        variables["BOOTSEER_DEPS_ENABLED"] = "false"
    else:
        (tmp_path / "other.toml").write_text(text, encoding="utf-8")
        if how == "option":
            options = ("-c", "other.toml")
        else:
            variables["BOOTSEER_CONFIG"] = "other.toml"
    done, _ = start(tmp_path, *options, **variables)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "installed").exists()


def test_events_that_cannot_be_written_cost_nothing(tmp_path: Path) -> None:
    done, _ = start(tmp_path, "--events", "/proc/nowhere")
    assert done.returncode == 3
    assert "BOOTSEER_JOB_UID" in done.stdout


def test_a_job_that_is_not_there_has_the_shells_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bootseer", "start", "--", "/no/such/program"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "/no/such/program" in done.stderr
