"""What pip is told by its settings files and variables, said again to uv.

uv reads nothing of pip's: asked by itself, it would take another index than the install does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from bootseer.regular_files import opener

# Of https://pip.pypa.io/en/stable/topics/configuration/: later files win over earlier ones.
FOR_ALL = ("/etc/xdg/pip/pip.conf", "/etc/pip.conf")
FOR_USER = ("~/.pip/pip.conf", "~/.config/pip/pip.conf")
_SECTIONS = ("global", "install")

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
    told = _of_files(_files(environ, prefix)) | _of_variables(environ)
    for option, (variable, between) in _AS_UV.items():
        value = told.get(option, "")
        if option in _SWITCHES:
            value = _SWITCHES[option] if value.lower() in _YES else ""
        elif between:
            value = between.join(value.split())
        if value and variable not in out:
            out[variable] = value
    return out


def _files(environ: Mapping[str, str], prefix: str) -> list[str]:
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = environ.get("HOME", "/")
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    user = [p.replace("~/.config", config).replace("~", home) for p in FOR_USER]
    own = [os.path.join(prefix, "pip.conf")] if prefix else []
    return [*FOR_ALL, *user, *own, *([named] if named else [])]


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
