"""What `bootseer run -- /bin/true` costs beside a plain exec and a bare interpreter.

Measured with bootseer installed into a fresh virtual environment, as a user has it: the console
script of an editable install would pay for its import finder. Each value is the median wall time
of a few starts, in seconds; PYTHONDONTWRITEBYTECODE is unset, events are written to a fresh
directory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import harness

ROOT = Path(__file__).parent.parent
MEASURES = (
    "bootseer/__init__.py",
    "bootseer/__main__.py",
    "bootseer/cli/__init__.py",
    "bootseer/cli/main.py",
    "bootseer/entrypoint",
    "bootseer/profiler/events.py",
    "bootseer/profiler/resource.py",
    "pyproject.toml",
    "bench/wrapper.py",
)
TRUE = shutil.which("true") or "/bin/true"


def install(folder: Path) -> Path:
    """Install the package into a new virtual environment; return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    source = folder / "source"
    for name in ("bootseer", "pyproject.toml", "README.md", "LICENSE"):
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif origin.exists():
            shutil.copy(origin, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
    ]
    command += ["--disable-pip-version-check", str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return folder / "bin"


def start_seconds(command: list[str], env: dict[str, str], starts: int) -> float:
    """Return the median wall time of some starts of a command, from spawn to reaped."""
    values = []
    for _ in range(starts):
        began = time.perf_counter()
        pid = os.posix_spawn(command[0], command, env)
        status = os.waitpid(pid, 0)[1]
        values.append(time.perf_counter() - began)
        if status:
            raise RuntimeError(f"{command[0]} ended with wait status {status}")
    return statistics.median(values)


def run(options: harness.Options) -> list[harness.Case]:
    """One case, three sides, interleaved."""
    starts = 5 if options.quick else 21
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as name:
        programs = install(Path(name) / "venv")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "BOOTSEER_"))}
        env["BOOTSEER_EVENTS"] = str(Path(name) / "events")
        python, script = str(programs / "python"), str(programs / "bootseer")
        sides = {
            harness.OURS: [script, "run", "--", TRUE],
            "plain exec": [TRUE],
            "bare interpreter": [python, "-c", "pass"],
        }
        values = harness.interleave(
            {
                side: lambda command=command: start_seconds(command, env, starts)  # type: ignore[misc]
                for side, command in sides.items()
            },
            rounds=options.runs,
        )
    return harness.cases_of("run -- true", values, unit="s")
