"""What `bootseer run -- /bin/true` costs beside a plain exec and a bare interpreter.

Measured with bootseer installed into fresh virtual environments, as a user has it: by the pip
that this Python bundles (`run -- true`; run it with Python 3.11, the oldest that we support) and
by uv (`run -- true, uv`). Each value is the median wall time of a few starts, in seconds;
PYTHONDONTWRITEBYTECODE is unset, events are written to a fresh directory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from bench import harness

ROOT = Path(__file__).parent.parent
MEASURES = (
    "bootseer/__init__.py",
    "bootseer/__main__.py",
    "bootseer/entrypoint",
    "bootseer/events",
    "scripts/bootseer",
    "scripts/bootseer-python",
    "pyproject.toml",
    "bench/wrapper.py",
)
TRUE = shutil.which("true") or "/bin/true"
CASES = {"run -- true": "pip", "run -- true, uv": "uv"}  # by installer


def copy_source(folder: Path) -> Path:
    """Copy what an installer needs, so that no build's leftovers in the tree take part."""
    folder.mkdir()
    for name in ("bootseer", "scripts", "pyproject.toml", "README.md", "LICENSE"):
        origin = ROOT / name
        if origin.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(origin, folder / name, ignore=ignored)
        else:
            shutil.copy(origin, folder / name)
    return folder


def install(installer: str, folder: Path, source: Path, *, editable: bool = False) -> Path:
    """Install the package into a new virtual environment; return its folder of programs.

    `pip` is the one bundled with this Python, `uv` the one of this environment. What the build
    needs is fetched by pip for both: uv reads nothing of pip's settings, such as certificates.
    """
    with_pip = [] if installer == "pip" else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *with_pip, folder], check=True)
    python = str(folder / "bin" / "python")
    if installer == "pip":
        command = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    else:
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", python]
        command += ["--compile-bytecode"]  # as pip does, not at each side's first start
        command += ["--no-index", "--find-links", str(fetch_build_requirements(folder, source))]
    command += ["--quiet", "--no-deps", *(["-e"] if editable else []), str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return folder / "bin"


def fetch_build_requirements(folder: Path, source: Path) -> Path:
    """Download what `[build-system]` of the source names into a folder of wheels; return it."""
    with open(source / "pyproject.toml", "rb") as file:
        names = tomllib.load(file)["build-system"]["requires"]
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--dest", str(wheels), *names]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return wheels


def sides_of(programs: Path) -> dict[str, list[str]]:
    """The commands that are compared, of one installation."""
    python = str(programs / "python")
    return {
        harness.OURS: [str(programs / "bootseer"), "run", "--", TRUE],
        "python -m bootseer": [python, "-m", "bootseer", "run", "--", TRUE],
        "plain exec": [TRUE],
        "bare interpreter": [python, "-c", "pass"],
    }


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
    """A case for each installer, its sides interleaved."""
    starts = 5 if options.quick else 21
    cases: list[harness.Case] = []
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as name:
        source = copy_source(Path(name) / "source")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "BOOTSEER_"))}
        env["BOOTSEER_EVENTS"] = str(Path(name) / "events")
        for case, installer in CASES.items():
            sides = sides_of(install(installer, Path(name) / installer, source))
            values = harness.interleave(
                {
                    side: lambda command=command: start_seconds(command, env, starts)  # type: ignore[misc]
                    for side, command in sides.items()
                },
                rounds=options.runs,
            )
            conditions = f"installed by {version_of(installer, sides)}; page cache warm"
            cases += harness.cases_of(case, values, unit="s", conditions=conditions)
    return cases


def version_of(installer: str, sides: dict[str, list[str]]) -> str:
    """The installer with its version."""
    python = sides["bare interpreter"][0] if installer == "pip" else sys.executable
    words = [python, "-m", installer, "--version"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return " ".join(done.stdout.split()[:2])
