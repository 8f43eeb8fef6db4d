"""What pip's and apt's configuration names on this machine, found by asking both.

A registry, a certificate or a folder of packages is the machine's business: a bare root without
them could not install anything. So these are given to it, and no path or host stands here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

APT_FOLDER = "Dir::Etc"
_LINE = re.compile(r'^(?P<name>[\w:/.-]+) "(?P<value>.*)";$')
_PATHS_OF_APT = re.compile(r"(?:file:|copy:)?(/[^\s\]\[,;\"']+)")


@dataclass(frozen=True, slots=True)
class Configuration:
    """`paths` are files and folders to be seen, read-only, where they are; `in_home` are files of
    the caller's home by their place below it; `variables` go into every command's environment."""

    paths: tuple[str, ...]
    in_home: Mapping[str, str]
    variables: Mapping[str, str]


def read_configuration(environ: Mapping[str, str] = os.environ) -> Configuration:
    """What there is here. Raises RuntimeError when pip or apt cannot tell."""
    files = list(_pip_files(_said(sys.executable, "-m", "pip", "config", "debug")))
    values = pip_values(_said(sys.executable, "-m", "pip", "config", "list"))
    home = os.path.expanduser("~")
    in_home = {os.path.relpath(f, home): f for f in files if f.startswith(f"{home}/")}
    found = [f for f in files if f not in in_home.values()]
    found += [path for name, value in values for path in named_paths(name, value)]
    found += _apt_paths(_said("apt-config", "dump"))
    paths = sorted({path for path in found if os.path.exists(path)})
    return Configuration(tuple(_outermost(paths)), in_home, pip_variables(environ, values))


def pip_values(listed: str) -> list[tuple[str, str]]:
    """Names and values in what `pip config list` prints: `global.cert='/a/b'`."""
    out = []
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            out.append((name.rpartition(".")[2], str(ast.literal_eval(value))))
    return out


def pip_variables(environ: Mapping[str, str], values: Iterable[tuple[str, str]]) -> dict[str, str]:
    """pip's own variables, without what describes this process or this machine's caches."""
    mine = {"PIP_CACHE_DIR", "PIP_LOG", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_CONFIG_FILE"}
    out = {k: v for k, v in environ.items() if k.startswith("PIP_") and k not in mine}
    # The settings of a home are lost to a program that is given another one; these are not.
    certificates = [value for name, value in values if name == "cert"]
    return out | ({"PIP_CERT": certificates[-1]} if certificates else {})


def named_paths(name: str, value: str) -> Iterator[str]:
    """Local files and folders that an option of pip names."""
    for word in value.split():
        url = urlsplit(word)
        path = unquote(url.path) if url.scheme == "file" else word
        if not path.startswith("/"):
            continue
        path = path.rstrip("/")
        # The pages of an index refer to files beside it.
        above = os.path.dirname(path)
        yield above if name.endswith("index-url") and above != "/" else path


def _pip_files(told: str) -> Iterator[str]:
    for line in told.splitlines():
        path, comma, exists = line.strip().rpartition(", exists: ")
        if comma and exists == "True":
            yield path


def _apt_paths(dumped: str) -> list[str]:
    """apt's folder of settings, and the files that its settings and sources name."""
    named = [m for m in map(_LINE.match, dumped.splitlines()) if m]
    folders = {m["name"]: m["value"] for m in named if m["name"].startswith("Dir")}
    settings = os.path.join(folders.get("Dir", "/"), folders[APT_FOLDER])
    # Of its settings those that fetch; programs are the root's own.
    fetching = [m["value"] for m in named if m["name"].startswith("Acquire::")]
    out = [settings, *(value for value in fetching if value.startswith("/"))]
    sources = [Path(settings) / folders.get("Dir::Etc::sourcelist", "sources.list")]
    parts = Path(settings) / folders.get("Dir::Etc::sourceparts", "sources.list.d")
    sources += sorted([*parts.glob("*.list"), *parts.glob("*.sources")])
    for file in (f for f in sources if f.is_file()):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(("deb", "URIs:", "Signed-By:")):
                local = (m[1] for m in _PATHS_OF_APT.finditer(re.sub(r"\w+://[^/\s]\S*", "", line)))
                out += [path for path in local if os.path.exists(path)]
    return out


def _outermost(paths: Iterable[str]) -> Iterator[str]:
    """Without what lies below another one; the paths in sorted order."""
    last = ""
    for path in paths:
        if not last or not path.startswith(f"{last}/"):
            last = path
            yield path


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout
