"""Disks that fill up soon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size (a number with k or m) at a new folder, until the block ends.

    Raises AssertionError where something uses it then; it is taken away all the same.
    """
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        if subprocess.run(["umount", folder], check=False).returncode:
            subprocess.run(["umount", "-l", folder], check=True)
            raise AssertionError(f"something still uses {folder}")
