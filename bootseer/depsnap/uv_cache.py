"""Whether uv would link a snapshot's packages from its own cache, faster than they are unpacked.

The answer decides how fast an install is, never its result: where it is wrong, the user's command
takes longer; where that fails, as with an index that is down, the snapshot is restored after all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from bootseer.depsnap.key import uv_config

_LINKING = ("hardlink", "symlink")
_OTHERWISE = frozenset(
    [
        *("--no-cache", "--no-cache-dir", "-n", "--refresh", "--refresh-package", "--config-file"),
        *("--reinstall", "--force-reinstall", "--reinstall-package", "--compile-bytecode"),
        *("--compile", "--no-binary", "--no-binary-package"),
    ]
)
"""Options by which uv does not link from its cache, or does more."""
_OTHERWISE_VARIABLES = ("UV_NO_CACHE", "UV_COMPILE_BYTECODE", "UV_CONFIG_FILE")
_SETTINGS = ("link-mode", "cache-dir", "no-cache", "compile-bytecode")
_SETTINGS_BYTES = 1 << 20


def would_link(
    command: Sequence[str],
    environ: Mapping[str, str],
    cwd: str,
    root: str,
    packages: Mapping[str, str],
) -> bool:
    """Whether a command of uv links these packages (name -> version) from uv's cache into `root`.

    `root` exists. False where uv's settings cannot be seen from here.
    """
    if not packages:
        return False
    if any(map(environ.get, _OTHERWISE_VARIABLES)):
        return False
    if any(word.partition("=")[0] in _OTHERWISE for word in command):
        return False
    mode = _option(command, "--link-mode") or environ.get("UV_LINK_MODE") or _LINKING[0]
    if mode not in _LINKING or _may_be_set_in_files(environ, cwd):
        return False
    cache = _cache_folder(command, environ, cwd)
    try:
        if os.stat(os.path.join(cache, "archive-v0")).st_dev != os.stat(root).st_dev:
            return False
        return _has_all(cache, packages)
    except OSError:
        return False


def _option(command: Sequence[str], option: str) -> str:
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else "".join(command[number + 1 : number + 2])
    return ""


def _cache_folder(command: Sequence[str], environ: Mapping[str, str], cwd: str) -> str:
    named = _option(command, "--cache-dir") or environ.get("UV_CACHE_DIR")
    if named:
        return os.path.join(cwd, named)
    above = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    return os.path.join(above, "uv")


def _may_be_set_in_files(environ: Mapping[str, str], cwd: str) -> bool:
    """Whether a settings file may say where uv's cache is or how it links."""
    paths = [os.path.join(cwd, path) for path in uv_config.settings_files(environ)]
    paths += uv_config.settings_upwards(cwd)
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            text = file.read(_SETTINGS_BYTES)
            if any(name.encode() in text for name in _SETTINGS):
                return True
    return False


def _has_all(cache: str, packages: Mapping[str, str]) -> bool:
    """Whether each package's wheel is there, of whichever index.

    uv's layout: `wheels-vN/pypi/NAME/VERSION-…`, and `wheels-vN/KIND/DIGEST/NAME/…` for other
    indexes; a wheel is a folder there, or a link to one.
    """
    folders = list(_index_folders(cache))
    for name, version in packages.items():
        at = next((n for n, f in enumerate(folders) if _has_wheel(f, name, version)), None)
        if at is None:
            return False
        folders.insert(0, folders.pop(at))  # most are of one index
    return True


def _index_folders(cache: str) -> Iterator[str]:
    for bucket in _names(cache):
        if not bucket.startswith("wheels-v"):
            continue
        yield f"{cache}/{bucket}/pypi"
        for kind in ("index", "url", "path"):
            above = f"{cache}/{bucket}/{kind}"
            for digest in _names(above):
                yield f"{above}/{digest}"


def _has_wheel(folder: str, name: str, version: str) -> bool:
    return any(
        entry.startswith(f"{version}-") and os.path.isdir(f"{folder}/{name}/{entry}")
        for entry in _names(f"{folder}/{name}")
    )


def _names(folder: str) -> Collection[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
