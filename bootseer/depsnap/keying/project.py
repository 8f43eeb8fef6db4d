"""uv's projects: where one is described, its workspace, and the local packages that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from bootseer.depsnap.keying.pip_settings import text_of
from bootseer.regular_files import opener

_FILE_ADDRESS = r"@\s*file:(?://(?:localhost)?(?=/))?([^\s\"'#;]+)"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def joined(place: str, path: str) -> str:
    """The path of what is named in a directory. A `..` goes up from where a link leads to."""
    full = os.path.join(place, path)
    return os.path.realpath(full) if ".." in path.split("/") else os.path.normpath(full)


def upwards(cwd: str, name: str) -> str | None:
    """The nearest directory from `cwd` up that holds `name`."""
    here = cwd
    while True:
        if os.path.exists(os.path.join(here, name)):
            return here
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above


def workspace_of(project: str) -> str:
    """The root of the workspace that a project is a member of, where uv puts the environment.

    The project itself, where it is in none.
    """
    above = project
    while True:
        described = _described(above)
        workspace = described.get("tool", {}).get("uv", {}).get("workspace")
        if isinstance(workspace, dict):
            members, others = (_named(above, workspace.get(n)) for n in ("members", "exclude"))
            return above if project in members and project not in others else project
        higher = os.path.dirname(above)
        if higher == above or (above != project and "project" in described):
            return project
        above = higher


def members_of(workspace: str) -> list[str]:
    """The directories of a workspace's members, its root among them."""
    told = _described(workspace).get("tool", {}).get("uv", {}).get("workspace", {})
    if not isinstance(told, dict):
        return [workspace]
    members, others = (_named(workspace, told.get(name)) for name in ("members", "exclude"))
    return sorted({workspace, *members} - others)


def _named(root: str, patterns: object) -> set[str]:
    """Directories that a workspace's patterns mean."""
    import glob

    texts = [p for p in patterns if isinstance(p, str)] if isinstance(patterns, list) else []
    found = (p for t in texts for p in glob.glob(f"{glob.escape(root)}/{t}", recursive=True))
    return {os.path.normpath(path) for path in found}


def _described(folder: str) -> dict[str, Any]:
    """A directory's `pyproject.toml`; empty where there is none that can be read."""
    import tomllib

    try:
        with open(os.path.join(folder, "pyproject.toml"), "rb", opener=opener) as file:
            return tomllib.load(file)
    except (OSError, ValueError):
        return {}


def sources_of(folder: str) -> Iterator[tuple[str, bool]]:
    """Paths in a project's dependencies and `tool.uv.sources`, and whether these are editable."""
    text = text_of(os.path.join(folder, "pyproject.toml"))
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        for path in re.findall(_FILE_ADDRESS, text_of(os.path.join(folder, name))):
            yield joined(folder, path), False
    if "sources" not in text or not ("path" in text or "workspace" in text):
        return
    import tomllib  # few projects have such sources

    try:
        told = tomllib.loads(text).get("tool", {}).get("uv", {}).get("sources", {})
        sources = [one for v in told.values() for one in (v if isinstance(v, list) else [v])]
        paths = [(one["path"], bool(one.get("editable"))) for one in sources if "path" in one]
        members = any(one.get("workspace") for one in sources)
    except (ValueError, AttributeError, TypeError):
        return  # uv will say what is wrong with it
    yield from ((joined(folder, path), editable) for path, editable in paths)
    if members:
        root = workspace_of(folder)
        yield from ((path, True) for path in members_of(root) if path != folder)
