"""pip's settings files and variables: what they decide, and how uv is given the same.

uv reads none of pip's settings: on its own it would use another index than the install does. Which
files pip reads, and in which order, is taken from its `_internal/configuration.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from bootseer.depsnap.key.input_files import read_settings

FOR_ALL = "/etc/pip.conf"
_SECTIONS = ("global", "install")
_LISTS = ("constraint", "requirement", "build-constraint")
_ADDING = ("requirement", "editable", "group")
"""Options by which every install adds packages."""
_INPUTS = ("constraint", *_ADDING)
_PLACES = ("target", "prefix", "root", "user", "python", "src", "report")

# By pip's name of an option: uv's variable, and what separates several values there.
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


def environment_for_uv(environ: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """The variables of a start, and pip's options as those of uv's variables that are not set.

    pip takes the best version of all its indexes, and so does uv here.
    """
    out = {"UV_INDEX_STRATEGY": "unsafe-best-match", **environ}
    for option, (variable, separator) in _AS_UV.items():
        value = options.get(option, "")
        if option in _SWITCHES:
            value = _SWITCHES[option] if is_on(options, option) else ""
        elif separator:
            value = separator.join(value.split())
        if value and variable not in out:
            out[variable] = value
    return out


def settings_files(environ: Mapping[str, str], prefix: str, cwd: str) -> list[str]:
    """Where a pip that runs in `cwd` looks for settings, there or not: later files win.

    `prefix` is the environment that it installs into, whose own pip.conf is read too.
    """
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return []
    out = [*(os.path.join(f, "pip", "pip.conf") for f in machine_folders(environ)), FOR_ALL]
    if not (chosen and os.path.exists(os.path.join(cwd, chosen))):
        legacy = os.path.join(_home(environ), ".pip")
        out += [os.path.join(f, "pip.conf") for f in (legacy, f"{user_folder(environ)}/pip")]
    out += [os.path.join(prefix, "pip.conf")] if prefix else []
    return [*out, *([chosen] if chosen else [])]


def machine_folders(environ: Mapping[str, str]) -> list[str]:
    """Directories of settings for all users, by the XDG Base Directory Specification.

    pip takes a `~` there for the user's home (pip: _vendor/platformdirs/unix.py).
    """
    named = environ.get("XDG_CONFIG_DIRS", "")
    folders = named.split(os.pathsep) if named.strip() else ["/etc/xdg"]
    return [_home(environ) + f[1:] if f == "~" or f[:2] == "~/" else f for f in folders]


def user_folder(environ: Mapping[str, str]) -> str:
    """The directory of this user's settings, by the same specification."""
    named = environ.get("XDG_CONFIG_HOME", "")
    return named if named.strip() else os.path.join(_home(environ), ".config")


def _home(environ: Mapping[str, str]) -> str:
    """The user's home as pip has it of `os.path.expanduser`: without HOME, the passwd file's."""
    if "HOME" in environ:
        return environ["HOME"] or "/"
    import pwd  # nearly all have a HOME

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def read(environ: Mapping[str, str], prefix: str, cwd: str) -> dict[str, str]:
    """The options of a pip that runs in `cwd`; a file that cannot be read sets none."""
    return _options(_texts(environ, prefix, cwd), environ)


def input_options(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """As `read`, for files with these texts; of their options those that name lists and packages.

    Most texts name none: those are not parsed.
    """
    return _options([t for t in texts if any(name in t.lower() for name in _INPUTS)], environ)


def place_options(environ: Mapping[str, str], prefix: str, cwd: str) -> dict[str, str]:
    """As `read`; of the options those that say where pip installs to."""
    texts = _texts(environ, prefix, cwd)
    options = _options([t for t in texts if any(name in t.lower() for name in _PLACES)], environ)
    return {name: options[name] for name in _PLACES if name in options}


def _texts(environ: Mapping[str, str], prefix: str, cwd: str) -> list[str]:
    return [read_settings(os.path.join(cwd, path)) for path in settings_files(environ, prefix, cwd)]


def is_on(options: Mapping[str, str], option: str) -> bool:
    """Whether a switch is set (pip: _internal/utils/misc.py, strtobool)."""
    return options.get(option, "").lower() in _YES


def input_lists(options: Mapping[str, str]) -> list[str]:
    """The files that options name: each install by pip reads them."""
    named = [word for option in _LISTS for word in options.get(option, "").split()]
    groups = options.get("group", "").split()
    return named + [group.rpartition(":")[0] or "pyproject.toml" for group in groups]


def add_packages(options: Mapping[str, str]) -> bool:
    """Whether options let each install by pip add more packages than its words name."""
    return any(options.get(option) for option in _ADDING)


def _options(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """For each option `[install]` wins over `[global]`, variables win over both, and empty values
    do not count (pip: _internal/cli/parser.py, _get_ordered_configuration_items)."""
    return _of_files([text for text in texts if text]) | _of_variables(environ)


def _of_files(texts: Sequence[str]) -> dict[str, str]:
    """The options in settings files; one that cannot be parsed sets none, and pip will complain."""
    if not texts:
        return {}
    import configparser  # most nodes have no such file

    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for text in texts:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        for section in filter(parser.has_section, _SECTIONS):
            by_section[section] |= {_normal_name(n): value for n, value in parser.items(section)}
    return {n: value for options in by_section.values() for n, value in options.items() if value}


def _of_variables(environ: Mapping[str, str]) -> dict[str, str]:
    named = ((name[4:], environ[name]) for name in environ if name.startswith("PIP_"))
    return {_normal_name(name): value for name, value in named if value}


def _normal_name(name: str) -> str:
    """An option's one name (pip: _internal/configuration.py, _normalize_name)."""
    return name.lower().replace("_", "-").removeprefix("--")
