"""uv's settings files, as far as they decide where `uv pip` installs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from bootseer.depsnap.key.pip_settings import machine_folders, text_of, user_folder
from bootseer.depsnap.key.uv_config import parsed, table

FOR_ALL = "/etc/uv/uv.toml"
_PLACES = ("target", "prefix", "python", "torch-backend")
_VERSIONS = (".python-version", ".python-versions")


def files(environ: Mapping[str, str]) -> list[str]:
    """Settings for the machine and the user, and those of UV_CONFIG_FILE, there or not."""
    folders = [*machine_folders(environ), user_folder(environ)]
    out = [FOR_ALL, *(os.path.join(folder, "uv", "uv.toml") for folder in folders)]
    return [*out, *([environ["UV_CONFIG_FILE"]] if environ.get("UV_CONFIG_FILE") else [])]


def versions(environ: Mapping[str, str]) -> list[str]:
    """Where the user's wish for a version of Python may stand for all projects."""
    return [os.path.join(user_folder(environ), "uv", name) for name in _VERSIONS]


def above(place: str) -> list[str]:
    """What uv may heed of a directory and those above it: settings, and wishes for a Python.

    uv itself takes the nearest, or the workspace's; whichever it is, it is among them.
    """
    found = []
    here = place
    while True:
        names = (*_VERSIONS, "uv.toml", "pyproject.toml")
        paths = [path for name in names if os.path.exists(path := os.path.join(here, name))]
        found += [p for p in paths if not p.endswith("pyproject.toml") or _has_settings(p)]
        if os.path.dirname(here) == here:
            return found
        here = os.path.dirname(here)


def _has_settings(path: str) -> bool:
    text = text_of(path)
    if "uv" not in text:
        return False
    told = parsed(text)
    return told is None or "uv" in table(told, "tool")


def name_place(paths: Iterable[str]) -> bool:
    """Whether any of these files says where `uv pip` installs."""
    return any(map(_names_place, paths))


def _names_place(path: str) -> bool:
    text = text_of(path)
    if "pip" not in text:
        return False
    told = parsed(text)
    if told is None:
        return True
    named = ("tool", "uv") if os.path.basename(path) == "pyproject.toml" else ()
    of_pip = table(told, *named, "pip")
    return any(name in of_pip for name in _PLACES) or of_pip.get("system") is True
