"""The stargz snapshotter's server, built once from Debian's Go sources and kept outside the clone.

A peer in the image bench, and a lazily loading snapshotter for tests of file mode. Debian's
package `stargz-snapshotter` holds only `ctr-remote`, which pulls and optimises.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

GO = Path("/usr/lib/go-1.19/bin/go")
SOURCES = Path("/usr/share/gocode")
SOURCE = Path(__file__).with_name("main.go")
_NEEDED = SOURCES / "src/github.com/containerd/stargz-snapshotter"


def program() -> Path:
    """Where `stargzd` is; built first (about a minute) where this machine has none yet.

    Raises RuntimeError naming the Debian packages that are missing, or with the compiler's words.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "bootseer/stargz"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"stargzd-{digest}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _build(folder, target)
    return target


def _build(folder: Path, target: Path) -> None:
    if not GO.is_file() or not _NEEDED.is_dir():
        raise RuntimeError(
            "install Debian's golang-1.19-go and golang-github-containerd-stargz-snapshotter-dev"
        )
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    environ = {
        **os.environ,
        "PATH": f"{GO.parent}:{os.environ['PATH']}",
        "HOME": str(work),
        "GOPATH": f"{work}/go:{SOURCES}",
        "GOCACHE": f"{work}/gocache",
        "GOTMPDIR": str(work),
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "GOPROXY": "off",
        "CGO_ENABLED": "0",
    }
    made = work / "stargzd"
    command = [str(GO), "build", "-trimpath", "-ldflags", "-s -w", "-o", str(made), "."]
    try:
        done = subprocess.run(
            command, cwd=SOURCE.parent, env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"stargzd does not build: {done.stderr[-2000:]}")
        made.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
