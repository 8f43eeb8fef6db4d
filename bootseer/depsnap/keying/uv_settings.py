"""uv's settings files, as far as they decide where `uv pip` installs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from bootseer.depsnap.keying.pip_settings import machine_folders, user_folder

FOR_ALL = "/etc/uv/uv.toml"
_PLACES = re.compile(r"^\s*(?:pip\s*\.\s*)?(?:target|prefix|python|system)\s*=", re.MULTILINE)
_TABLE = re.compile(r"^\s*\[\s*tool\s*\.\s*uv\s*\.\s*pip\s*\](.*?)(?=^\s*\[|\Z)", re.M | re.S)


def files(environ: Mapping[str, str]) -> list[str]:
    """Settings for the machine and the user, and those of UV_CONFIG_FILE, there or not."""
    folders = [*machine_folders(environ), user_folder(environ)]
    out = [FOR_ALL, *(os.path.join(folder, "uv", "uv.toml") for folder in folders)]
    return [*out, *([environ["UV_CONFIG_FILE"]] if environ.get("UV_CONFIG_FILE") else [])]


def name_place(texts: Iterable[str], project: str) -> bool:
    """Whether texts of `uv.toml`s, or that of a `pyproject.toml`, say where `uv pip` installs."""
    tables = _TABLE.findall(project) if "tool.uv" in project.replace(" ", "") else []
    return any(map(_PLACES.search, (*texts, *tables)))
