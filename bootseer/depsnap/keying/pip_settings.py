"""What pip is told by its settings files and variables: it decides, and is said again to uv.

uv reads nothing of pip's: asked by itself, it would take another index than the install does.
Which files pip reads, and in which order, is of its `_internal/configuration.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from bootseer.regular_files import opener

FOR_ALL = "/etc/pip.conf"
_SECTIONS = ("global", "install")
_NAME_FILES = ("constraint", "requirement", "build-constraint")

# By pip's name of an option: uv's variable, and what stands between several values there.
_AS_UV = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", ""),
    "no-index": ("UV_NO_INDEX", ""),
    "pre": ("UV_PRERELEASE", ""),
}
_SWITCHES = {"no-index": "1", "pre": "allow"}
_YES = frozenset({"1", "true", "yes", "on", "t", "y"})


def environment_for_uv(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The variables of a start, with pip's settings as uv's where those do not stand there.

    `prefix` is the environment that pip installs into, whose own pip.conf counts. pip takes the
    best version of all its indexes, and so does uv here.
    """
    out = {"UV_INDEX_STRATEGY": "unsafe-best-match", **environ}
    told = _of_files(files(environ, prefix)) | _of_variables(environ)
    for option, (variable, between) in _AS_UV.items():
        value = told.get(option, "")
        if option in _SWITCHES:
            value = _SWITCHES[option] if value.lower() in _YES else ""
        elif between:
            value = between.join(value.split())
        if value and variable not in out:
            out[variable] = value
    return out


def files(environ: Mapping[str, str], prefix: str) -> list[str]:
    """Where pip looks for settings, there or not: later files win over earlier ones."""
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return []
    out = [*(os.path.join(f, "pip", "pip.conf") for f in machine_folders(environ)), FOR_ALL]
    if not (chosen and os.path.exists(chosen)):
        legacy = os.path.join(environ.get("HOME", "/"), ".pip")
        out += [os.path.join(f, "pip.conf") for f in (legacy, f"{user_folder(environ)}/pip")]
    out += [os.path.join(prefix, "pip.conf")] if prefix else []
    return [*out, *([chosen] if chosen else [])]


def machine_folders(environ: Mapping[str, str]) -> list[str]:
    """Where settings for all users lie, by the XDG Base Directory Specification."""
    named = environ.get("XDG_CONFIG_DIRS", "")
    return named.split(os.pathsep) if named.strip() else ["/etc/xdg"]


def user_folder(environ: Mapping[str, str]) -> str:
    """Where settings of this user lie, by the same."""
    return environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")


def named_files(paths: Sequence[str]) -> list[str]:
    """The lists and constraints that settings files name: each install by pip reads them."""
    told = _of_files(paths)
    return [word for option in _NAME_FILES for word in told.get(option, "").split()]


def _of_files(paths: Sequence[str]) -> dict[str, str]:
    """Options by name; what cannot be read or parsed says nothing, and pip itself will complain."""
    there = [path for path in paths if os.path.lexists(path)]
    if not there:
        return {}
    import configparser  # most nodes have no such file

    parser = configparser.RawConfigParser()
    for path in there:
        try:
            with open(path, encoding="utf-8", opener=opener) as file:
                parser.read_file(file)
        except (OSError, UnicodeError, configparser.Error):
            continue
    told: dict[str, str] = {}
    for section in _SECTIONS:
        if parser.has_section(section):
            told |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    return told


def _of_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        option: environ[name]
        for option in _AS_UV
        if environ.get(name := "PIP_" + option.upper().replace("-", "_"))
    }
