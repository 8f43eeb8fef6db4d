"""The names of file traces in their directory or store: by image and workload."""

from __future__ import annotations

import contextlib
import os
import re

from bootseer.errors import UsageError
from bootseer.imageprefetch.workloads import file_name

FOLDER = "files"
SUFFIX = ".files"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# What depends on an image's layers and is not changed by a start.
_CHARACTERISTIC = (
    "/etc/os-release",
    "/usr/bin",
    "/usr/lib",
    "/usr/local/bin",
    "/usr/local/lib",
    "/opt",
    "/usr/local/lib/python*/site-packages",
    "/usr/lib/python3/dist-packages",
)


def check_image(name: str) -> str:
    """Return an image's name as objects use it (`sha256:…` becomes `sha256-…`), or UsageError."""
    plain = name.replace(":", "-").replace("/", "_").replace("@", "-")
    if not _IMAGE.fullmatch(plain):
        raise UsageError(f"{name[:120]!r} cannot name an image's traces; give its digest")
    return plain


def image_here() -> str:
    """A name for the image in which this process runs, the same on every node.

    It is made from the times of directories of its layers and of its release file. It only keeps
    the traces of different images apart: what is read ahead is checked file by file.
    """
    import glob
    import hashlib

    digest = hashlib.sha256()
    for pattern in _CHARACTERISTIC:
        for path in sorted(glob.glob(pattern)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                digest.update(f"{path} {int(status.st_mtime)}\n".encode())
    return f"here-{digest.hexdigest()[:32]}"


def object_name(image: str, workload: str) -> str:
    """The object that holds a workload's trace. Raises UsageError for invalid names."""
    return f"{FOLDER}/{check_image(image)}/{file_name(workload)}{SUFFIX}"


def local_path(place: str, image: str, workload: str) -> str | None:
    """The file of a workload's trace in a directory; None for any other store."""
    return None if ":" in place else f"{place}/{object_name(image, workload)}"
