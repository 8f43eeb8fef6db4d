"""Paths compared by their names."""

from __future__ import annotations

import os


def is_within(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies below it; both absolute, or relative to one place.

    By their names alone: slashes too many, "." and ".." count for nothing, and no link is
    followed, which is up to the caller.
    """
    path, folder = _normal(path), _normal(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _normal(path: str) -> str:
    normal = os.path.normpath(path)
    return normal[1:] if normal.startswith("//") else normal  # POSIX lets two slashes lead
