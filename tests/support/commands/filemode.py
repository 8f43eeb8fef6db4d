"""Files whose place in the page cache is known, and file mode run as another user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bootseer
from bootseer.blocks.extents import Extent
from bootseer.imageprefetch.filemode.mincore import ResidencyProbe

PAGE = 4096
PYTHON = "/usr/bin/python3"
"""Unlike a virtual environment's, any user may run it."""
AS_NOBODY = (
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--no-new-privs",
    "--pdeathsig=KILL",
)


def cold(path: Path, size_bytes: int) -> Path:
    """A file of random bytes of which nothing is in memory."""
    path.write_bytes(os.urandom(size_bytes))
    os.utime(path, (1_000_000_000, 1_000_000_000))
    evict(path)
    return path


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def resident(path: Path) -> list[Extent]:
    """Which pages of a file are in memory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return ResidencyProbe().resident(fd, path.stat().st_size)
    finally:
        os.close(fd)


READER = """
import os, sys, time
def read(path, *pages):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # not a page more than asked for
    for page in pages:
        os.pread(fd, 100, page * 4096 + 7)
    os.close(fd)
"""


def reader(code: str, python: str = sys.executable) -> list[str]:
    """A command that runs `code`, in which `read(path, *pages)` makes exactly these pages come."""
    return [python, "-c", READER + code]


def everybodys(directory: Path) -> Path:
    """The package and what it needs, where any user can read it."""
    site = directory / "site"
    site.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for module in ("bootseer", "click", "zstandard", "xxhash"):
        found = bootseer if module == "bootseer" else __import__(module)
        assert found.__file__ is not None
        shutil.copytree(Path(found.__file__).parent, site / module, ignore=ignored)
    for folder, _, _ in os.walk(directory):
        os.chmod(folder, 0o755)
    return site


def as_nobody(site: Path, words: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run `bootseer WORDS` as user 65534, who can never gain a privilege."""
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*AS_NOBODY, PYTHON, "-m", "bootseer", *map(str, words)],
        env=environ,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
