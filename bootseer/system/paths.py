"""Comparing paths by name."""

from __future__ import annotations

import os


def is_within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies below it; both absolute, or relative to the same place.

    The paths are normalised, but symbolic links are not resolved.
    """
    path, folder = _normal(path), _normal(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _normal(path: str) -> str:
    normal = os.path.normpath(path)
    return normal[1:] if normal.startswith("//") else normal  # POSIX keeps two leading slashes
