"""What pip is told by its settings files and variables: it decides, and is said again to uv.

uv reads nothing of pip's: asked by itself, it would take another index than the install does.
Which files pip reads, and in which order, is of its `_internal/configuration.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from bootseer.system.regular_files import opener

FOR_ALL = "/etc/pip.conf"
_SECTIONS = ("global", "install")
_LISTS = ("constraint", "requirement", "build-constraint")
_MORE = ("requirement", "editable", "group")
_SIGNS = ("constraint", *_MORE)
_PLACES = ("target", "prefix", "root", "user", "python", "src", "report")

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


def environment_for_uv(environ: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
    """The variables of a start, with what pip is `told` as uv's where those do not stand there.

    pip takes the best version of all its indexes, and so does uv here.
    """
    out = {"UV_INDEX_STRATEGY": "unsafe-best-match", **environ}
    for option, (variable, between) in _AS_UV.items():
        value = told.get(option, "")
        if option in _SWITCHES:
            value = _SWITCHES[option] if is_on(told, option) else ""
        elif between:
            value = between.join(value.split())
        if value and variable not in out:
            out[variable] = value
    return out


def files(environ: Mapping[str, str], prefix: str, cwd: str) -> list[str]:
    """Where a pip that runs in `cwd` looks for settings, there or not: later files win.

    `prefix` is the environment that it installs into, whose own pip.conf counts.
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
    """Where settings for all users lie, by the XDG Base Directory Specification.

    pip takes a `~` there for the user's home (pip: _vendor/platformdirs/unix.py).
    """
    named = environ.get("XDG_CONFIG_DIRS", "")
    folders = named.split(os.pathsep) if named.strip() else ["/etc/xdg"]
    return [_home(environ) + f[1:] if f == "~" or f[:2] == "~/" else f for f in folders]


def user_folder(environ: Mapping[str, str]) -> str:
    """Where settings of this user lie, by the same."""
    named = environ.get("XDG_CONFIG_HOME", "")
    return named if named.strip() else os.path.join(_home(environ), ".config")


def _home(environ: Mapping[str, str]) -> str:
    """The user's home as `os.path.expanduser` tells it to pip: without HOME, passwd's."""
    if "HOME" in environ:
        return environ["HOME"] or "/"
    import pwd  # nearly all have a HOME

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def read(environ: Mapping[str, str], prefix: str, cwd: str) -> dict[str, str]:
    """What a pip that runs in `cwd` is told, by option; a file that cannot be read says nothing."""
    texts = [text_of(os.path.join(cwd, path)) for path in files(environ, prefix, cwd)]
    return _told(texts, environ)


def naming(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The same of files of these texts, for what names lists and packages alone.

    Most texts name none: those are not parsed.
    """
    return _told([t for t in texts if any(sign in t.lower() for sign in _SIGNS)], environ)


def placing(environ: Mapping[str, str], prefix: str, cwd: str) -> dict[str, str]:
    """As `read`, of what says where pip installs to."""
    texts = [text_of(os.path.join(cwd, path)) for path in files(environ, prefix, cwd)]
    told = _told([t for t in texts if any(sign in t.lower() for sign in _PLACES)], environ)
    return {option: told[option] for option in _PLACES if option in told}


def is_on(options: Mapping[str, str], option: str) -> bool:
    """Whether a switch is set (pip: _internal/utils/misc.py, strtobool)."""
    return options.get(option, "").lower() in _YES


def lists(options: Mapping[str, str]) -> list[str]:
    """The files that options name: each install by pip reads them."""
    named = [word for option in _LISTS for word in options.get(option, "").split()]
    groups = options.get("group", "").split()
    return named + [group.rpartition(":")[0] or "pyproject.toml" for group in groups]


def adds(options: Mapping[str, str]) -> bool:
    """Whether each install by pip brings more than its words say."""
    return any(options.get(option) for option in _MORE)


def _told(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Of one option `[install]` wins over `[global]`, variables win over both, and what is empty
    says nothing (pip: _internal/cli/parser.py, _get_ordered_configuration_items)."""
    return _of_files([text for text in texts if text]) | _of_variables(environ)


def text_of(path: str) -> str:
    """A settings file's text, "" for one that cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", opener=opener) as file:
            return file.read()
    except OSError:
        return ""


def _of_files(texts: Sequence[str]) -> dict[str, str]:
    """A text that cannot be parsed says nothing, and pip itself will complain."""
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
            by_section[section] |= {_normal(n): value for n, value in parser.items(section)}
    return {n: value for found in by_section.values() for n, value in found.items() if value}


def _of_variables(environ: Mapping[str, str]) -> dict[str, str]:
    named = ((name[4:], environ[name]) for name in environ if name.startswith("PIP_"))
    return {_normal(name): value for name, value in named if value}


def _normal(name: str) -> str:
    """An option's one name (pip: _internal/configuration.py, _normalize_name)."""
    return name.lower().replace("_", "-").removeprefix("--")
