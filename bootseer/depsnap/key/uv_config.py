"""What uv reads besides requirements: projects, their workspaces, and settings files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from bootseer.depsnap.key.input_files import find_upwards, join, local_path, read_settings
from bootseer.depsnap.key.pip_settings import machine_folders, user_folder
from bootseer.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FILE_ADDRESS = r"@\s*(file:[^\s\"';]+|\{root[^\s\"';]*)"
_FOR_ALL = "/etc/uv/uv.toml"
_PLACES = ("target", "prefix", "python", "torch-backend")
"""Settings of `uv pip` that say where, or for what, it installs."""
_VERSIONS = (".python-version", ".python-versions")


def parse_toml(text: str) -> dict[str, Any] | None:
    """What a TOML text holds; None for one that cannot be parsed: its tool will say why."""
    import tomllib  # few starts need it

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def table(document: Any, *names: str) -> dict[str, Any]:
    """A table within another one; empty where there is none."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


# --- projects -------------------------------------------------------------------------------------


def workspace_of(project: str) -> str:
    """The root of the workspace that a project is a member of, where uv puts the environment.

    The project itself, where it is in none.
    """
    above = project
    while True:
        description = _read_description(above)
        workspace = table(description, "tool", "uv", "workspace")
        if "workspace" in table(description, "tool", "uv"):
            members, others = (
                _find_matching(above, workspace.get(n)) for n in ("members", "exclude")
            )
            return above if project in members and project not in others else project
        higher = os.path.dirname(above)
        if higher == above or (above != project and "project" in description):
            return project
        above = higher


def members_of(workspace: str) -> list[str]:
    """The directories of a workspace's members, its root among them."""
    described = table(_read_description(workspace), "tool", "uv", "workspace")
    members, others = (_find_matching(workspace, described.get(n)) for n in ("members", "exclude"))
    return sorted({workspace, *members} - others)


def required_python(folder: str) -> str:
    """What a project and its workspace's members require of Python; "" where none is described."""
    project = find_upwards(folder, "pyproject.toml")
    if project is None:
        return ""
    places = dict.fromkeys((project, *members_of(workspace_of(project))))
    required = (table(_read_description(p), "project").get("requires-python") for p in places)
    return " ".join(version for version in required if isinstance(version, str))


def sources_of(folder: str) -> Iterator[tuple[str, bool]]:
    """Paths in a project's dependencies and `tool.uv.sources`, and whether these are editable.

    Raises UsageError for a path that does not exist.
    """
    text = read_settings(os.path.join(folder, "pyproject.toml"))
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        for address in re.findall(_FILE_ADDRESS, read_settings(os.path.join(folder, name))):
            path = local_path(address)
            if path is None or not os.path.exists(full := join(folder, path)):
                raise UsageError(
                    f"cannot tell what {address} in {folder} is; name the install's directories "
                    "with --also"
                )
            yield full, False
    if "poetry" not in text and not ("sources" in text and re.search("path|workspace", text)):
        return
    tool = table(parse_toml(text), "tool")
    named = table(tool, "poetry", "dependencies") | table(tool, "uv", "sources")
    lists = (value if isinstance(value, list) else [value] for value in named.values())
    sources = [table(source) for one in lists for source in one]
    for source in sources:
        path, editable = source.get("path"), source.get("editable") or source.get("develop")
        if isinstance(path, str) and "\0" not in path:
            yield join(folder, path), bool(editable)
    if any(source.get("workspace") for source in sources):
        root = workspace_of(folder)
        yield from ((path, True) for path in members_of(root) if path != folder)


def _find_matching(root: str, patterns: object) -> set[str]:
    """The directories that a workspace's patterns match."""
    import glob

    texts = [p for p in patterns if isinstance(p, str)] if isinstance(patterns, list) else []
    paths = (p for t in texts for p in glob.glob(f"{glob.escape(root)}/{t}", recursive=True))
    return {os.path.normpath(path) for path in paths}


def _read_description(folder: str) -> dict[str, Any]:
    """A directory's `pyproject.toml`; empty where there is none that can be parsed."""
    return parse_toml(read_settings(os.path.join(folder, "pyproject.toml"))) or {}


# --- settings -------------------------------------------------------------------------------------


def settings_files(environ: Mapping[str, str]) -> list[str]:
    """Settings files of the machine and the user, and that of UV_CONFIG_FILE, there or not."""
    folders = [*machine_folders(environ), user_folder(environ)]
    out = [_FOR_ALL, *(os.path.join(folder, "uv", "uv.toml") for folder in folders)]
    return [*out, *([environ["UV_CONFIG_FILE"]] if environ.get("UV_CONFIG_FILE") else [])]


def user_version_files(environ: Mapping[str, str]) -> list[str]:
    """Where the user may ask for a version of Python for all projects."""
    return [os.path.join(user_folder(environ), "uv", name) for name in _VERSIONS]


def settings_upwards(folder: str) -> list[str]:
    """The files of a directory and those above it that may hold settings or ask for a Python.

    uv itself takes the nearest, or the workspace's: whichever it is, it is among them.
    """
    out = []
    here = folder
    while True:
        names = (*_VERSIONS, "uv.toml", "pyproject.toml")
        paths = [path for name in names if os.path.exists(path := os.path.join(here, name))]
        out += [p for p in paths if not p.endswith("pyproject.toml") or _has_settings(p)]
        if os.path.dirname(here) == here:
            return out
        here = os.path.dirname(here)


def _has_settings(path: str) -> bool:
    text = read_settings(path)
    if "uv" not in text:
        return False
    document = parse_toml(text)
    return document is None or "uv" in table(document, "tool")


def any_sets_place(paths: Iterable[str]) -> bool:
    """Whether any of these files says where `uv pip` installs."""
    return any(map(_sets_place, paths))


def _sets_place(path: str) -> bool:
    text = read_settings(path)
    if "pip" not in text:
        return False
    document = parse_toml(text)
    if document is None:
        return True
    named = ("tool", "uv") if os.path.basename(path) == "pyproject.toml" else ()
    settings = table(document, *named, "pip")
    return any(name in settings for name in _PLACES) or settings.get("system") is True
