"""Run the long counts (`make soak`) and keep their dated result in `tests/soak-result.txt`."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "tests" / "soak-result.txt"


def main() -> int:
    command = [sys.executable, "-m", "pytest", "--soak", "-q", "--durations=0", *sys.argv[1:]]
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    ).stdout.strip()
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(run.stdout)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    header = f"make soak, {when}, revision {revision}, Python {platform.python_version()}, "
    header += f"kernel {platform.release()}\n\n"
    RESULT.write_text(header + run.stdout.replace(str(ROOT), "."), encoding="utf-8")
    return run.returncode


if __name__ == "__main__":
    raise SystemExit(main())
