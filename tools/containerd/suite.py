"""containerd's own suite for snapshotters, built once from Debian's Go sources.

The sources lie in /usr/share/gocode and build offline in GOPATH mode in under a minute; the
program is kept outside the clone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

GO = Path("/usr/lib/go-1.19/bin/go")
SOURCES = Path("/usr/share/gocode")
PACKAGE = "golang-github-containerd-containerd-dev"
_TEXT = Path(__file__).with_name("suite.go.txt")


def program() -> Path:
    """The suite as a Go test program; built first where this machine has none yet.

    Raises RuntimeError with the end of the compiler's output.
    """
    if not GO.is_file() or not (SOURCES / "src/github.com/containerd/containerd").is_dir():
        raise RuntimeError(f"the suite's sources are missing; install golang-1.19-go and {PACKAGE}")
    key = hashlib.sha256(_TEXT.read_bytes() + _version().encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = Path(base) / f"bootseer/containerd-suite-{key}"
    place.mkdir(parents=True, exist_ok=True)
    built = place / "suite.test"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_file():
            _build(place / "work", built)
    return built


def _version() -> str:
    """Which sources: another version of the package makes another program."""
    command = ["dpkg-query", "-W", "-f=${Version}", PACKAGE]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _build(work: Path, target: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    source = work / "go/src/suite"
    source.mkdir(parents=True)
    try:
        (source / "suite_test.go").write_bytes(_TEXT.read_bytes())
        done = subprocess.run(
            [str(GO), "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", f"{work}/out", "suite"],
            cwd=source,
            env={
                **os.environ,
                "PATH": f"{GO.parent}:{os.environ['PATH']}",
                "GOPATH": f"{work}/go:{SOURCES}",
                "GOCACHE": f"{work}/cache",
                "GO111MODULE": "off",
                "GOFLAGS": "",
                "GOPROXY": "off",
                "CGO_ENABLED": "0",
                "PWD": str(source),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"go failed ({done.returncode}): {done.stdout[-2000:]}")
        (work / "out").replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.stdout.write(f"{program()}\n")
