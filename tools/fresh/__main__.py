"""Prove README's commands on bare ground (`make fresh`): a Debian that never saw this project.

    python3 -m tools.fresh [--only STEP ...] [--keep] [--root DIR] [--logs DIR]

Makes Debian's smallest system (debootstrap; this machine's release) with `make`, `python3`,
`python3-venv` and `git`, enters it by pivot_root in mount and PID namespaces of its own, and runs
the steps there in a clone of the committed tree. Of the machine it sees /dev, /sys, the network,
and what pip's and apt's configuration names. A run of all steps writes `tests/fresh-result.txt`;
the exit code is 0 when all passed. Needs root and Debian's debootstrap.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from tools.fresh import result
from tools.fresh.configuration import read_configuration
from tools.fresh.root import HOMES, USER, BareRoot

TREE = Path(__file__).parents[2]
RESULT = TREE / "tests" / "fresh-result.txt"
BUNDLE = "committed.bundle"
LIMIT_S = 5400.0
NEEDED_BYTES = 25 << 30
ALL_TESTS = "make test PYTEST_ARGS=--forbid-deselect"
"""As `.ci/run` calls it: as root no test may be left out."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command of README as one user; `tests`: whether it ends with pytest's summary."""

    name: str
    command: str
    user: str
    tests: bool = False


STEPS = (
    Step("root-demo", "make demo", "root"),
    Step("root-test", ALL_TESTS, "root", tests=True),
    Step("root-k8s", "make k8s-test", "root", tests=True),
    Step("user-demo", "make demo", USER),
    Step("user-test", "make test", USER, tests=True),
)
GROUND = "debootstrap"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    given = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        _say("this needs root and Debian's package debootstrap")
        return 2
    logs = given.logs or Path(tempfile.mkdtemp(prefix="bootseer-fresh-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    folder = given.root or Path(tempfile.mkdtemp(prefix="bootseer-fresh-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    if shutil.disk_usage(folder).free < NEEDED_BYTES:
        _say(f"{folder} has less than {NEEDED_BYTES >> 30} GiB free")
        return 2
    if _git("status", "--porcelain"):
        _say("what is not committed is not part of this run")
    revision = _git("rev-parse", "HEAD")
    _say(f"revision {revision}; logs in {logs}; the root is {folder}")
    bundle = logs / BUNDLE
    _git("bundle", "create", str(bundle.resolve()), "HEAD")
    wanted = [step for step in STEPS if not given.only or step.name in given.only]
    lines = _run(BareRoot(folder, read_configuration(), keep=given.keep), wanted, logs)
    text = result.to_text(revision, lines, 1 + len(wanted))
    if wanted == list(STEPS) and given.root is None:
        RESULT.write_text(text, encoding="utf-8")
        _say(f"written: {RESULT}")
    last = result.from_text(text)[2]
    _say(last)
    return 0 if last == result.PASSED else 1


def _run(root: BareRoot, wanted: Sequence[Step], logs: Path) -> list[result.Line]:
    lines: list[result.Line] = []
    with root:
        begun = time.monotonic()
        with (logs / "ground.log").open("wb") as log:
            try:
                root.make(log)
                root.start()
                _clone(root, logs / BUNDLE, log)
            except (RuntimeError, OSError) as error:
                _say(f"{error}; see {log.name}")
                return [*lines, _told(GROUND, "root", result.FAILED, begun)]
        lines.append(_told(GROUND, "root", result.PASSED, begun))
        for number, step in enumerate(wanted, 1):
            lines.append(_one(root, step, logs / f"{number}-{step.name}.log"))
            for left in root.left_behind():
                _say(f"still running after it: {left[:200]}")
    return lines


def _clone(root: BareRoot, bundle: Path, log: BinaryIO) -> None:
    """Bring the committed tree, to both users."""
    shutil.copyfile(bundle, root.folder / "tmp" / BUNDLE)
    for user, home in HOMES.items():
        command = f"rm -rf bootseer && git clone -q /tmp/{BUNDLE} bootseer"
        if root.run(command, user, home, log, limit_s=LIMIT_S):
            raise RuntimeError(f"cannot clone the tree as {user}")


def _one(root: BareRoot, step: Step, path: Path) -> result.Line:
    _say(f"{step.command}, as {step.user}: {path}")
    begun = time.monotonic()
    with path.open("wb") as log:
        code = root.run(
            step.command, step.user, f"{HOMES[step.user]}/bootseer", log, limit_s=LIMIT_S
        )
    output = path.read_text(encoding="utf-8", errors="replace")
    counts = result.read_counts(output) if step.tests else None
    outcome = result.judge(code, counts, tests=step.tests)
    if outcome != result.PASSED:
        _say(f"exit code {code}; the end of {path}:\n{output[-2000:]}")
    return _told(step.command, step.user, outcome, begun, counts)


def _told(
    command: str, user: str, outcome: str, begun: float, counts: result.Counts | None = None
) -> result.Line:
    line = result.Line(command, user, outcome, round(time.monotonic() - begun), counts)
    _say(result.line_text(line))
    return line


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m tools.fresh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [step.name for step in STEPS]
    parser.add_argument(
        "--only",
        action="append",
        choices=[GROUND, *names],
        help="run these steps alone; writes no result",
    )
    parser.add_argument("--keep", action="store_true", help="leave the root for another run")
    parser.add_argument("--root", type=Path, help="where the root is or is made; writes no result")
    parser.add_argument("--logs", type=Path, help="a folder for the output of each step")
    return parser.parse_args(arguments)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=TREE, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def _end(number: int, _: FrameType | None) -> None:
    """Leave through the context manager, which cleans up."""
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(f"fresh: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
