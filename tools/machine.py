"""What the demonstration does to, and asks of, the machine it runs on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import xxhash

from bootseer.blockimage.serve.image_server import KEEP_FREE
from bootseer.errors import NoSpaceError

NEEDED_BYTES = 4 << 30
"""Measured: 3.4 GB at most, between one start and the next, on top of what set-up made."""
_DROP_CACHES = "/proc/sys/vm/drop_caches"


def drop_page_cache() -> bool:
    """Empty the page cache as a fresh node's is; False when we may not."""
    try:
        os.sync()
        with open(_DROP_CACHES, "w", encoding="ascii") as file:
            file.write("3\n")
    except OSError:
        return False
    return True


def require_space(path: Path, *, images: bool = False) -> None:
    """Raise NoSpaceError when the demonstration would fill the disk, or image caches keep nothing.

    `images`: whether there are such caches; they leave a part of every disk to others.
    """
    disk = shutil.disk_usage(path)
    needed = NEEDED_BYTES + (int(disk.total * KEEP_FREE) if images else 0)
    if disk.free < needed:
        left = f", for image caches leave {KEEP_FREE:.0%} of a disk to others" if images else ""
        raise NoSpaceError(
            f"{path} has {disk.free >> 20} MiB free, the demo needs {needed >> 20}{left}; "
            "free space or name another place with --scratch"
        )


def remove(path: Path) -> None:
    """Remove a tree, read-only directories (an unprivileged user's shared tree) included."""
    for folder, folders, _ in os.walk(path):
        for name in folders:
            below = os.path.join(folder, name)
            if not os.path.islink(below):
                os.chmod(below, os.lstat(below).st_mode | 0o700)
    shutil.rmtree(path, ignore_errors=True)


def fingerprint(root: Path) -> dict[str, tuple[object, ...]]:
    """Every entry below `root`: kind, mode, and symlink text, or size, mtime and digest.

    Directories carry no mtime: Python writing a cache beside them would change it.
    """
    out: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            relative = os.path.relpath(path, root)
            if os.path.islink(path):
                out[relative] = ("link", os.readlink(path))
            elif os.path.isdir(path):
                out[relative] = ("directory", status.st_mode)
            else:
                digest = _digest(path)
                out[relative] = ("file", status.st_mode, status.st_size, status.st_mtime_ns, digest)
    return out


def contents(entries: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """What two separate installs must agree on: all but times, and bytecode that embeds them."""
    return {
        path: (*entry[:3], *entry[4:]) if entry[0] == "file" else entry
        for path, entry in entries.items()
        if not path.endswith(".pyc")
    }


def without_write_bits(entries: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """The same with every mode's write permission taken away."""
    return {
        path: (entry[0], entry[1] & ~0o222, *entry[2:]) if isinstance(entry[1], int) else entry
        for path, entry in entries.items()
    }


def differences(
    first: dict[str, tuple[object, ...]], second: dict[str, tuple[object, ...]]
) -> list[str]:
    """Paths that are not the same on both sides."""
    return sorted(
        path for path in first.keys() | second.keys() if first.get(path) != second.get(path)
    )


def _digest(path: str) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
