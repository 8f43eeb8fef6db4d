"""What runs in images with Python 3.9 is written for Python 3.9."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands.run import PACKAGE

NAMES = ["__init__", "__main__", "cli/__init__", "cli/event", "cli/program"]
NAMES += ["system/__init__", "system/file_lock", "system/paths", "system/readiness"]
NAMES += ["system/processes"]
NAMES += ["context_managers"]
NAMES += [
    f"entrypoint/{name}"
    for name in (
        *("__init__", "container_start", "exec_program", "output_tap", "run", "start_guard"),
        "start_unconfigured",
        "job_process",
    )
]
NAMES += [f"events/{name}" for name in ("__init__", "writer", "encoding", "resource", "redaction")]
NAMES += ["profiler/__init__", "profiler/events", "profiler/collect/__init__"]
NAMES += [f"profiler/collect/{name}" for name in ("import_hook", "pip_log")]
NAMES += [
    f"profiler/collect/log_rules/{name}"
    for name in ("__init__", "engine", "lines", "matcher_process", "rules")
]
NAMES += ["profiler/collect/private_pip_log"]
FILES = [PACKAGE / f"{name}.py" for name in NAMES]
FILES += sorted((PACKAGE / "profiler" / "collect" / "inject").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_syntax_is_python_39(file):
    ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 9))


def test_library_calls_are_python_39():
    vermin = str(Path(sys.executable).with_name("vermin"))
    done = subprocess.run(
        [vermin, "--no-tips", "--violations", "-t=3.9-", *map(str, FILES)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


def test_it_imports_only_its_own_set():
    """An import of a newer module would break it as surely as newer syntax."""
    allowed = {"bootseer." + n.replace("/__init__", "").replace("/", ".") for n in NAMES}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bootseer"):
                names = [f"{node.module}.{a.name}" for a in node.names]
                names = [n if n in allowed else node.module for n in names]
            for name in names:
                known = name in allowed or name in {
                    "bootseer",
                    "bootseer.cli.shared.hand_parsed_help",
                }
                # These reach the rest on newer Pythons only, after a check.
                late = {("start_guard.py", f"bootseer.{room}") for room in ("config", "entrypoint")}
                rooms = ("agent", "cli", "cli.deps", "cli.image")
                late |= {("__main__.py", f"bootseer.{room}") for room in rooms}
                assert known or (file.name, name) in late, (file, name)
