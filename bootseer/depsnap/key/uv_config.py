"""uv's projects: where one is described, its workspace, and the local packages that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from bootseer.depsnap.key.pip_settings import text_of
from bootseer.errors import UsageError

_FILE_ADDRESS = r"@\s*(file:[^\s\"';]+|\{root[^\s\"';]*)"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def joined(place: str, path: str) -> str:
    """The path of what is named in a directory. A `..` goes up from where a link leads to."""
    full = os.path.join(place, path)
    return os.path.realpath(full) if ".." in path.split("/") else os.path.normpath(full)


def path_of(name: str) -> str | None:
    """The path of a list that is named by it or by a `file:` URL; None for what is elsewhere."""
    if name[:5].lower() != "file:":
        return None if "://" in name or "\0" in name else name
    path = re.split("[?#]", name[5:])[0]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            return None
        path = slash + rest
    if "%" in path:
        from urllib.parse import unquote  # few names are quoted

        path = unquote(path)
    return None if "\0" in path else path  # which names no file


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
        workspace = table(described, "tool", "uv", "workspace")
        if "workspace" in table(described, "tool", "uv"):
            members, others = (_named(above, workspace.get(n)) for n in ("members", "exclude"))
            return above if project in members and project not in others else project
        higher = os.path.dirname(above)
        if higher == above or (above != project and "project" in described):
            return project
        above = higher


def wanted_python(folder: str) -> str:
    """What a project and its workspace's members require of Python; "" where none is described."""
    project = upwards(folder, "pyproject.toml")
    if project is None:
        return ""
    places = dict.fromkeys((project, *members_of(workspace_of(project))))
    wishes = (table(_described(place), "project").get("requires-python") for place in places)
    return " ".join(wish for wish in wishes if isinstance(wish, str))


def members_of(workspace: str) -> list[str]:
    """The directories of a workspace's members, its root among them."""
    told = table(_described(workspace), "tool", "uv", "workspace")
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
    return parsed(text_of(os.path.join(folder, "pyproject.toml"))) or {}


def parsed(text: str) -> dict[str, Any] | None:
    """What a TOML text says; None for one that nobody can read: its tool will say why."""
    import tomllib  # few starts need it

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def table(told: Any, *names: str) -> dict[str, Any]:
    """A table within another one; empty where there is none."""
    for name in names:
        told = told.get(name) if isinstance(told, dict) else None
    return told if isinstance(told, dict) else {}


def sources_of(folder: str) -> Iterator[tuple[str, bool]]:
    """Paths in a project's dependencies and `tool.uv.sources`, and whether these are editable.

    Raises UsageError for one that is not there.
    """
    text = text_of(os.path.join(folder, "pyproject.toml"))
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        for address in re.findall(_FILE_ADDRESS, text_of(os.path.join(folder, name))):
            path = path_of(address)
            if path is None or not os.path.exists(full := joined(folder, path)):
                raise UsageError(
                    f"cannot tell what {address} in {folder} is; name the install's directories "
                    "with --also"
                )
            yield full, False
    if "poetry" not in text and not ("sources" in text and re.search("path|workspace", text)):
        return
    tool = table(parsed(text), "tool")
    named = table(tool, "poetry", "dependencies") | table(tool, "uv", "sources")
    lists = (value if isinstance(value, list) else [value] for value in named.values())
    sources = [table(source) for one in lists for source in one]
    for source in sources:
        path, editable = source.get("path"), source.get("editable") or source.get("develop")
        if isinstance(path, str) and "\0" not in path:
            yield joined(folder, path), bool(editable)
    members = any(source.get("workspace") for source in sources)
    if members:
        root = workspace_of(folder)
        yield from ((path, True) for path in members_of(root) if path != folder)
